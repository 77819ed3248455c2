// SPDX-License-Identifier: Apache-2.0
//
// What the sm80 family gives back to sums of many products (docs/numerics.md).
#include <gtest/gtest.h>

#include "cases.hpp"
#include "sm80/sums.hpp"

namespace convt3d::sm80 {
namespace {

using convt3d::test::Layout;

struct Mode {
  convt3d_dtype dtype;
  convt3d_precision precision;
  float units;   // of 2^-22, for kSumProducts
  float factor;  // the bound's constant
};

constexpr Mode kModes[] = {{CONVT3D_F32, CONVT3D_TF32, 4.f, 8.f},
                           {CONVT3D_F16, CONVT3D_TF32, 4.f, 4.f},
                           {CONVT3D_BF16, CONVT3D_TF32, 2.f, 4.f},
                           {CONVT3D_F32, CONVT3D_IEEE, 0.f, 4.f}};

Problem make(Mode const& mode, int64_t channels) {
  Problem p = test::cubic_problem(1, channels, 64, 4, 3, 2, 1, 1, Layout::kNcdhw);
  p.dtype = mode.dtype;
  p.precision = mode.precision;
  return p;
}

// Nothing may have been cut off, so what is given back must be within the bound by itself.
TEST(Sm80Sums, GetBackWhatTheBoundAllows) {
  for (Mode const& mode : kModes) {
    Problem const p = make(mode, 32);
    float before = 0.f;
    for (int64_t products = 0; products <= 4096; ++products) {
      float const share = cut_share(p, products);
      EXPECT_LE(share * 0x1p22f, mode.factor);
      if (products <= 128) {
        EXPECT_EQ(share, 0.f);
      } else if (products < kSumProducts) {
        EXPECT_GE(share, before);
      } else if (products == kSumProducts) {
        EXPECT_EQ(share * 0x1p22f, mode.units);
      } else {  // each part of a longer sum by itself loses as much
        EXPECT_EQ(share, mode.units * 0x1p-22f * short_sum_products(p) / kSumProducts);
      }
      before = share;
    }
  }
}

TEST(Sm80Sums, LongestSum) {
  // Eight taps in the class of odd outputs.
  EXPECT_EQ(longest_sum(make(kModes[0], 32)), 256);
  EXPECT_EQ(longest_sum(make(kModes[1], 33)), 8 * 40);
  EXPECT_EQ(short_sum_products(make(kModes[0], 32)), 256);
  EXPECT_EQ(short_sum_products(make(kModes[1], 32)), 256);
  EXPECT_EQ(short_sum_products(make(kModes[2], 32)), 384);
}

}  // namespace
}  // namespace convt3d::sm80
