// SPDX-License-Identifier: Apache-2.0
//
// The host's view of one sm80 run, free of templates: operands after the pre-pass, and where the classes' filters lie.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm80/limits.hpp"

namespace convt3d::sm80 {

struct Call {
  Problem const* problem;
  void const* x;         // channels contiguous, padded
  int64_t x_stride[4];   // (N, D, H, W), in elements
  int64_t x_block_step;  // elements from the channels of one iteration of the mainloop to those of the next
  void const* filter;    // the classes' KTRSC filters, back to back
  int64_t k_channels;    // padded Cin
  int64_t c_channels;    // padded Cout
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
