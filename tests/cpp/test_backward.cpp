// SPDX-License-Identifier: Apache-2.0
//
// The backward pass's pointwise half without a GPU: the derivatives, what a description may say, and how the work is
// laid out.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "backward/plan.hpp"
#include "cases.hpp"
#include "convt3d/activation_gradient.hpp"
#include "convt3d/convt3d_backward.h"
#include "reference.hpp"

namespace convt3d {
namespace {

using Description = convt3d_activation_gradient;
using test::Layout;

// ---- derivatives ----------------------------------------------------------------------------------------------------

class ActivationGradient : public testing::TestWithParam<int> {};

bool near_a_kink(float t) { return std::abs(t) < 0.01f || std::abs(std::abs(t) - 3.0f) < 0.01f; }

TEST_P(ActivationGradient, IsTheSlopeOfTheForward) {
  double const h = 1e-5;
  for (int i = -9000; i <= 9000; ++i) {
    float const t = static_cast<float>(i) * 0.00231f;
    if (near_a_kink(t)) continue;
    double const slope = (test::reference_activation(GetParam(), t + h, 0.013f) -
                          test::reference_activation(GetParam(), t - h, 0.013f)) /
                         (2 * h);
    ASSERT_NEAR(apply_activation_gradient(GetParam(), 1.0f, t, 0.013f), slope, 2e-6 * std::max(1.0, std::abs(slope)))
        << "t = " << t;
    ASSERT_EQ(apply_activation_gradient(GetParam(), 2.0f, t, 0.013f),
              2 * apply_activation_gradient(GetParam(), 1.0f, t, 0.013f));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ActivationGradient, testing::Range(0, static_cast<int>(CONVT3D_ACT_COUNT)),
                         [](auto const& info) { return std::string(activation_name(info.param)); });

// Where 1 - tanh(t)^2 and 1 - sigmoid(t) have lost every digit.
TEST(ActivationGradients, KeepTheirDigitsFarOut) {
  for (double t : {20.0, -20.0, 40.0, -40.0}) {
    auto const flat = [](double u) { return std::exp(-std::abs(u)) / std::pow(1 + std::exp(-std::abs(u)), 2); };
    auto const slope = [&](int code) { return apply_activation_gradient(code, 1.0f, static_cast<float>(t), 0); };
    EXPECT_NEAR(slope(CONVT3D_ACT_SIGMOID), flat(t), 1e-6 * flat(t)) << t;
    EXPECT_NEAR(slope(CONVT3D_ACT_TANH), 4 * flat(2 * t), 1e-6 * 4 * flat(2 * t)) << t;
  }
}

TEST(ActivationGradients, KinksAreTorchs) {
  auto const slope = [](int code, float t) { return apply_activation_gradient(code, 1.0f, t, 0.25f); };
  EXPECT_EQ(slope(CONVT3D_ACT_RELU, 0.0f), 0.0f);
  EXPECT_EQ(slope(CONVT3D_ACT_LEAKY_RELU, 0.0f), 0.25f);
  EXPECT_EQ(slope(CONVT3D_ACT_ELU, 0.0f), 1.0f);
  EXPECT_EQ(slope(CONVT3D_ACT_HARDSWISH, -3.0f), 0.0f);
  EXPECT_EQ(slope(CONVT3D_ACT_HARDSWISH, 3.0f), 1.0f);
  EXPECT_EQ(slope(CONVT3D_ACT_X_HARDSWISH, -3.0f), 0.0f);
  EXPECT_EQ(slope(CONVT3D_ACT_X_HARDSWISH, 3.0f), 6.0f);
  // The gradient of what is cut off is 0 whatever comes from above.
  float const infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(apply_activation_gradient(CONVT3D_ACT_RELU, infinity, -1.0f, 0), 0.0f);
  EXPECT_EQ(apply_activation_gradient(CONVT3D_ACT_HARDSWISH, infinity, -4.0f, 0), 0.0f);
}

// ---- descriptions ---------------------------------------------------------------------------------------------------

Description describe(Size5 const& shape, Layout layout, int32_t dtype = CONVT3D_F32) {
  Description d{};
  std::copy(shape.v, shape.v + 5, d.size);
  test::pack(shape, layout, d.grad_output_stride);
  test::pack(shape, layout, d.t_stride);
  test::pack(shape, layout, d.grad_pre_stride);
  d.grad_output_alignment = d.t_alignment = d.grad_pre_alignment = 16;
  d.has_grad_pre = d.has_grad_bias = 1;
  d.dtype = dtype;
  d.activation = CONVT3D_ACT_SILU;
  return d;
}

constexpr Size5 kShape{{2, 8, 3, 4, 8}};

void expect_refused(Description const& d, char const* fragment) {
  char text[256] = "";
  size_t bytes = 99;
  EXPECT_EQ(convt3d_backward_activation_workspace(&d, &bytes, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_NE(std::string(text).find(fragment), std::string::npos) << text;
  EXPECT_EQ(bytes, 99u) << "a failed call writes nothing";
  convt3d_activation_gradient_tensors const tensors{};
  EXPECT_EQ(convt3d_backward_activation(&d, &tensors, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
}

TEST(BackwardDescription, WhatIsWrongIsNamed) {
  Description const good = describe(kShape, Layout::kNcdhw);
  size_t bytes = 0;
  ASSERT_EQ(convt3d_backward_activation_workspace(&good, &bytes, nullptr, 0), CONVT3D_OK);
  Description d = good;
  d.size[2] = -1;
  expect_refused(d, "size must not be negative, but is -1 along D");
  d = good, d.dtype = 3;
  expect_refused(d, "dtype must be in 0..2");
  d = good, d.activation = CONVT3D_ACT_COUNT;
  expect_refused(d, "activation must be in 0..10");
  d = good, d.has_grad_pre = 2;
  expect_refused(d, "has_grad_pre");
  d = good, d.has_grad_bias = -1;
  expect_refused(d, "has_grad_bias");
  d = good, d.t_stride[3] = -8;
  expect_refused(d, "t_stride must not be negative");
  d = good, d.grad_output_stride[0] = INT64_MAX / 2;
  expect_refused(d, "grad_output of size");
  d = good, d.grad_pre_stride[1] = 0;
  expect_refused(d, "grad_pre_stride must not be 0 along C");
  d = good, d.grad_pre_stride[2] = 1;
  expect_refused(d, "may give two elements one address");
  d = good, d.grad_output_alignment = 2;
  expect_refused(d, "grad_output_alignment must be a power of two from 4");
  // What is not there is not looked at.
  d = good, d.activation = CONVT3D_ACT_NONE, d.t_alignment = 0, d.t_stride[0] = -1;
  EXPECT_EQ(convt3d_backward_activation_workspace(&d, &bytes, nullptr, 0), CONVT3D_OK);
  d = good, d.has_grad_pre = 0, d.grad_pre_alignment = 0, d.grad_pre_stride[0] = 0;
  EXPECT_EQ(convt3d_backward_activation_workspace(&d, &bytes, nullptr, 0), CONVT3D_OK);
}

TEST(BackwardDescription, PointersAndTheWorkspaceAreChecked) {
  Description const d = describe(kShape, Layout::kNcdhw);
  size_t bytes = 0;
  ASSERT_EQ(convt3d_backward_activation_workspace(&d, &bytes, nullptr, 0), CONVT3D_OK);
  ASSERT_GT(bytes, 0u);
  alignas(16) char memory[64];
  float sums[8];
  convt3d_activation_gradient_tensors const good{memory, memory + 16, memory + 16, memory + 48,
                                                 sums,   memory + 32, bytes};
  auto const refused = [&](Description const& description, convt3d_activation_gradient_tensors const& tensors) {
    char text[256] = "";
    EXPECT_NE(convt3d_backward_activation(&description, &tensors, nullptr, text, sizeof text), CONVT3D_OK);
    return std::string(text);
  };
  auto t = good;
  t.grad_output = nullptr;
  EXPECT_EQ(refused(d, t), "grad_output is a null pointer");
  t = good, t.t = memory + 8;
  EXPECT_NE(refused(d, t).find("t at"), std::string::npos);
  t = good, t.grad_bias = nullptr;
  EXPECT_EQ(refused(d, t), "grad_bias is a null pointer");
  Description both = d;
  both.has_grad_pre_ndhwc = 1;
  t = good, t.grad_pre_ndhwc = nullptr;
  EXPECT_EQ(refused(both, t), "grad_pre_ndhwc is a null pointer");
  t = good, t.grad_pre_ndhwc = t.grad_pre;
  EXPECT_NE(refused(both, t).find("grad_pre_ndhwc starts at the address of another"), std::string::npos);
  Description other = d;
  test::pack(kShape, Layout::kNdhwc, other.grad_pre_stride);
  EXPECT_NE(refused(other, good).find("an input of other strides"), std::string::npos);
#if CONVT3D_WITH_CUDA
  t = good, t.workspace_bytes = bytes - 1;
  EXPECT_NE(refused(d, t).find("are needed"), std::string::npos);
  t = good, t.workspace = nullptr;
  EXPECT_EQ(refused(d, t), "workspace is a null pointer");
#endif
  EXPECT_EQ(convt3d_backward_activation(nullptr, &good, nullptr, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(convt3d_backward_activation(&d, nullptr, nullptr, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(convt3d_backward_activation_workspace(&d, nullptr, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
}

// ---- the layout of the work -----------------------------------------------------------------------------------------

TEST(BackwardPlan, WideWhereverMemoryAllows) {
  using backward::make_plan;
  using backward::Walk;
  for (int32_t dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
    int const wide = dtype == CONVT3D_F32 ? 4 : 8;
    Description d = describe(kShape, Layout::kNcdhw, dtype);
    EXPECT_EQ(make_plan(d).walk, Walk::kRows);
    EXPECT_EQ(make_plan(d).vector, wide);
    // Rows of odd length start inside an access, all tensors alike.
    EXPECT_EQ(make_plan(describe({{3, 5, 3, 5, 7}}, Layout::kNcdhw, dtype)).vector, wide);
    // A loss's one value, and a channel slice.
    std::fill(d.grad_output_stride, d.grad_output_stride + 5, 0);
    EXPECT_EQ(make_plan(d).vector, wide);
    d = describe(kShape, Layout::kNcdhw, dtype);
    d.grad_output_stride[0] *= 3;
    EXPECT_EQ(make_plan(d).vector, wide);
    d.grad_output_alignment = wide == 4 ? 4 : 2;
    EXPECT_EQ(make_plan(d).vector, 1);

    d = describe(kShape, Layout::kNdhwc, dtype);
    EXPECT_EQ(make_plan(d).walk, Walk::kColumns);
    EXPECT_EQ(make_plan(d).vector, wide);
    EXPECT_EQ(make_plan(describe({{2, 6, 3, 4, 8}}, Layout::kNdhwc, dtype)).vector, 1);
    // Two layouts at once: neighbours of one are no neighbours of the other.
    test::pack(kShape, Layout::kNcdhw, d.grad_output_stride);
    EXPECT_EQ(make_plan(d).vector, 1);
  }
}

/// Every place of the workspace is written exactly once, and no other: counted as the kernels count.
TEST(BackwardPlan, PartialSumsFillTheWorkspace) {
  test::Random random(3);
  for (int trial = 0; trial < 500; ++trial) {
    Size5 const shape{{random.integer(1, 40), random.integer(1, 700), random.integer(1, 20), random.integer(1, 20),
                       random.integer(1, 50)}};
    for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
      backward::Plan const plan =
          backward::make_plan(describe(shape, layout, random.chance(50) ? CONVT3D_F32 : CONVT3D_BF16));
      auto const& p = plan.params;
      ASSERT_EQ(plan.workspace_bytes, static_cast<size_t>(p.channels * p.partials) * sizeof(float));
      if (plan.walk == backward::Walk::kRows) {
        ASSERT_EQ(p.partials, p.batch * p.rows_split);
        // The longest row: it begins with one element inside its first access.
        int64_t const reach = p.rows_split * p.steps * backward::kWarp * plan.vector;
        ASSERT_GE(reach, p.positions + plan.vector - 1);
        ASSERT_LT(reach - p.steps * backward::kWarp * plan.vector, p.positions + plan.vector - 1);
      } else {
        int64_t const per_block = backward::voxels_per_step(p.channels, plan.vector) * p.steps;
        ASSERT_GE(p.partials * per_block, p.batch * p.positions);
        ASSERT_LT((p.partials - 1) * per_block, p.batch * p.positions);
      }
    }
  }
}

TEST(BackwardPlan, TurnsRowsOfWholeAccesses) {
  for (int32_t dtype : {CONVT3D_F32, CONVT3D_BF16}) {
    Description good = describe(kShape, Layout::kNcdhw, dtype);
    good.has_grad_pre_ndhwc = 1;
    ASSERT_TRUE(backward::turnable(good));
    EXPECT_EQ(backward::make_plan(good).walk, backward::Walk::kTurned);
    Description d = good;
    std::fill(d.grad_output_stride, d.grad_output_stride + 5, 0);  // a loss's one value
    EXPECT_TRUE(backward::turnable(d));
    auto const refused = [](Description const& description) {
      char text[256] = "";
      size_t bytes = 0;
      EXPECT_EQ(convt3d_backward_activation_workspace(&description, &bytes, text, sizeof text), CONVT3D_NOT_SUPPORTED);
      EXPECT_NE(std::string(text).find("grad_pre_ndhwc"), std::string::npos);
    };
    d = good, d.t_alignment = 8;
    refused(d);
    d = good, test::pack(kShape, Layout::kNdhwc, d.grad_output_stride);
    refused(d);
    d = good, d.grad_pre_stride[0] += 1;
    refused(d);
    for (Size5 const& shape : {Size5{{2, 6, 3, 4, 8}}, Size5{{2, 8, 3, 3, 3}}}) {
      d = describe(shape, Layout::kNcdhw, dtype), d.has_grad_pre_ndhwc = 1;
      refused(d);
    }
    // Those that are not there do not matter.
    d = good, d.t_alignment = 4, d.activation = CONVT3D_ACT_NONE;
    EXPECT_TRUE(backward::turnable(d));
    d = good, d.grad_pre_stride[0] += 1, d.has_grad_pre = 0;
    EXPECT_TRUE(backward::turnable(d));
  }
}

TEST(BackwardPlan, AnEmptyTensorNeedsNothing) {
  Description const d = describe({{0, 8, 3, 4, 8}}, Layout::kNcdhw);
  size_t bytes = 99;
  EXPECT_EQ(convt3d_backward_activation_workspace(&d, &bytes, nullptr, 0), CONVT3D_OK);
  EXPECT_EQ(bytes, 0u);
}

}  // namespace
}  // namespace convt3d
