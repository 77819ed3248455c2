// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to the kernel.
#pragma once

#include "sm90/params.hpp"

namespace convt3d::sm90::product {

struct ProductParams {
  CUtensorMap x_map, weight_map;  // over (input channels, positions) and (columns, input channels)
  int32_t positions, columns, steps, tiles;
  int32_t warpgroups, stages;
  cutlass::FastDivmod position_tiles, divide_channels;   // of a block, of a column
  cutlass::FastDivmod divide_w, divide_h, divide_d;      // of a position
  cutlass::FastDivmod divide_kernel_w, divide_kernel_h;  // of a tap
  int32_t y_step[5], y_tap[3], add_step[5], add_tap[3];  // elements from a position, and from a tap, to the next
  MainloopParams mainloop;                               // x, its strides and its size
  EpilogueParams epilogue;                               // all but the maps
  ColdParams cold;
};

}  // namespace convt3d::sm90::product
