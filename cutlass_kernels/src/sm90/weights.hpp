// SPDX-License-Identifier: Apache-2.0
//
// The pre-kernel: writes every class's weights, rounded to TF32 where they are fp32, as the shared-memory image that
// wgmma reads (geometry.hpp), zeroes the scheduler's counters and the cold path's flags. Microseconds; the main kernel
// starts beside it and waits for it.
#pragma once

#include <cuda_runtime.h>

#include "sm90/params.hpp"

namespace convt3d::sm90 {

struct WeightParams {
  GroupProgram program[kGroups];
  void const* weight;
  int64_t weight_stride[5];
  int32_t in_channels, out_channels;
  int32_t kernel[3], padding[3], window_lo[3];
  int32_t channels_last;    // form of y
  int32_t classes, blocks;  // blocks per class
  unsigned char* image;
  int32_t* counters;
  int32_t* owners;
  int64_t owner_count;
  int32_t* suspect;  // one per CTA of this kernel: whether it saw a weight that may make sums non-finite
};

/// Enqueues the pre-kernel. The main kernel may be launched as its programmatic dependent.
cudaError_t prepare_weights(WeightParams const& params, convt3d_dtype dtype, cudaStream_t stream);

}  // namespace convt3d::sm90
