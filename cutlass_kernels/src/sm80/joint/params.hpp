// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to the joint kernel.
#pragma once

#include "cutlass/fast_math.h"
#include "sm80/joint/geometry.hpp"
#include "sm80/kernel_params.hpp"

namespace convt3d::sm80::joint {

/// Where the weights of a tap lie, in elements: first + input channel * channel_step + output channel.
struct TapWeights {
  int32_t first, channel_step;
  int32_t code;  // class + 8 * (a bit for each dimension whose next voxel is read: 1 along D, 2 along H, 4 along W)
};

struct Params {
  void const* x;        // channels contiguous
  int64_t x_stride[4];  // (N, D, H, W), in elements
  void const* weight;
  TapWeights taps[kMaxTaps];
  int32_t x_channels, weight_channels;  // input channels, padded where the pre-pass has padded them
  int32_t weight_columns;               // output channels, likewise
  int32_t batch, in_size[3], out_size[3];
  int32_t positions, channel_tiles;
  XRows x_rows;
  cutlass::FastDivmod divide_d, divide_h, divide_w;
  int32_t stages;  // of a part
  int32_t parts;
  float* partial_sums;  // of more than one part
  int32_t row_log;      // the lanes of an NCDHW access run along 2^row_log positions of both H parities
  bool channels_last;
  bool vectors;  // y and add take whole accesses: 16 bytes of channels, or the two outputs of a pair along W
  TailParams tail;
  int64_t y_stride[4], add_stride[4];  // (N, D, H, W); the channels' are the tail's
};

/// A position, from its number.
struct Position {
  int n, d, h, w;

  CUTLASS_DEVICE Position(Params const& p, int number) {
    int rest;
    p.divide_w(rest, w, number);
    p.divide_h(rest, h, rest);
    p.divide_d(n, d, rest);
  }
};

}  // namespace convt3d::sm80::joint
