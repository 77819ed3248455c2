// SPDX-License-Identifier: Apache-2.0
//
// What the patch-expansion kernel is told.
#pragma once

#include "cutlass/fast_math.h"
#include "sm80/patch/geometry.hpp"

namespace convt3d::sm80::patch {

/// y or add. Distances are in elements.
struct Side {
  void* base;
  int64_t position[4];  // of voxels of x that are neighbours along (N, D, H, W): a patch further
  int64_t tap[3];
  int64_t channel;
  int64_t element;  // of a unit
  Access access;
};

struct Params {
  void const* x;
  int64_t x_position[4];  // (N, D, H, W)
  int64_t x_channel;
  bool x_in_vectors;  // channels in 16-byte accesses
  void const* weight;
  int64_t weight_stride[5];
  void* prepared;  // the weights as the instructions take them
  void const* bias;
  int64_t bias_stride;
  Side add, y;

  int in_channels, out_channels;
  int positions;  // voxels of x
  int width;      // of x
  cutlass::FastDivmod divide_w, divide_h, divide_d;
  // Weights: output channels, and taps along W and H.
  cutlass::FastDivmod divide_channels, divide_kw, divide_kh;
  // Units: those of a run, and runs along W.
  cutlass::FastDivmod divide_run, divide_runs;
  bool last;         // channels last
  int run;           // elements of a run, channels last
  int units;         // of all blocks
  int steps;         // of the input channels
  int groups;        // of all blocks
  int splits;        // of the groups, by blocks
  int split_groups;  // in a split, at most
  int tiles;         // of positions, one warp's each
  int parts;         // of a split's groups, by warps
  int part_groups;
  int workers;  // warps of all blocks with a split

  int activation;
  float negative_slope;
  bool add_after;
};
static_assert(sizeof(Params) <= 4096, "CUDA guarantees 4 KiB of kernel parameters");

}  // namespace convt3d::sm80::patch
