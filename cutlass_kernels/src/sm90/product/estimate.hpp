// SPDX-License-Identifier: Apache-2.0
//
// How long the product kernel takes, for the choice between kernels.
#pragma once

#include "sm90/product/geometry.hpp"

namespace convt3d::sm90::product {

/// Microseconds of GPU time on an H200, as sm90/estimate.hpp; of a problem that the kernel takes. Fitted to kernel 2,
/// 64 to 1024 channels, from 4^3 to 16^3, batch 1 to 8: what starting takes, the steps of a block's first tile, those
/// of its other tiles, what else these take, and the bytes of y. With caches cold, for which 3 microseconds of starting
/// were taken off in TF32 and 2 in 16-bit types to be comparable with the other kernels' estimates, it is within 10 %
/// of nine in ten.
inline double estimated_microseconds(Problem const& p, int multiprocessors) {
  struct Fit {
    double start, first, step, tile, y;  // y: a million of bytes
  };
  constexpr Fit kTf32{5.0, .46, .76, 3.1, .44}, k16Bit{7.0, .41, .74, 2.3, .57};
  Fit const& fit = p.dtype == CONVT3D_F32 ? kTf32 : k16Bit;
  int64_t const tiles = position_tiles(p) * column_tiles(p, warpgroups(p, multiprocessors));
  auto const others = static_cast<double>((tiles - 1) / multiprocessors);
  auto const of_one = static_cast<double>(steps(p));
  double const y = 1e-6 * element_bytes(p) * static_cast<double>(element_count(y_shape(p)));
  return fit.start + fit.first * of_one + others * (fit.step * of_one + fit.tile) + fit.y * y;
}

}  // namespace convt3d::sm90::product
