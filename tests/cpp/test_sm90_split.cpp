// SPDX-License-Identifier: Apache-2.0
//
// fp32 in two fp16 parts: the number format, what its bounds say, and where the parts lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cases.hpp"
#include "convt3d/numerics.hpp"
#include "sm90_emulation.hpp"
#include "sm90_problems.hpp"

namespace convt3d::sm90 {
namespace {

uint32_t bits_of(double value) { return float_to_bits(static_cast<float>(value)); }

/// The nearest fp16 value, ties to even, as far as there is one.
double to_half(double value) {
  if (value == 0) return 0;
  int const exponent = std::max(std::ilogb(value), -14);
  double const unit = std::ldexp(1.0, exponent - 10);
  double const rounded = std::nearbyint(value / unit) * unit;
  return std::abs(rounded) > 65504 ? std::copysign(HUGE_VAL, rounded) : rounded;
}

TEST(Sm90Split, ScaleKeepsTheLargestFinite) {
  for (double largest : {1e-45, 1e-38, 1e-30, 1e-3, 1.0, 1.99, 1.9990234375, 1.99903, 65504.0, 65520.0, 3.4028234e38}) {
    int const k = split_exponent(bits_of(largest));
    EXPECT_LE(k, kLargestExponent);
    EXPECT_GE(k, -kLargestExponent);
    double const scaled = std::ldexp(static_cast<double>(static_cast<float>(largest)), k);
    EXPECT_LE(scaled, 65504) << largest;
    EXPECT_TRUE(std::isfinite(to_half(scaled)));
    if (k < kLargestExponent) {
      EXPECT_GE(scaled, 32752) << largest;  // half of it is the next step down
    }
  }
  EXPECT_EQ(split_exponent(0), 0);
}

TEST(Sm90Split, PartsHoldWhatSplits) {
  int splitting = 0;
  for (double largest : {3e-39, 1e-30, 1.0, 1.9999, 3.4e38}) {
    int const k = split_exponent(bits_of(largest));
    for (int step = 0; step < 4000; ++step) {
      auto const value = static_cast<float>(largest * std::pow(2.0, -0.01 * step) * (step % 3 == 0 ? -1 : 1));
      double const scaled = std::ldexp(static_cast<double>(value), k);
      EXPECT_EQ(can_split(float_to_bits(value), k), value == 0 || std::abs(scaled) >= 0x1p-14) << value;
      if (!can_split(float_to_bits(value), k)) continue;
      ++splitting;
      double const hi = to_half(scaled);
      double const lo = to_half((scaled - hi) * (1 << kSplitShift));
      EXPECT_LE(std::abs(scaled - hi - lo / (1 << kSplitShift)), std::abs(scaled) * 0x1p-22) << value;
    }
  }
  EXPECT_GT(splitting, 8000);
  EXPECT_TRUE(can_split(0x80000000u, 0));                  // -0
  EXPECT_FALSE(can_split(kInfinityBits, 0));               // inf
  EXPECT_FALSE(can_split(0x7fc00000u, kLargestExponent));  // nan
  EXPECT_FALSE(can_split(1, kLargestExponent));            // the smallest denormal, at the largest scale
}

/// In parts, as fp32 and fp16 arithmetic makes them.
double in_parts(double scaled, double* hi = nullptr, double* lo = nullptr) {
  double const high = to_half(scaled);
  double const low = to_half((scaled - high) * (1 << kSplitShift));
  if (hi != nullptr) *hi = high;
  if (lo != nullptr) *lo = low;
  return high + low / (1 << kSplitShift);
}

TEST(Sm90Split, TinyValuesAreHeldTo2ToTheMinus36) {
  double largest = 0;
  for (int step = 1; step < 40000; ++step) {
    auto const scaled = static_cast<double>(static_cast<float>(std::pow(2.0, -14 - 0.001 * step)));
    largest = std::max(largest, std::abs(scaled - in_parts(scaled)));
  }
  EXPECT_LE(largest, 0x1p-36);
  EXPECT_GT(largest, 0x1p-37);
}

/// An output at or above the floor keeps the bound however many of its operands are tiny, and one below may not.
TEST(Sm90Split, FloorKeepsSumsAccurate) {
  convt3d::test::Random random(7);
  constexpr int kProducts = 64;
  double kept = 0, spoilt = 0;
  int at_floor = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    int const exponent = static_cast<int>(random.integer(-40, -8));
    int const others = static_cast<int>(random.integer(0, 3));  // values that are not tiny
    double sum = 0, exact = 0, magnitude = 0;
    int tiny = 0;
    for (int i = 0; i < kProducts; ++i) {
      int const of_x = i < others ? static_cast<int>(random.integer(-14, 2)) : exponent;
      double const x = static_cast<double>(static_cast<float>(std::ldexp(random.uniform(), of_x)));
      double const w = static_cast<double>(static_cast<float>(std::ldexp(random.uniform(), 15)));
      tiny += x != 0 && std::abs(x) < 0x1p-14;
      double hi[2], lo[2];
      in_parts(x, &hi[0], &lo[0]);
      in_parts(w, &hi[1], &lo[1]);
      sum += hi[0] * hi[1] + (hi[0] * lo[1] + lo[0] * hi[1]) / (1 << kSplitShift);
      exact += x * w;
      magnitude += std::abs(x * w);
    }
    double const units = std::abs(sum - exact) / magnitude * 0x1p22;
    bool const small = std::abs(sum) < static_cast<double>(kTinyFloor) * tiny;
    double& largest = small ? spoilt : kept;
    largest = std::max(largest, units);
    at_floor += !small && std::abs(sum) < 64.0 * static_cast<double>(kTinyFloor) * tiny;
  }
  EXPECT_LE(kept, 0.75 + 1.75);  // beside the tiny ones: both operands to one half or one unit, the dropped product
  EXPECT_GT(spoilt, 4);
  EXPECT_GT(at_floor, 100);
}

TEST(Sm90Split, ProductsOfAnOutput) {
  for (int64_t kernel = 2; kernel <= 5; ++kernel) {
    for (int64_t padding = 0; padding < kernel; ++padding) {
      Problem p = convt3d::test::cubic_problem(1, 24, 16, 4, kernel, 2, padding, 0, convt3d::test::Layout::kNcdhw);
      int64_t most = 0;
      for (int parity = 0; parity < 2; ++parity) {
        Window const w = window(kernel, padding);
        int64_t taps = 0;
        for (int delta = w.lo; delta < w.lo + w.count; ++delta) taps += is_live(parity, delta, kernel, padding);
        most = std::max(most, taps);
      }
      EXPECT_EQ(most_products(p), 24 * most * most * most);
    }
  }
}

TEST(Sm90Split, RegionsThatMayBeSmallAreInBinsThatCount) {
  for (int k = -kLargestExponent; k <= kLargestExponent; ++k) {
    for (uint32_t bits = 1; bits < kInfinityBits; bits += 0x1ffff) {
      if (bits < power_of_two_bits(kSmallRegion - k)) {
        EXPECT_TRUE(bin_counts(exponent_bin(bits), k)) << bits << ' ' << k;
      }
      if (bits >= power_of_two_bits(std::min(127, kSmallRegion + 4 - k))) {
        EXPECT_FALSE(bin_counts(exponent_bin(bits), k) && exponent_bin(bits) > 0) << bits << ' ' << k;
      }
    }
    EXPECT_TRUE(bin_counts(exponent_bin(kInfinityBits), k));
    EXPECT_TRUE(bin_counts(exponent_bin(0x7fc00000u), k));
  }
  // Nor does the largest bin of a tensor count as small.
  for (double largest : {1e-20, 1.0, 1e30}) {
    EXPECT_FALSE(bin_counts(exponent_bin(bits_of(largest)), split_exponent(bits_of(largest)) - kHeadRoom));
  }
}

TEST(Sm90Split, SampleTakesOneRegionOfEachGroup) {
  EXPECT_EQ(sample_step(0, 8448), 1);
  EXPECT_EQ(sample_step(8448, 8448), 1);
  EXPECT_EQ(sample_step(8449, 8448), 2);
  EXPECT_EQ(sample_step(int64_t{1} << 40, 8448), kLargestSampleStep);
  for (int step : {1, 2, 3, 16, kLargestSampleStep}) {
    std::vector<int> seen(static_cast<size_t>(step));
    for (int64_t group = 0; group < 5000; ++group) {
      int64_t const within = sampled_region(group, step) - group * step;
      ASSERT_GE(within, 0);
      ASSERT_LT(within, step);
      ++seen[static_cast<size_t>(within)];
    }
    for (int count : seen) EXPECT_GT(count, 5000 / step / 2);
  }
}

/// Blocks overlap only in rows that are zeros in both.
TEST(Sm90Split, BlocksShareZerosAlone) {
  for (int kernel : {2, 3, 4}) {
    for (int padding : {0, 1, 2}) {
      for (int along_w : {2, 3, 4}) {
        Problem p = make(1, 32, 16, {3, 16, 16}, {3, kernel, along_w}, {1, padding, 1}, {0, 0, 0}, CONVT3D_F32, true);
        p.precision = CONVT3D_IEEE;
        BlockPlaces const places = block_places(p);
        Window const h = window(kernel, padding);
        Window const w = window(along_w, 1);
        std::vector<int> owner(places.bytes / 128, -1);
        auto each_row = [&](auto visit) {
          for (int i = 0; i < h.count * w.count; ++i) {
            for (int row = 0; row < 64; ++row) {
              BlockRow const r = block_row(true, true, 4, 0, 0, row);
              bool const live = is_live(r.parity[1], h.lo + i / w.count, kernel, padding) &&
                                is_live(r.parity[2], w.lo + i % w.count, along_w, 1);
              visit(i, owner.at(places.at[i] / 128 + row), live);
            }
          }
        };
        each_row([](int block, int& of, bool live) {
          if (!live) return;
          EXPECT_EQ(of, -1);
          of = block;
        });
        each_row([](int block, int of, bool live) { EXPECT_EQ(of, live ? block : -1); });
        for (int i = 0; i < h.count * w.count; ++i) EXPECT_EQ(places.at[i] % 1024, 0);
        if (kernel == 3 && padding == 1 && along_w == 3) {
          EXPECT_EQ(places.bytes, 4 * kWeightBlockBytes * 14 / 16);
        }
      }
    }
  }
}

/// wgmma reads row r, channel k of the hi parts at byte 2 k of a row of 128, of the lo parts 64 bytes on.
TEST(Sm90Split, PartsLieWhereWgmmaReadsThem) {
  for (int row = 0; row < 170; ++row) {
    for (int k = 0; k < 32; ++k) {
      int const hi = swizzled(row * 128 + 2 * k, 128);
      int const lo = swizzled(row * 128 + 64 + 2 * k, 128);
      int const slab = split_slab_offset(row, k / 4) + k % 4 * 2;
      EXPECT_EQ(slab, hi);
      EXPECT_EQ(slab ^ kLowPart, lo);
      if (row < 64) {
        EXPECT_EQ(split_weight_offset(row, k), hi);
      }
    }
  }
}

}  // namespace
}  // namespace convt3d::sm90
