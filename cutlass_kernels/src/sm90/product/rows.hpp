// SPDX-License-Identifier: Apache-2.0
//
// Where the kernel is the stride, an output has one tap, and the operator is a matrix product with its tail:
//
//     y[position, (tap, channel)] = act(sum over input channels of x[position, k] * weight[k, (tap, channel)] + ...),
//
// x and the weight as they lie, channels last. Host code, tested on the CPU.
#pragma once

#include "sm90/product/geometry.hpp"

namespace convt3d::sm90::product {

constexpr int64_t positions(Problem const& p) { return p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2]; }

/// Whether the voxels of x, samples one after the other, are rows of one matrix.
constexpr bool rows_of_one_matrix(Problem const& p) {
  Size5 const shape = x_shape(p);
  int64_t step = 0, rows = 1;
  for (int axis : {4, 3, 2, 0}) {
    if (shape[axis] == 1) continue;
    if (step == 0) step = p.x_stride[axis];
    if (p.x_stride[axis] != step * rows) return false;
    rows *= shape[axis];
  }
  return true;
}

/// From a voxel of x to the next, in elements.
constexpr int64_t x_row(Problem const& p) {
  Size5 const shape = x_shape(p);
  for (int axis : {4, 3, 2, 0}) {
    if (shape[axis] > 1) return p.x_stride[axis];
  }
  return p.in_channels;
}

/// Whether the kernel takes a problem that the family takes as rows, with a weight that starts at a multiple of 16
/// bytes. Where channels are apart in y, rows gain nothing over boxes.
constexpr bool takes_rows(Problem const& p) {
  if (!has_fitting_tensors(p) || !has_pairs(p)) return false;
  Size3 const out = output_size(p);
  for (int axis = 0; axis < 3; ++axis) {
    if (p.kernel[axis] != p.stride[axis] || p.padding[axis] != 0) return false;
    if (out[axis] != p.stride[axis] * p.in_size[axis]) return false;  // planes that no tap reaches
  }
  if (positions(p) > kMostReach) return false;
  int64_t const bytes = element_bytes(p);
  if (weight_columns(p) * bytes % 128 != 0 || !rows_of_one_matrix(p)) return false;
  return is_copy_step(x_row(p) * bytes) && x_row(p) >= p.in_channels;
}

}  // namespace convt3d::sm90::product
