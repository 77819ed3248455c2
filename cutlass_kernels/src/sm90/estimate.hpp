// SPDX-License-Identifier: Apache-2.0
//
// How long the family's kernels take for a small problem, for the choice between families.
#pragma once

#include "sm90/config.hpp"
#include "sm90/stream/choose.hpp"

namespace convt3d::sm90 {

/// Microseconds of GPU time on an H200, pre-kernels included: as sm80/estimate.hpp, and within 20 % of nine in ten.
inline double estimated_microseconds(Problem const& p, bool streams, int multiprocessors) {
  struct Fit {
    double start, longest, products, tiles, weights, x;
  };
  // Contiguous y, channels last.
  constexpr Fit kTf32[2] = {{9.9, .26, .43, 2.7, .65, 2.3}, {10.5, .23, .42, 3.1, .60, .7}};
  constexpr Fit kIeee[2] = {{20.0, .51, .71, 3.2, .84, 0}, {19.0, .50, .67, 2.3, .97, 1.1}};
  constexpr Fit k16Bit[2] = {{7.6, .27, .38, 2.0, .20, 0}, {7.2, .23, .36, 1.9, .13, 0}};
  struct ResidentFit {
    double start, second_tap, tiles, y, weights;  // y: a million times four bytes
  };
  constexpr ResidentFit kResidentTf32[2] = {{9.0, 1.5, 2.2, 1.2, 5.6}, {9.4, 2.3, 2.4, 1.5, 4.8}};
  constexpr ResidentFit kResidentIeee[2] = {{15.4, 1.9, 1.4, 3.1, 15.9}, {17.1, 3.4, 2.9, 1.9, 12.2}};
  constexpr ResidentFit kResident16Bit[2] = {{9.6, 1.8, 3.1, .33, 0}, {9.7, .9, 3.1, .42, 0}};
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
