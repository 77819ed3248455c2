// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "convt3d/numerics.hpp"
#include "sm80/split.hpp"

namespace convt3d {
namespace {

static_assert(round_bits_to_tf32(0x3f800fffu) == 0x3f800000u, "below a tie: down");
static_assert(round_bits_to_tf32(0x3f801000u) == 0x3f800000u, "tie, even below: down");
static_assert(round_bits_to_tf32(0x3f803000u) == 0x3f804000u, "tie, even above: up");
static_assert(round_bits_to_tf32(0x3fffffffu) == 0x40000000u, "carries into the exponent");

// Rounding from its definition: scale so that one TF32 unit is 1, round to an even integer, scale back.
float round_by_definition(float value) {
  int exponent = 0;
  std::frexp(value, &exponent);                        // |value| in [2^(exponent - 1), 2^exponent)
  int const unit = std::max(exponent - 1, -126) - 10;  // 10 stored mantissa bits; denormals share one unit
  double const rounded = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(value), -unit)), unit);
  double const largest = bits_to_float(0x7f7fe000u);
  return static_cast<float>(std::copysign(std::min(std::abs(rounded), largest), static_cast<double>(value)));
}

void expect_rounded(uint32_t bits) {
  float const value = bits_to_float(bits);
  ASSERT_EQ(round_bits_to_tf32(bits), float_to_bits(round_by_definition(value))) << std::hex << bits;
}

TEST(RoundToTf32, EqualsTheDefinitionInEveryBinade) {
  uint32_t const low_bits[] = {0, 1, 2, 0x7ff, 0xfff, 0x1000, 0x1001, 0x17ff, 0x1ffe, 0x1fff};
  for (uint32_t sign = 0; sign <= 1; ++sign)
    for (uint32_t exponent = 0; exponent < 255; ++exponent)
      for (uint32_t high = 0; high < 1024; high += (high < 4 || high >= 1020) ? 1 : 17)
        for (uint32_t low : low_bits) expect_rounded((sign << 31) | (exponent << 23) | (high << 13) | low);
}

TEST(RoundToTf32, EqualsTheDefinitionForAllLowBits) {
  for (uint32_t exponent : {0u, 1u, 100u, 127u, 253u, 254u})
    for (uint32_t high : {0u, 1u, 511u, 512u, 1022u, 1023u})
      for (uint32_t low = 0; low < 8192; ++low) expect_rounded((exponent << 23) | (high << 13) | low);
}

TEST(RoundToTf32, FiniteValuesStayFinite) {
  EXPECT_EQ(round_bits_to_tf32(0x7f7fffffu), 0x7f7fe000u);
  EXPECT_EQ(round_bits_to_tf32(0xff7fffffu), 0xff7fe000u);
  EXPECT_EQ(round_bits_to_tf32(0x7f7ff000u), 0x7f7fe000u);
}

TEST(RoundToTf32, ZerosAndInfinitiesAreUnchanged) {
  for (uint32_t bits : {0x00000000u, 0x80000000u, 0x7f800000u, 0xff800000u}) EXPECT_EQ(round_bits_to_tf32(bits), bits);
}

TEST(RoundToTf32, NanStaysNanInTheKeptBits) {
  for (uint32_t sign : {0u, 0x80000000u})
    for (uint32_t payload = 1; payload < (1u << 23); payload = payload < 8192 ? payload + 1 : payload * 2 + 1) {
      uint32_t const rounded = round_bits_to_tf32(sign | 0x7f800000u | payload);
      uint32_t const seen_by_the_tensor_core = rounded & ~0x1fffu;
      ASSERT_TRUE(std::isnan(bits_to_float(seen_by_the_tensor_core))) << std::hex << payload;
      ASSERT_EQ(rounded & 0x80000000u, sign);
    }
}

TEST(RoundToTf32, LeavesTf32ValuesAlone) {
  for (uint32_t bits = 0; bits < 0x7f800000u; bits += 0x2000u * 7) ASSERT_EQ(round_bits_to_tf32(bits), bits);
}

TEST(SplitTf32, PartsAddUpToTheValue) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200000; ++trial) {
    uint32_t bits = static_cast<uint32_t>(random());
    if ((bits & 0x7f800000u) == 0x7f800000u) continue;
    float const value = bits_to_float(bits);
    Tf32Split const split = split_tf32(value);
    ASSERT_EQ(split.high, round_to_tf32(split.high));
    ASSERT_EQ(split.low, round_to_tf32(split.low));
    double const error = std::abs(static_cast<double>(value) - split.high - split.low);
    ASSERT_LE(error, std::max(std::ldexp(std::abs(static_cast<double>(value)), -23), std::ldexp(1.0, -137)))
        << std::hex << bits;
  }
}

TEST(SplitTf32, NonFiniteValuesHaveNoLowPart) {
  float const infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(split_tf32(infinity).high, infinity);
  EXPECT_EQ(split_tf32(infinity).low, 0.0f);
  EXPECT_EQ(split_tf32(-infinity).high, -infinity);
  EXPECT_TRUE(std::isnan(split_tf32(std::nanf("")).high));
  EXPECT_EQ(split_tf32(std::nanf("")).low, 0.0f);
  Tf32Split const largest = split_tf32(std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(largest.high) && std::isfinite(largest.low));
}

// The lower 13 bits of an operand are not there for a tensor core.
double seen_by_the_tensor_core(float part) { return bits_to_float(float_to_bits(part) & ~0x1fffu); }

// The three products of a 3xTF32 multiplication, small ones first, without the rounding of their sum.
double three_products(float a, float b) {
  Tf32Split const x = sm80::split_for_tensor_core(a), y = sm80::split_for_tensor_core(b);
  double const x_high = seen_by_the_tensor_core(x.high), y_high = seen_by_the_tensor_core(y.high);
  return seen_by_the_tensor_core(x.low) * y_high + x_high * seen_by_the_tensor_core(y.low) + x_high * y_high;
}

TEST(SplitForTensorCore, AProductIsRightToTwoUnitsAndUnbiased) {
  std::mt19937 random(2);
  double largest = 0, sum = 0;
  constexpr int kTrials = 1000000;
  for (int trial = 0; trial < kTrials; ++trial) {
    // Mantissas alone: the exponent changes nothing far from the ends of the range.
    float const a = bits_to_float(0x3f800000u | static_cast<uint32_t>(random() >> 9));
    float const b = bits_to_float(0xbf800000u | static_cast<uint32_t>(random() >> 9));
    double const exact = static_cast<double>(a) * b;
    double const units = (three_products(a, b) / exact - 1) * 0x1p22;
    largest = std::max(largest, std::abs(units));
    sum += units;
  }
  EXPECT_LE(largest, 2);
  EXPECT_LE(std::abs(sum / kTrials), 0.01);
}

TEST(SplitForTensorCore, WhatThePartsDoNotHoldIsNan) {
  float const infinity = std::numeric_limits<float>::infinity();
  double const largest = static_cast<double>(bits_to_float(0x7f7fefffu)) * 0x1p-20;
  EXPECT_NEAR(three_products(bits_to_float(0x7f7fefffu), 0x1p-20f), largest, largest * 0x1p-22);
  for (uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t bits : {0x7f7ff000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
      for (float other : {0.f, 1.f, -3e-39f, 1.2345678f, infinity}) {
        float const value = bits_to_float(sign | bits);
        EXPECT_TRUE(std::isnan(three_products(value, other))) << std::hex << bits << " " << other;
        EXPECT_TRUE(std::isnan(three_products(other, value))) << std::hex << bits << " " << other;
      }
    }
  }
}

}  // namespace
}  // namespace convt3d
