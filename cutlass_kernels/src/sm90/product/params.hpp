// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to the kernel.
#pragma once

#include "sm90/params.hpp"
#include "sm90/product/boxes.hpp"

namespace convt3d::sm90::product {

/// Of a residue class along D, H and W: its first output and how many there are, its taps and the first of them in the
/// kernel, and which input the first output takes with that.
struct BoxClass {
  int32_t residue[3], outputs[3], taps[3], first_tap[3], base[3];
};

/// For boxes alone.
struct BoxParams {
  Box box;
  int32_t rows;                                        // of positions in it
  cutlass::FastDivmod divide_box[4], divide_tiles[4];  // sizes of a box, numbers of tiles
  cutlass::FastDivmod divide_columns;                  // tiles along the output channels
  BoxClass cls[kMostClasses];                          // those with the most taps first
};

struct ProductParams {
  CUtensorMap x_map;              // over (input channels, positions); for boxes over (input channels, W, H, D, N)
  CUtensorMap weight_map;         // over (columns, input channels)
  int32_t positions;              // for boxes samples: the other sizes are the classes'
  int32_t columns, steps, tiles;  // for boxes of a tap, as steps are
  int32_t channels;               // output channels, of which boxes may have fewer than columns
  int32_t warpgroups, stages;
  cutlass::FastDivmod position_tiles, divide_channels;   // of a block, of a column
  cutlass::FastDivmod divide_w, divide_h, divide_d;      // of a position
  cutlass::FastDivmod divide_kernel_w, divide_kernel_h;  // of a tap
  int32_t y_step[5], y_tap[3], add_step[5], add_tap[3];  // elements from a position, and from a tap, to the next
  BoxParams boxes;
  MainloopParams mainloop;  // x, its strides and its size
  EpilogueParams epilogue;  // all but the maps
  ColdParams cold;
};

}  // namespace convt3d::sm90::product
