// SPDX-License-Identifier: Apache-2.0
//
// How long the columns kernel takes, for the choice between kernels.
#pragma once

#include "sm80/columns/geometry.hpp"

namespace convt3d::sm80::columns {

/// Microseconds of GPU time on an H200, as sm80/estimate.hpp; of a problem that the kernel takes. Fitted to stride 2,
/// kernel 2, 3 and 4, 16 to 1024 channels, from 4^3 to 16^3, batch 1 to 8, and within 30 % of nine in ten of these:
/// what starting takes, the steps of a part one after the other, all steps, the columns, the weights and y.
inline double estimated_microseconds(Problem const& p, int multiprocessors) {
  struct Fit {
    double start, step, steps, columns, weights, y;  // the last three: for a million of elements
  };
  // Contiguous x, channels last.
  constexpr Fit kTf32[2] = {{5.6, .33, .66, 2.9, .13, 0}, {5.5, .39, .64, 2.5, 0, 0}};
  constexpr Fit kIeee[2] = {{5.1, .20, .64, 3.1, .20, .23}, {5.0, .18, .61, 2.4, .22, 1.3}};
  constexpr Fit k16Bit[2] = {{5.0, 0, .41, 3.3, .31, 1.2}, {4.8, 0, .37, 2.6, .19, 1.5}};
  Fit const& fit = (p.dtype != CONVT3D_F32 ? k16Bit : uses_tf32(p) ? kTf32 : kIeee)[x_channels_last(p) ? 1 : 0];
  auto const millions = [](int64_t count) { return 1e-6 * static_cast<double>(count); };
  double const all_steps = static_cast<double>(tiles(p) * steps(p)) / multiprocessors;
  return fit.start + fit.step * static_cast<double>(steps_of_part(p)) + fit.steps * all_steps +
         fit.columns * millions(parts(p) * part_floats(p)) + fit.weights * millions(element_count(weight_shape(p))) +
         fit.y * millions(element_count(y_shape(p)));
}

}  // namespace convt3d::sm80::columns
