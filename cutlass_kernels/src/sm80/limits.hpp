// SPDX-License-Identifier: Apache-2.0
//
// The sm80 family's limits and what it makes of channel counts: host arithmetic, without CUDA.
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"
#include "prepare/copies.hpp"

namespace convt3d::sm80 {

constexpr int kMaxTapsPerDim = 10;                // of one class; a row keeps a bit per tap, in 32 bits
constexpr int64_t kMaxInt = 0x7fffffff;           // CUTLASS's iterators address rows and samples with 32 bits
constexpr int64_t kMaxExtent = int64_t{1} << 20;  // of a size, a padding or a dilation
constexpr int kAccessBytes = 16;
constexpr int kMaxTileRows = 128;  // GEMM M of the largest tile in configs.hpp
constexpr int kMaxTileK = 32;      // and its K
constexpr int kStepBytes = 64;     // of a row of x in one iteration of the mainloop: K of every tile

using prepare::padded_channels;

/// Products that the longest sum of a problem has at most, with padded channels.
constexpr int64_t longest_sum(Problem const& p) {
  return most_taps(p) * padded_channels(p.in_channels, element_bytes(p));
}

// Whether the mainloop can read x where it lies. TF32 rounds x, so it always takes the pre-pass.
constexpr bool reads_x_in_place(Problem const& p) {
  int const bytes = element_bytes(p);
  return !uses_tf32(p) && p.x_stride[1] == 1 && p.in_channels == padded_channels(p.in_channels, bytes) &&
         access_bytes(x_shape(p), p.x_stride, 1, p.x_alignment, bytes) == kAccessBytes;
}

}  // namespace convt3d::sm80
