// SPDX-License-Identifier: Apache-2.0
//
// The joint kernel's mathematics against the definition of a transposed convolution: its taps, its rows of x, its place
// for every sum; and what it takes.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "cases.hpp"
#include "sm80/joint/geometry.hpp"

namespace convt3d::sm80::joint {
namespace {

using convt3d::test::Layout;

/// Every tap of every class once, with the input that the definition gives it.
template <class Kind>
void check_taps() {
  TapList<Kind> const list = list_taps<Kind>();
  std::set<std::tuple<int, int, int>> seen;
  for (Tap const& tap : list.v) {
    seen.insert({tap.tap[0], tap.tap[1], tap.tap[2]});
    int const residue[3] = {tap.cls / 4, tap.cls / 2 % 2, tap.cls % 2};
    for (int axis = 0; axis < 3; ++axis) {
      int const position = 5;
      // o + p - k = s * i
      EXPECT_EQ(2 * position + residue[axis] + Kind::kPadding - tap.tap[axis], 2 * (position + tap.delta[axis]));
      EXPECT_GE(tap.tap[axis], 0);
      EXPECT_LT(tap.tap[axis], Kind::kKernel);
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(Kind::kTaps));
}

TEST(JointTaps, EveryTapOnceWithItsInput) {
  check_taps<Kind<2, 0>>();
  check_taps<Kernel3>();
}

Problem sized(int64_t batch, int64_t depth, int64_t height, int64_t width, int kernel = 3) {
  Problem p = test::cubic_problem(batch, 64, 32, 1, kernel, 2, kernel == 3, kernel == 3, Layout::kNcdhw);
  p.in_size[0] = depth;
  p.in_size[1] = height;
  p.in_size[2] = width;
  test::pack(p, Layout::kNcdhw);
  p.dtype = CONVT3D_F16;
  return p;
}

/// The row that stands for a neighbour inside x holds its voxel, for every position of every tile.
void check_rows(Problem const& p) {
  XRows const x = x_rows<Kernel3>(p.in_size);
  auto const [depth, height, width] = std::tuple{p.in_size[0], p.in_size[1], p.in_size[2]};
  for (int64_t begin = 0; begin < positions(p); begin += kPositions) {
    for (int i = 0; i < kPositions && begin + i < positions(p); ++i) {
      int64_t const number = begin + i;
      int64_t const w = number % width, h = number / width % height, d = number / width / height % depth;
      for (int bits = 0; bits < 8; ++bits) {
        int const next[3] = {bits & 1, bits >> 1 & 1, bits >> 2};
        if (d + next[0] >= depth || h + next[1] >= height || w + next[2] >= width) continue;
        int64_t const row = i + next[0] * x.depth + next[1] * width + next[2];
        ASSERT_LT(row, x.rows);
        int64_t const held = begin + row + (row < x.near ? 0 : x.skip);
        ASSERT_EQ(held, number + (next[0] * height + next[1]) * width + next[2]);
      }
    }
  }
}

TEST(JointRows, HoldTheNeighbours) {
  for (int64_t depth : {1, 2, 4, 5}) {
    for (int64_t height : {1, 2, 4, 8, 13, 40}) {
      for (int64_t width : {1, 2, 3, 4, 8, 12, 31, 60}) check_rows(sized(3, depth, height, width));
    }
  }
}

TEST(JointSums, EachHasAPlaceOfItsOwn) {
  std::set<int> places;
  for (int cls = 0; cls < kClasses; ++cls) {
    for (int channel = 0; channel < kChannels; ++channel) {
      for (int position = 0; position < kPositions; ++position) places.insert(sum_index(cls, channel, position));
    }
  }
  EXPECT_EQ(places.size(), static_cast<size_t>(kClasses * kChannels * kPositions));
  EXPECT_LT(*places.rbegin() * 4, kSumBytes);
}

TEST(JointSums, AccessesDoNotConflict) {
  auto const distinct_banks = [](auto const& index) {
    std::set<int> banks;
    for (int lane = 0; lane < 32; ++lane) banks.insert(index(lane) % 32);
    return banks.size() == 32;
  };
  // Products: 8 positions by 4 pairs of channels.
  EXPECT_TRUE(distinct_banks([](int lane) { return sum_index(3, lane % 4 * 2, lane / 4); }));
  // NCDHW: 16 positions of both H parities, here rows of 4. NDHWC: 16 positions by two accesses, of 8 or 4 channels.
  EXPECT_TRUE(distinct_banks([](int lane) { return sum_index(2 * (lane / 4 % 2), 5, lane / 8 * 4 + lane % 4); }));
  EXPECT_TRUE(distinct_banks([](int lane) { return sum_index(2, 3 + lane / 16 * 8, lane % 16); }));
  EXPECT_TRUE(distinct_banks([](int lane) { return sum_index(2, 3 + lane / 16 * 4, lane % 16); }));
}

TEST(JointTakes, KernelsOfThreeAtStrideTwo) {
  EXPECT_TRUE(takes(sized(1, 4, 4, 4)));
  EXPECT_FALSE(takes(sized(1, 4, 4, 4, 2)));
  Problem odd = sized(1, 4, 4, 4);
  odd.output_padding[1] = 0;
  EXPECT_TRUE(takes(odd));
  Problem stride = sized(1, 4, 4, 4);
  stride.stride[0] = 1;
  EXPECT_FALSE(takes(stride));
  Problem padding = sized(1, 4, 4, 4);
  padding.padding[0] = 0;
  EXPECT_FALSE(takes(padding));
  Problem ieee = sized(1, 4, 4, 4);
  ieee.dtype = CONVT3D_F32;
  ieee.precision = CONVT3D_IEEE;
  EXPECT_FALSE(takes(ieee));
  ieee.precision = CONVT3D_TF32;
  EXPECT_TRUE(takes(ieee));
  EXPECT_FALSE(takes(sized(1, 2, 200, 400)));  // too many rows for shared memory
  EXPECT_FALSE(takes(sized(int64_t{1} << 40, 2, 2, 2)));
}

TEST(JointTakes, ChosenForManyChannelsAndFewTiles) {
  Problem p = sized(64, 4, 4, 4);
  p.in_channels = 256;
  p.out_channels = 128;
  EXPECT_TRUE(chosen(p));
  p.batch = 128;
  EXPECT_FALSE(chosen(p));
  wherever_possible = true;
  EXPECT_TRUE(chosen(p));
  wherever_possible = false;
  p.batch = 1;
  EXPECT_TRUE(chosen(p));
  p.in_channels = 128;
  EXPECT_FALSE(chosen(p));
  p.in_channels = 256;
  p.stride[2] = 1;
  EXPECT_FALSE(chosen(p));
}

TEST(JointTakes, WeightsWhereTheyLie) {
  Problem p = sized(1, 4, 4, 4);
  EXPECT_FALSE(reads_weight_in_place(p));
  test::pack(weight_shape(p), Layout::kNdhwc, p.weight_stride);
  EXPECT_TRUE(reads_weight_in_place(p));
  p.weight_stride[0] += 4;
  EXPECT_FALSE(reads_weight_in_place(p));
  p.weight_stride[0] -= 4;
  p.dtype = CONVT3D_F32;
  EXPECT_FALSE(reads_weight_in_place(p));
}

TEST(JointTakes, PartsWhereTilesAreFew) {
  Problem p = sized(1, 4, 4, 4);
  p.in_channels = 512;
  p.out_channels = 256;
  EXPECT_EQ(splits(p), 8);
  EXPECT_EQ(partial_bytes(p), int64_t{16} * 8 * kPartFloats * 4);
  p.batch = 64;
  EXPECT_EQ(splits(p), 1);
  EXPECT_EQ(partial_bytes(p), 0);
  p.batch = 1;
  p.in_channels = 16;
  EXPECT_EQ(splits(p), 1);
}

}  // namespace
}  // namespace convt3d::sm80::joint
