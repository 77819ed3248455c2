// SPDX-License-Identifier: Apache-2.0
//
// How long the product kernel takes, for the choice between kernels.
#pragma once

#include "sm90/product/choice.hpp"

namespace convt3d::sm90::product {

/// Steps of the thread block that has most, about, of 128 bytes of input channels each: of rows those of all its tiles,
/// which are alike; of boxes, whose shortest go to those that had the longest, an equal share, but a longest tile's at
/// least.
inline double longest_steps(Problem const& p, int64_t tiles, int multiprocessors) {
  double const of_tap = steps(p);
  if (takes_rows(p)) return of_tap * ceil_div(tiles, multiprocessors);
  // A class has tiles of all positions and channels, and the classes together have each tap once.
  double const all = of_tap * static_cast<double>(tiles / class_total(p) * tap_count(p)) / multiprocessors;
  double const longest = of_tap * static_cast<double>(most_taps(p));
  return longest > all ? longest : all;
}

/// What copies take, which have a launch of their own, and outputs that are moved one by one. Fitted to 140 problems in
/// NCDHW in two types each.
inline double other_layout_microseconds(Problem const& p, Operands const& of) {
  struct Fit {
    double start, copied, output;  // copied: a million of bytes; output: a million of them
  };
  constexpr Fit kFits[2] = {{3.5, .8, 5.6}, {4.2, 1.4, 5.5}};  // TF32, 16-bit types
  Fit const& fit = kFits[p.dtype == CONVT3D_F32 ? 0 : 1];
  int64_t const copied =
      (of.copies_x ? element_count(x_shape(p)) : 0) + (of.copies_weight ? element_count(weight_shape(p)) : 0);
  double time = copied == 0 ? 0 : fit.start + fit.copied * 1e-6 * element_bytes(p) * static_cast<double>(copied);
  if (!of.moves_pairs()) time += fit.output * 1e-6 * static_cast<double>(element_count(y_shape(p)));
  return time;
}

/// Microseconds of GPU time on an H200, as sm90/estimate.hpp; of a problem that the kernel takes. Fitted to 60
/// problems in rows and 129 in boxes, in two types each, of 32 to 768 channels, from 3^3 to 32^3, batch 1 to 64,
/// kernels of 2 to 5 at strides of 1 and 2: what starting takes, the steps of the longest thread block, more of them
/// where it has more warpgroups, what else its tiles take, and the bytes of y. With caches cold, for which 2 to 3
/// microseconds of starting were taken off to be comparable with the other kernels' estimates, it is within 20 % of
/// nine in ten.
inline double estimated_microseconds(Problem const& problem, int multiprocessors) {
  Operands const of = operands(problem);
  Problem const& p = of.p;
  struct Fit {
    double start, step, warpgroup, tile, y;  // warpgroup: of a step, each beside the first; y: a million of bytes
  };
  constexpr Fit kRows[2] = {{5.5, .31, .14, 3.6, .39}, {5.2, .23, .175, 3.5, .13}};  // TF32, 16-bit types
  constexpr Fit kBoxes[2] = {{6.7, .32, .086, 2.2, .69}, {6.7, .24, .14, 2.7, .57}};
  Fit const& fit = (takes_rows(p) ? kRows : kBoxes)[p.dtype == CONVT3D_F32 ? 0 : 1];
  Tiling const t = tiling(p);
  int const groups = warpgroups(t, multiprocessors);
  int64_t const tiles = t.tiles(groups);
  int const of_cluster = cluster_blocks(p, tiles, groups, multiprocessors);
  double const steps = longest_steps(p, tiles, multiprocessors) / of_cluster;
  double const finished =
      static_cast<double>(ceil_div(tiles, multiprocessors)) / of_cluster;  // the exchange of sums shows little
  double const y = 1e-6 * element_bytes(p) * static_cast<double>(element_count(y_shape(p)));
  return fit.start + (fit.step + fit.warpgroup * (groups - 1)) * steps + fit.tile * finished + fit.y * y +
         other_layout_microseconds(problem, of);
}

}  // namespace convt3d::sm90::product
