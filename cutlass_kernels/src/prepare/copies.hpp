// SPDX-License-Identifier: Apache-2.0
//
// How the pre-pass's copies lie: host arithmetic, without CUDA.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "convt3d/problem.hpp"

namespace convt3d {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

namespace prepare {

/// Channels in whole 16-byte accesses, by which the mainloops and the copy engine step.
constexpr int64_t padded_channels(int64_t channels, int element_bytes) {
  return round_up(channels, 16 / element_bytes);
}

/// Strides of a packed tensor, channels last, with room for `channels` in each voxel.
constexpr Size5 packed_stride(Size5 const& shape, int64_t channels) {
  Size5 stride{};
  stride.v[1] = 1;
  int64_t step = channels;
  for (int axis : {4, 3, 2, 0}) {
    stride.v[axis] = step;
    step *= shape[axis];
  }
  return stride;
}

/// The spacing of a sample's voxels where (D, H, W) are one equally spaced run, W fastest; -1 elsewhere.
constexpr int64_t flat_stride(int64_t const* size, int64_t const* stride) {
  int64_t spacing = 0, expected = -1;
  for (int axis = 2; axis >= 0; --axis) {
    if (size[axis] == 1) continue;
    if (expected == -1) spacing = expected = stride[axis];
    if (stride[axis] != expected) return -1;
    expected *= size[axis];
  }
  return spacing;
}

}  // namespace prepare
}  // namespace convt3d
