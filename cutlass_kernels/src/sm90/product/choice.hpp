// SPDX-License-Identifier: Apache-2.0
//
// What the product kernel takes, and how it divides the work among thread blocks. Host code, tested on the CPU.
#pragma once

#include <atomic>

#include "sm90/product/operands.hpp"

namespace convt3d::sm90::product {

// Of a problem with the operands that the kernel reads (operands.hpp):

/// A tile is 128 positions by 64 columns for each warpgroup: of rows the columns of the weight, of boxes the output
/// channels of one class.
struct Tiling {
  int64_t position_tiles, all_columns, classes;
  int most_warpgroups;
  Boxes boxes;  // of no use for rows
  constexpr int64_t columns(int warpgroups) const { return ceil_div(all_columns, warpgroups * kColumns); }
  constexpr int64_t tiles(int warpgroups) const { return position_tiles * columns(warpgroups) * classes; }
};

constexpr Tiling tiling(Problem const& p) {
  if (takes_rows(p)) return {ceil_div(positions(p), kPositions), weight_columns(p), 1, kMostWarpgroups, {}};
  // No more warpgroups than have columns.
  int const filled = ceil_div(p.out_channels, kColumns);
  Boxes const boxes = choose_boxes(p);
  return {boxes.count, p.out_channels, class_total(p), filled < kMostWarpgroups ? filled : kMostWarpgroups, boxes};
}

/// Warpgroups of a thread block. They share x, so the most, or as few as leave no more tiles than multiprocessors.
constexpr int warpgroups(Tiling const& t, int multiprocessors) {
  for (int count = 1; count < t.most_warpgroups; ++count) {
    if (t.tiles(count) <= multiprocessors) return count;
  }
  return t.most_warpgroups;
}

/// Steps that a tile must have for a cluster to pay: what it saves is a few of these.
constexpr int64_t kClusterSteps = 12;

/// Thread blocks that share a tile, in a cluster: of boxes, where they would leave most multiprocessors idle. They have
/// one warpgroup then. A cluster lies in one part of the GPU, whose multiprocessors are not a multiple of four
/// everywhere: of an H200's 132, 32 clusters of four did not all run at a time.
constexpr int cluster_blocks(Problem const& p, int64_t tiles, int groups, int multiprocessors) {
  if (takes_rows(p) || groups > 1 || steps(p) * most_taps(p) < kClusterSteps) return 1;
  return tiles * 4 <= multiprocessors / 8 * 7 ? 4 : tiles * 2 <= multiprocessors ? 2 : 1;
}

/// For tests: the kernel computes all that it takes, not only where it is the fastest of the family; or nothing.
inline std::atomic<bool> wherever_possible{false}, nowhere{false};

}  // namespace convt3d::sm90::product
