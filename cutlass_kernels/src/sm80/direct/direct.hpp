// SPDX-License-Identifier: Apache-2.0
//
// Small problems in one launch, without a pre-pass and without a workspace. There the host's time counts: two launches
// and an allocation take longer than the arithmetic, which plain fp32 multiply-adds do just as well.
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"

namespace convt3d::sm80::direct {

constexpr int kVoxels = 32;   // of one residue class, per thread block: one for each lane
constexpr int kChannels = 4;  // output channels per thread block
constexpr int kSlices = 8;    // of the input channels: one for each warp

/// What this kernel is given at most: products (of a tap, an input and an output channel each) in all and for one
/// output, outputs, and taps of the kernel. Beyond that it takes longer than the pre-pass and the tensor cores together
/// (docs/performance-log.md): a warp fetches an output's operands in few, dependent steps.
constexpr int64_t kMaxProducts = int64_t{1} << 21;
constexpr int64_t kMaxProductsOfOutput = 128;
constexpr int64_t kMaxOutputs = int64_t{1} << 16;
constexpr int64_t kMaxTaps = 64;
constexpr int64_t kMaxExtent = int64_t{1} << 16;  // of a size, a padding or a reach: coordinates stay within 32 bits

/// `value` * `factor`, cut to `limit` + 1. Both are at least 0 and `value` is at most that.
constexpr int64_t capped_product(int64_t value, int64_t factor, int64_t limit) {
  return value != 0 && factor > limit / value ? limit + 1 : value * factor;
}

/// Whether a problem without groups is so small.
constexpr bool takes(Problem const& p) {
  Size5 const y = y_shape(p), w = weight_shape(p);
  int64_t products = 1, outputs = 1;
  for (int64_t factor : {p.batch, p.in_size[0], p.in_size[1], p.in_size[2], w[0], w[1], w[2], w[3], w[4]}) {
    products = capped_product(products, factor, kMaxProducts);
  }
  for (int64_t extent : y.v) outputs = capped_product(outputs, extent, kMaxOutputs);
  if (capped_product(capped_product(w[2], w[3], kMaxTaps), w[4], kMaxTaps) > kMaxTaps) return false;
  if (products > kMaxProducts || outputs > kMaxOutputs || outputs == 0) return false;
  int64_t of_output = p.in_channels;
  for (int axis = 0; axis < 3; ++axis) {
    of_output *= most_taps(p, axis);  // bounded by the products
    int64_t const reach = capped_product(p.kernel[axis], p.dilation[axis], kMaxExtent);
    if (y[2 + axis] > kMaxExtent || p.padding[axis] > kMaxExtent || reach > kMaxExtent) return false;
  }
  if (of_output > kMaxProductsOfOutput) return false;
  return (y[1] + kChannels - 1) / kChannels <= 65535;  // the grid's third dimension
}

}  // namespace convt3d::sm80::direct
