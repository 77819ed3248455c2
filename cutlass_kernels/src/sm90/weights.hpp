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
  int32_t taps_dense;  // those of neighbouring output channels are neighbours, in PyTorch's order
  int32_t kernel[3], padding[3], window_lo[3];
  int32_t channels_last;    // form of y
  int32_t weights_first;    // they are wgmma's A
  int32_t classes, blocks;  // blocks per class
  BlockPlaces places;
  int32_t offsets;
  int32_t class_bytes;
  unsigned char* image;
  int32_t* counters;
  int32_t* owners;
  int64_t owner_count;
  int32_t* suspect;  // one per CTA of this kernel: whether it saw a weight that may make sums non-finite
};

/// Which weight stands in row `row`, input channel `k` of weight block `slot` of a class.
struct WeightPlace {
  bool live;       // there is one; the image has a zero elsewhere
  int64_t offset;  // elements
};

#if defined(__CUDACC__)
/// Weight block `slot` of a class: which group's, and which of its blocks.
struct BlockPlace {
  int group;
  Block block;
};

__device__ inline BlockPlace block_place(WeightParams const& p, int slot) {
  int const group = slot >= p.program[0].count() ? 1 : 0;
  return {group, p.program[group].block(group == 0 ? slot : slot - p.program[0].count())};
}

__device__ inline WeightPlace weight_place(WeightParams const& p, int element, int cls, BlockPlace const& at, int row,
                                           int k) {
  Block const& block = at.block;
  BlockRow const target = block_row(p.channels_last, p.weights_first, element, cls, at.group, row);
  int const in_channel = block.channel_block * 32 + k;
  WeightPlace place{target.channel < p.out_channels && in_channel < p.in_channels,
                    in_channel * p.weight_stride[0] + target.channel * p.weight_stride[1]};
  for (int axis = 0; axis < 3; ++axis) {
    int const tap = tap_of(target.parity[axis], p.window_lo[axis] + block.delta[axis], p.padding[axis]);
    place.live = place.live && tap >= 0 && tap < p.kernel[axis];
    place.offset += tap * p.weight_stride[2 + axis];
  }
  return place;
}
#endif

/// Enqueues the pre-kernel. The main kernel may be launched as its programmatic dependent.
cudaError_t prepare_weights(WeightParams const& params, convt3d_dtype dtype, cudaStream_t stream);

}  // namespace convt3d::sm90
