// SPDX-License-Identifier: Apache-2.0
//
// How long the family's kernels take for a small problem, for the choice between families.
#pragma once

#include "sm80/columns/choice.hpp"
#include "sm80/joint/geometry.hpp"

namespace convt3d::sm80 {

/// Of the joint kernel and of the implicit GEMM: microseconds of GPU time on an H200, the pre-pass included, fitted to
/// stride 2, kernel 2 to 4, 16 to 1024 channels, from 4^3 to 32^3, batch 1 to 8 (docs/performance-log.md), and within
/// 40 % of nine in ten of these; at stride 1 it is 0.6 to 1.5 of the time in half of 170 problems in each type, 0.4 to
/// 2.6 in nine of ten. A sum of what starting takes, the products of the longest class one after the other, all
/// products, and the bytes.
inline double usual_microseconds(Problem const& p, int multiprocessors) {
  struct Fit {
    double start, longest, products, weights, tensors;
  };
  // Contiguous y, channels last.
  constexpr Fit kTf32[2] = {{8.3, .52, .08, 1.1, 5.9}, {5.8, .41, .13, 1.9, 3.4}};
  constexpr Fit kIeee[2] = {{6.1, .34, .54, .14, 3.9}, {5.9, .34, .54, .47, 2.5}};
  constexpr Fit k16Bit[2] = {{8.5, .62, .01, .55, 5.0}, {5.6, .42, .07, 1.6, 2.3}};
  constexpr Fit kJointTf32[2] = {{22.3, .206, 0, .35, 0}, {18.6, .221, .010, .75, 0}};
  constexpr Fit kJoint16Bit[2] = {{21.2, .068, 0, .29, 0}, {15.5, .037, .020, .06, 0}};
  int const last = p.y_stride[1] == 1 && p.out_channels > 1 ? 1 : 0;
  bool const wide = p.dtype == CONVT3D_F32;
  double const weights = 1e-5 * static_cast<double>(element_count(weight_shape(p)));
  if (joint::chosen(p)) {
    Fit const& fit = (wide ? kJointTf32 : kJoint16Bit)[last];
    // The input channels one after the other, of a part of the sum: blocks are at most two to a multiprocessor.
    int64_t const step = joint::kStepBytes / element_bytes(p), stages = (p.in_channels + step - 1) / step;
    int64_t const of_part = (stages + joint::splits(p) - 1) / joint::splits(p) * step;
    double const channels = static_cast<double>(p.in_channels);
    double const tiles = static_cast<double>(joint::position_tiles(p) * joint::channel_tiles(p));
    return fit.start + fit.longest * static_cast<double>(of_part) + fit.products * channels * tiles / multiprocessors +
           fit.weights * weights;
  }
  Fit const& fit = (!wide ? k16Bit : uses_tf32(p) ? kTf32 : kIeee)[last];
  int64_t const depth = wide ? kMaxTileK / 2 : kMaxTileK;  // of a step of the mainloop
  int64_t const steps_per_tap = (p.in_channels + depth - 1) / depth;
  // A class has about as many outputs as x has positions, and all classes together each tap once. Narrow tiles have
  // half the products.
  int64_t const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  double const tiles = static_cast<double>(joint::position_tiles(p)) *
                       (p.out_channels <= 32 ? .5 : static_cast<double>((p.out_channels + 63) / 64));
  double const steps = tiles * static_cast<double>(taps * steps_per_tap) / multiprocessors;
  double const elements = 1e-6 * static_cast<double>(element_count(x_shape(p)) + element_count(y_shape(p)));
  return fit.start + fit.longest * static_cast<double>(most_taps(p) * steps_per_tap) + fit.products * steps +
         fit.weights * weights + fit.tensors * elements;
}

/// Whether a stride exceeds 2: no estimate was fitted to such.
constexpr bool has_wide_step(Problem const& p) { return p.stride[0] > 2 || p.stride[1] > 2 || p.stride[2] > 2; }

constexpr bool has_unit_strides(Problem const& p) { return p.stride[0] == 1 && p.stride[1] == 1 && p.stride[2] == 1; }

/// Whether the columns kernel computes a problem that the family supports and has no patch kernel for.
inline bool chooses_columns(Problem const& p, int multiprocessors) {
  if (!columns::takes(p) || columns::nowhere.load(std::memory_order_relaxed)) return false;
  if (columns::wherever_possible.load(std::memory_order_relaxed)) return true;
  if (has_wide_step(p)) return false;
  return columns::estimated_microseconds(p, multiprocessors) < usual_microseconds(p, multiprocessors);
}

/// Of the faster one.
inline double estimated_microseconds(Problem const& p, int multiprocessors) {
  return chooses_columns(p, multiprocessors) ? columns::estimated_microseconds(p, multiprocessors)
                                             : usual_microseconds(p, multiprocessors);
}

/// Whether PyTorch's convolution, which is strict there, is faster in ieee mode, without groups: at stride 1, where all
/// taps are one sum, which a thread block adds up alone. Of 340 random problems (1 to 512 channels, kernels of 1 to 5)
/// 166 took longer than PyTorch's operators, up to 23 times; with this rule 32 do. Its time was fitted to these, and
/// the factor is for what both estimates are uncertain by.
inline bool pytorch_is_faster(Problem const& p, int multiprocessors) {
  int64_t const products = p.in_channels * tap_count(p);
  if (!has_unit_strides(p) || !uses_ieee(p) || products < 1000) return false;
  double const all = 1e-9 * static_cast<double>(element_count(y_shape(p))) * static_cast<double>(products);
  return estimated_microseconds(p, multiprocessors) > 1.3 * (28 + 34 * all * 132 / multiprocessors);
}

}  // namespace convt3d::sm80
