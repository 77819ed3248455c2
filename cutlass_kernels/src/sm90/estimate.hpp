// SPDX-License-Identifier: Apache-2.0
//
// How long the family's kernels take for a small problem, for the choice between families.
#pragma once

#include "sm90/config.hpp"
#include "sm90/stream/choose.hpp"

namespace convt3d::sm90 {

/// Microseconds of GPU time on an H200, pre-kernels included: as sm80/estimate.hpp, and within 30 % of nine in ten.
inline double estimated_microseconds(Problem const& p, bool streams, int multiprocessors) {
  struct Fit {
    double start, longest, products, tiles, weights, x;
  };
  // Contiguous y, channels last.
  constexpr Fit kTf32[2] = {{8.0, .24, .30, 4.2, .51, 2.8}, {7.9, .24, .29, 4.7, .32, 1.6}};
  constexpr Fit kIeee[2] = {{20.0, .51, .71, 3.2, .84, 0}, {19.0, .50, .67, 2.3, .97, 1.1}};
  constexpr Fit k16Bit[2] = {{7.5, .20, .27, 2.0, .51, .25}, {7.0, .19, .25, 2.5, .14, 0}};
  struct ResidentFit {
    double start, second_tap, tiles, y, weights;  // y: a million times four bytes
  };
  constexpr ResidentFit kResidentTf32[2] = {{9.3, 1.7, 3.1, .62, 2.9}, {9.8, 2.5, 3.2, 1.0, 4.2}};
  constexpr ResidentFit kResidentIeee[2] = {{15.4, 1.9, 1.4, 3.1, 15.9}, {17.1, 3.4, 2.9, 1.9, 12.2}};
  constexpr ResidentFit kResident16Bit[2] = {{9.6, 2.0, 3.4, .09, 1.2}, {10.0, 1.5, 2.9, .31, .21}};
  int const last = form(p).channels_last ? 1 : 0;
  double const weights = 1e-5 * static_cast<double>(element_count(weight_shape(p)));
  bool const narrow = p.dtype != CONVT3D_F32;
  if (!streams) {
    ResidentFit const& fit = (narrow ? kResident16Bit : uses_split(p) ? kResidentIeee : kResidentTf32)[last];
    double const runs = static_cast<double>(tiling(p, 1).runs * class_count(p)) / multiprocessors;
    double const y = 1e-6 / 4 * element_bytes(p) * static_cast<double>(element_count(y_shape(p)));
    return fit.start + (most_taps(p) > 1 ? fit.second_tap : 0) + fit.tiles * runs + fit.y * y + fit.weights * weights;
  }
  Fit const& fit = (narrow ? k16Bit : uses_split(p) ? kIeee : kTf32)[last];
  int longest = 0;
  for (int cls = 0; cls < stream::class_total(p); ++cls) {
    int const pieces = stream::class_pieces(p, cls);
    longest = pieces > longest ? pieces : longest;
  }
  double const items = static_cast<double>(stream::tiling(p, kTileW).items) / multiprocessors;  // what was measured
  double const products = items / stream::class_total(p) * stream::tile_pieces(p);
  double const x = 1e-6 * static_cast<double>(element_count(x_shape(p)));
  return fit.start + fit.longest * longest + fit.products * products + fit.tiles * items + fit.weights * weights +
         fit.x * x;
}

}  // namespace convt3d::sm90
