// SPDX-License-Identifier: Apache-2.0
//
// The pre-kernel: writes every class's weights, rounded to TF32, as the shared-memory image that wgmma reads
// (64 x 32 blocks, rows of 128 bytes, 128-byte swizzle), zeroes the scheduler's counters and the cold path's
// flags. Microseconds; the main kernel starts beside it and waits for it.
#pragma once

#include <cuda_runtime.h>

#include "sm90/params.hpp"

namespace convt3d::sm90 {

struct WeightParams {
  GroupProgram program[kGroups];
  float const* weight;
  int64_t weight_stride[5];
  int32_t in_channels, out_channels;
  int32_t kernel[3], padding[3], window_lo[3];
  int32_t classes, blocks;  // blocks per class
  unsigned char* image;
  int32_t* counters;
  int32_t* owners;
  int64_t owner_count;
  int32_t* suspect;  // one per CTA of this kernel: whether it saw a weight that may make sums non-finite
};

/// Enqueues the pre-kernel. The main kernel may be launched as its programmatic dependent.
cudaError_t prepare_weights(WeightParams const& params, cudaStream_t stream);

}  // namespace convt3d::sm90
