// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "convt3d/activation.hpp"
#include "reference.hpp"

namespace convt3d {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Activation : public testing::TestWithParam<int> {};

std::vector<float> arguments() {
  std::vector<float> values = {0.0f, -0.0f, 3.0f, -3.0f, std::nextafterf(3.0f, 4.0f), std::nextafterf(-3.0f, 0.0f)};
  for (int i = -30000; i <= 30000; ++i) values.push_back(static_cast<float>(i) * 0.00419f);
  for (float v = 1e-44f; v < 1e37f; v *= 1.37f) {
    values.push_back(v);
    values.push_back(-v);
  }
  return values;
}

// Within a few units in the last place of the exact value, allowing for one rounding of the argument: this holds on
// both sides and far out, where 1 + erf(t), 1 + tanh(t) and 1 / (1 + exp(-t)) in fp32 have lost every digit.
TEST_P(Activation, EqualsTheDefinitionInDouble) {
  float const slope = 0.013f;
  for (float t : arguments()) {
    double const exact = test::reference_activation(GetParam(), t, slope);
    if (std::abs(exact) > std::numeric_limits<float>::max()) continue;
    double const step = std::max(std::abs(static_cast<double>(t)) * 0x1p-20, 1e-44);
    double const argument =
        std::abs(static_cast<double>(t)) * 0x1p-24 * test::activation_slope(GetParam(), t, slope, step);
    double const unit = std::max(std::abs(exact) * 0x1p-23, 0x1p-149);
    // Denormal intermediates (exp(-100)) carry 2^-149 of their own, magnified by the factor t.
    double const underflow = std::max(std::abs(static_cast<double>(t)), 1.0) * 0x1p-149;
    ASSERT_NEAR(apply_activation(GetParam(), t, slope), exact, 4 * unit + 4 * argument + underflow) << "t = " << t;
  }
}

// In units of 2^-23 of the exact value, over all magnitudes for which it is a normal number.
TEST(Elementary, IsWithinAFewUnitsOfTheExactValue) {
  double normal = 0, expm1 = 0;
  for (uint32_t bits = 0x00800000u; bits < 0x41a00000u; bits += 1237) {  // to 20
    for (float t : {bits_to_float(bits), -bits_to_float(bits)}) {
      double const phi = 0.5 * std::erfc(-t * std::sqrt(0.5));
      if (phi > 0x1p-125) normal = std::max(normal, std::abs(normal_distribution(t) / phi - 1) * 0x1p23);
      if (t < 0) {
        expm1 = std::max(expm1, std::abs(expm1_of_negative(t) / std::expm1(static_cast<double>(t)) - 1) * 0x1p23);
      }
    }
  }
  EXPECT_GT(normal, 0.5);  // something was compared
  EXPECT_LT(normal, 4.0);
  EXPECT_GT(expm1, 0.25);
  EXPECT_LT(expm1, 1.0);
  EXPECT_EQ(expm1_of_negative(-kInfinity), -1.0f);
  EXPECT_EQ(normal_distribution(kInfinity), 1.0f);
  EXPECT_EQ(normal_distribution(-kInfinity), 0.0f);
}

TEST(ActivationTable, MinusZeroKeepsItsSign) {
  for (int code : {CONVT3D_ACT_NONE, CONVT3D_ACT_ELU, CONVT3D_ACT_GELU, CONVT3D_ACT_SILU, CONVT3D_ACT_TANH}) {
    EXPECT_TRUE(std::signbit(apply_activation(code, -0.0f, 0.0f))) << activation_name(code);
  }
}

TEST_P(Activation, NanInNanOut) { EXPECT_TRUE(std::isnan(apply_activation(GetParam(), kNan, 0.01f))); }

TEST_P(Activation, DispatchEqualsTheSwitch) {
  for (float t : {-7.5f, -1.0f, 0.0f, 0.3f, 9.0f}) {
    float dispatched = kNan;
    with_activation(GetParam(), [&](auto act) { dispatched = act(t, 0.2f); });
    EXPECT_EQ(dispatched, apply_activation(GetParam(), t, 0.2f));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Activation, testing::Range(0, static_cast<int>(CONVT3D_ACT_COUNT)),
                         [](auto const& info) { return std::string(activation_name(info.param)); });

TEST(ActivationTable, NamesAreDistinctAndKnown) {
  std::set<std::string> names;
  for (int code = 0; code < CONVT3D_ACT_COUNT; ++code) names.insert(activation_name(code));
  EXPECT_EQ(names.size(), static_cast<size_t>(CONVT3D_ACT_COUNT));
  EXPECT_STREQ(activation_name(CONVT3D_ACT_X_HARDSWISH), "x_hardswish");
  EXPECT_STREQ(activation_name(CONVT3D_ACT_NONE), "none");
  EXPECT_EQ(activation_name(-1), nullptr);
  EXPECT_EQ(activation_name(CONVT3D_ACT_COUNT), nullptr);
}

// What PyTorch's CUDA kernels give at the infinities.
TEST(ActivationTable, Infinities) {
  struct Limits {
    int code;
    float at_plus, at_minus;
  };
  Limits const table[] = {{CONVT3D_ACT_NONE, kInfinity, -kInfinity},
                          {CONVT3D_ACT_RELU, kInfinity, 0.0f},
                          {CONVT3D_ACT_LEAKY_RELU, kInfinity, -kInfinity},
                          {CONVT3D_ACT_ELU, kInfinity, -1.0f},
                          {CONVT3D_ACT_GELU, kInfinity, kNan},
                          {CONVT3D_ACT_GELU_TANH, kInfinity, kNan},
                          {CONVT3D_ACT_SILU, kInfinity, kNan},
                          {CONVT3D_ACT_SIGMOID, 1.0f, 0.0f},
                          {CONVT3D_ACT_TANH, 1.0f, -1.0f},
                          {CONVT3D_ACT_HARDSWISH, kInfinity, kNan},
                          {CONVT3D_ACT_X_HARDSWISH, kInfinity, kNan}};
  static_assert(sizeof(table) / sizeof(table[0]) == CONVT3D_ACT_COUNT, "one line per activation");
  for (Limits const& limits : table) {
    float const plus = apply_activation(limits.code, kInfinity, 0.01f);
    float const minus = apply_activation(limits.code, -kInfinity, 0.01f);
    EXPECT_EQ(plus, limits.at_plus) << activation_name(limits.code);
    if (std::isnan(limits.at_minus)) {
      EXPECT_TRUE(std::isnan(minus)) << activation_name(limits.code) << " " << minus;
    } else {
      EXPECT_EQ(minus, limits.at_minus) << activation_name(limits.code);
    }
  }
}

TEST(ActivationTable, HardswishKeepsLargeArgumentsAndItsKinks) {
  EXPECT_EQ(apply_activation(CONVT3D_ACT_HARDSWISH, 3e38f, 0), 3e38f);
  EXPECT_EQ(apply_activation(CONVT3D_ACT_HARDSWISH, 3.0f, 0), 3.0f);
  EXPECT_EQ(apply_activation(CONVT3D_ACT_HARDSWISH, -3.0f, 0), 0.0f);
  EXPECT_EQ(apply_activation(CONVT3D_ACT_X_HARDSWISH, -4.0f, 0), 0.0f);
}

}  // namespace
}  // namespace convt3d
