// SPDX-License-Identifier: Apache-2.0
//
// What both tests of the sm90 family's product kernel on the GPU ask, of rows and of boxes.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <climits>

#include "gpu_harness.hpp"
#include "sm90/most_ctas.hpp"
#include "sm90/product/choice.hpp"

namespace convt3d::test {

using Three = std::array<int64_t, 3>;

/// Channels last, with bias, add and leaky_relu.
inline Problem product_problem(int64_t batch, int64_t in, int64_t out, Three const& size, Three const& kernel,
                               Three const& stride, Three const& padding, Three const& output_padding) {
  Problem p = cubic_problem(batch, in, out, 1, 2, 2, 0, 0, Layout::kNdhwc);
  for (size_t axis = 0; axis < 3; ++axis) {
    p.in_size[axis] = size[axis];
    p.kernel[axis] = kernel[axis];
    p.stride[axis] = stride[axis];
    p.padding[axis] = padding[axis];
    p.output_padding[axis] = output_padding[axis];
  }
  pack(p, Layout::kNdhwc);
  pack(weight_shape(p), Layout::kNdhwc, p.weight_stride);
  p.has_bias = p.has_add = 1;
  p.activation = CONVT3D_ACT_LEAKY_RELU;
  p.negative_slope = 0.1f;
  return p;
}

class ProductCases : public KernelCases<sm90::product::wherever_possible, CONVT3D_KERNEL_SM90> {
 protected:
  void SetUp() override {
    KernelCases::SetUp();
    if (!IsSkipped() && device.compute_capability != 90) GTEST_SKIP() << "the GPU is not of SM90";
  }

  /// Every activation, add before and after it, with and without bias and add, of both problems.
  void run_tails(Problem const& whole, Problem const& odd) {
    for (int32_t activation = 0; activation < CONVT3D_ACT_COUNT; ++activation) {
      for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
        for (int parts = 0; parts < 8; ++parts) {
          Problem p = parts / 4 ? whole : odd;
          p.activation = activation;
          p.add_order = order;
          p.has_bias = parts % 2;
          p.has_add = parts / 2 % 2;
          run(p, static_cast<uint64_t>(activation));
        }
      }
    }
  }

  /// With x and the weight in other layouts, or aligned to nothing, which are copied.
  void run_copied_operands(Problem const& problem, uint64_t seed, float (*draw)(Random&) = uniform_draw) {
    for (int which = 0; which < 4; ++which) {
      Problem p = problem;
      if (which % 2 == 0) pack(x_shape(p), Layout::kNcdhw, p.x_stride);
      if (which / 2 == 0) pack(weight_shape(p), Layout::kNcdhw, p.weight_stride);
      if (which == 3) p.x_alignment = element_bytes(typed(p));
      run(p, seed, draw);
    }
  }

  /// With channels of y or add apart, or aligned to nothing.
  void run_channels_apart(Problem const& problem, uint64_t seed, float (*draw)(Random&) = uniform_draw) {
    for (int which = 0; which < 4; ++which) {
      Problem p = problem;
      if (which % 2 == 0) pack(y_shape(p), Layout::kNcdhw, p.y_stride);
      if (which / 2 == 0) pack(y_shape(p), Layout::kNcdhw, p.add_stride);
      if (which == 3) p.y_alignment = p.add_alignment = element_bytes(typed(p));
      run(p, seed, draw);
    }
  }

  void run_nonfinite_values(Problem p) {
    for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, nonfinite_draw);
    run(p, 3, uniform_draw, nonfinite_draw);
    Problem other = p;
    other.activation = CONVT3D_ACT_SIGMOID;
    for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
      other.add_order = order;
      run(other, 0, nonfinite_draw);
    }
    if (GetParam().dtype == CONVT3D_F16) return;
    p.has_add = 0;  // which would take sums next to infinity beyond it, before the activation makes them small again
    p.activation = CONVT3D_ACT_NONE;
    run(p, 4, decades_draw);
    run(p, 5, near_infinity_draw, small_draw);
  }

  /// Accesses of two channels of add and y; then slices of tensors with so many channels.
  void run_slices(Problem p, int64_t in_channels, int64_t out_channels) {
    p.add_alignment = p.y_alignment = GetParam().dtype == CONVT3D_F32 ? 8 : 4;
    run(p, 9);
    p.add_alignment = p.y_alignment = 16;
    slice(p, in_channels, out_channels, Layout::kNdhwc);
    run(p, 10);
  }

  /// One value of add for each channel, or for each channel of a sample.
  void run_add_of_channels(Problem p) {
    for (int64_t of_sample : {int64_t{0}, p.out_channels}) {
      for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
        p.add_order = order;
        for (int64_t& stride : p.add_stride) stride = 0;
        p.add_stride[0] = of_sample;
        p.add_stride[1] = 1;
        run(p, 11);
      }
    }
  }

  /// The copy engine does not take such a weight: the workspace has room for one that it takes.
  void run_weight_that_starts_anywhere(Problem const& problem) {
    Problem const p = typed(problem);
    ASSERT_TRUE(takes(p));
    for (int skew : {element_bytes(p), 8}) {
      EXPECT_EQ(run_case(p, CONVT3D_KERNEL_SM90, 12, &worst, uniform_draw, nullptr, skew), Outcome::kRan);
      ++ran;
    }
  }
};

}  // namespace convt3d::test
