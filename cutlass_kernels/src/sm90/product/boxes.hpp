// SPDX-License-Identifier: Apache-2.0
//
// Where the kernel is larger than the stride, the outputs of one residue class are a matrix product, too:
//
//     y[position, channel] = act(sum over taps and input channels of x[position + tap's shift, k] * weight[k, (tap,
//     channel)] + ...).
//
// The copy engine brings in a box of positions, shifted by the tap, and zeros for what lies outside x. Every tap reads
// x again, from the L2 cache, so that this is for problems that are small all the same, where the streaming kernel's
// boxes of 16 x 8 positions are half empty. Host code, tested on the CPU.
#pragma once

#include <cstdint>

#include "sm90/product/geometry.hpp"

namespace convt3d::sm90::product {

constexpr int kMostClasses = 8;

/// Sizes along N, D, H and W.
struct Box {
  int32_t size[4];
  CONVT3D_HOST_DEVICE constexpr int rows() const { return size[0] * size[1] * size[2] * size[3]; }
};

/// Positions along N, D, H and W, of the class that has most: a position of a class is one output of it.
constexpr Box position_grid(Problem const& p) {
  Box grid{{static_cast<int32_t>(p.batch), 0, 0, 0}};
  for (int axis = 0; axis < 3; ++axis) {
    grid.size[1 + axis] = ceil_div(output_size(p, axis), p.stride[axis]);
  }
  return grid;
}

/// The largest size of at most `room` that divides `total` into parts as large as their number allows; 0 for no room.
constexpr int32_t fitting_size(int32_t total, int32_t room) {
  if (room == 0) return 0;
  return total <= room ? total : ceil_div(total, ceil_div(total, room));
}

/// The tiles of a problem, which are boxes.
struct Boxes {
  Box size, tiles;  // of a tile, and how many along each axis
  int64_t count;
};

/// That of which there are fewest; of several the longest rows. Sizes that cannot beat the best so far are not looked
/// into: this is done for every launch.
constexpr Boxes choose_boxes(Problem const& p) {
  Box const grid = position_grid(p);
  auto const& g = grid.size;
  // 64 bits: a product of sizes may be far too many tiles to be taken.
  int64_t const planes = int64_t{g[0]} * g[1], rows = planes * g[2];
  Boxes best{{}, {}, INT64_MAX};
  for (int32_t w = fitting_size(g[3], kPositions); w > 0; w = fitting_size(g[3], w - 1)) {
    int32_t const tiles_w = ceil_div(g[3], w), room_w = kPositions / w;
    if (tiles_w * ((rows + room_w - 1) / room_w) >= best.count) continue;
    for (int32_t h = fitting_size(g[2], room_w); h > 0; h = fitting_size(g[2], h - 1)) {
      int32_t const tiles_h = ceil_div(g[2], h), room_h = room_w / h;
      int64_t const tiles_wh = int64_t{tiles_w} * tiles_h;
      if (tiles_wh * ((planes + room_h - 1) / room_h) >= best.count) continue;
      for (int32_t d = fitting_size(g[1], room_h); d > 0; d = fitting_size(g[1], d - 1)) {
        int32_t const n = fitting_size(g[0], room_h / d);
        Box const tiles{{ceil_div(g[0], n), ceil_div(g[1], d), tiles_h, tiles_w}};
        int64_t const count = int64_t{tiles.size[0]} * tiles.size[1] * tiles_wh;
        if (count < best.count) best = {{{n, d, h, w}}, tiles, count};
      }
    }
  }
  return best;
}

constexpr int class_total(Problem const& p) { return static_cast<int>(residue_class_count(p.stride)); }

/// All classes, those with the most taps first.
struct Classes {
  ResidueClass v[kMostClasses];
};
constexpr Classes classes_by_taps(Problem const& p) {
  Classes sorted{};
  for (int index = 0; index < class_total(p); ++index) {
    ResidueClass const c = residue_class(p, index);
    int at = index;
    for (; at > 0 && sorted.v[at - 1].taps() < c.taps(); --at) sorted.v[at] = sorted.v[at - 1];
    sorted.v[at] = c;
  }
  return sorted;
}

/// Whether the kernel takes a problem that the family takes in boxes, with a weight that starts at a multiple of 16
/// bytes, and has so many columns for each tap.
constexpr bool takes_boxes(Problem const& p, int64_t tap_columns) {
  if (!has_fitting_tensors(p) || class_total(p) > kMostClasses) return false;
  int64_t const bytes = element_bytes(p);
  if (tap_columns * bytes % 128 != 0) return false;
  Size5 const shape = x_shape(p);
  for (int axis : {0, 2, 3, 4}) {
    if (shape[axis] == 1) continue;
    // Voxels that overlap have not been tried.
    if (!is_copy_step(p.x_stride[axis] * bytes) || p.x_stride[axis] < p.in_channels) return false;
  }
  return true;
}

}  // namespace convt3d::sm90::product
