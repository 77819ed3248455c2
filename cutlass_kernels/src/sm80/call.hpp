// SPDX-License-Identifier: Apache-2.0
//
// The host's view of one sm80 run, free of templates: operands after the pre-pass, and where the classes' filters lie.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "convt3d/problem.hpp"

namespace convt3d::sm80 {

constexpr int kMaxTapsPerDim = 10;       // of one class; a row keeps a bit per tap, in 32 bits
constexpr int64_t kMaxInt = 0x7fffffff;  // CUTLASS's iterators address rows and samples with 32 bits
constexpr int kAccessBytes = 16;
constexpr int kMaxTileRows = 128;  // GEMM M of the largest tile in configs.hpp
constexpr int kMaxTileK = 32;      // and its K

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Channels as the mainloop sees them: whole 16-byte accesses.
constexpr int64_t padded_channels(int64_t channels, int element_bytes) {
  return round_up(channels, kAccessBytes / element_bytes);
}

// Whether the mainloop can read x where it lies. TF32 rounds x, so it always takes the pre-pass.
constexpr bool reads_x_in_place(Problem const& p) {
  int const bytes = element_bytes(p);
  return !uses_tf32(p) && p.x_stride[1] == 1 && p.in_channels == padded_channels(p.in_channels, bytes) &&
         access_bytes(x_shape(p), p.x_stride, 1, p.x_alignment, bytes) == kAccessBytes;
}

struct Call {
  Problem const* problem;
  void const* x;        // channels contiguous, padded
  int64_t x_stride[4];  // (N, D, H, W), in elements
  void const* filter;   // the classes' KTRSC filters, back to back
  int64_t k_channels;   // padded Cin
  int64_t c_channels;   // padded Cout
  void const* bias;
  void const* add;
  void* y;
  // Computed only where *condition (device memory) is not zero then, by what fits onto so many multiprocessors; null:
  // always.
  int32_t const* condition;
  int multiprocessors;
  bool overlap;  // with the pre-pass: the device lets a kernel start while the one before it still runs
};

// Largest number of samples that one launch can take, at least 1 for a supported problem.
constexpr int64_t samples_per_launch(Problem const& p, int64_t x_sample_stride) {
  int64_t rows = 1;
  for (int axis = 0; axis < 3; ++axis) rows *= (output_size(p, axis) + p.stride[axis] - 1) / p.stride[axis];
  int64_t const by_rows = (kMaxInt - kMaxTileRows) / (rows > 0 ? rows : 1);  // an empty output has no rows
  int64_t const by_x = x_sample_stride > 0 ? kMaxInt / x_sample_stride : by_rows;
  return by_rows < by_x ? by_rows : by_x;
}

// One compiled kernel.
using LaunchFn = cudaError_t (*)(Call const& call, cudaStream_t stream);

}  // namespace convt3d::sm80
