// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to the two kernels.
#pragma once

#include "cutlass/fast_math.h"
#include "sm80/columns/geometry.hpp"
#include "sm80/kernel_params.hpp"

namespace convt3d::sm80::columns {

/// The product: rows of x and of the weight are input channels, or with channels last those of x are positions.
struct ProductParams {
  void const* x;
  void const* weight;
  int64_t x_sample, x_row;  // elements from one to the next
  int64_t weight_row;
  int32_t channels, positions, columns;
  cutlass::FastDivmod volume;  // voxels of a sample
  cutlass::FastDivmod position_tiles;
  int32_t steps, steps_of_part;
  float* sums;  // [part][row][pitch]
  int64_t pitch, part_floats;
};

/// An axis of the gather: residue r of an output's coordinate has so many taps, and output r + j * stride takes tap t
/// of them from input j + base - t * input_step.
struct Axis {
  cutlass::FastDivmod stride;
  int32_t taps[kMostStride], base[kMostStride], first_tap[kMostStride];
  int32_t input_step, tap_distance;  // to the next tap of an output
  int32_t in_size;
  int32_t input_floats, tap_columns;  // to the next input in a row of positions, to the next tap in a row of columns
};

struct GatherParams {
  float const* sums;
  int32_t parts, part_floats;
  int32_t position_floats, column_floats;  // from one to the next: one of them is 1
  int32_t channel_step;                    // in columns
  int32_t volume;                          // positions of a sample
  Axis axis[3];
  int32_t outputs;  // groups of channels, one for each voxel of y
  cutlass::FastDivmod divide_w, divide_h, divide_d, divide_groups;
  int64_t y_stride[5], add_stride[5];
  bool vector_sums, vector_add, vector_y;  // groups of channels are whole accesses, with channels last
  TailParams tail;
  // For outputs that come out nan.
  void const* x;
  void const* weight;
  int64_t x_stride[5], weight_stride[5];
  int32_t in_channels;
};

}  // namespace convt3d::sm80::columns
