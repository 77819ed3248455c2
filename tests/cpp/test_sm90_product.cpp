// SPDX-License-Identifier: Apache-2.0
//
// The product kernel's host code: what it takes, how it divides the work, and where it is chosen.
#include <gtest/gtest.h>

#include <set>

#include "cases.hpp"
#include "sm90_problems.hpp"

namespace convt3d::sm90::product {
namespace {

using convt3d::test::Layout;

Problem halves(int batch, int in, int out, int size, convt3d_dtype dtype = CONVT3D_F32) {
  Problem p = make(batch, in, out, {size, size, size}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}, dtype, true);
  test::pack(weight_shape(p), Layout::kNdhwc, p.weight_stride);
  return p;
}

/// That two lanes, of the columns of their two rows, have two neighbouring ones each after their exchange, the first of
/// which first_column() tells.
void expect_neighbours(int element, int warp, int const (&columns)[32][2]) {
  for (int lane = 0; lane < 32; ++lane) {
    int const of_row = lane / 4 % 2, first = first_column(element, warp, lane);
    EXPECT_EQ(first % 2, 0);
    EXPECT_EQ(columns[lane & ~4][of_row], first);
    EXPECT_EQ(columns[lane | 4][of_row], first + 1);
  }
}

TEST(Product, TakesPatchesInChannelsLast) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16})
    EXPECT_TRUE(takes(halves(2, 320, 320, 8, dtype)));
  auto with = [](auto change) {
    Problem p = halves(2, 64, 32, 4);
    change(p);
    return takes(p);
  };
  EXPECT_TRUE(with([](Problem&) {}));
  EXPECT_TRUE(with([](Problem& p) { p.has_add = 0; }));
  EXPECT_TRUE(with([](Problem& p) { p.activation = CONVT3D_ACT_RELU; }));
  EXPECT_TRUE(with([](Problem& p) { p.activation = CONVT3D_ACT_GELU; }));
  EXPECT_FALSE(with([](Problem& p) { p.precision = CONVT3D_IEEE; }));
  EXPECT_FALSE(with([](Problem& p) { p.output_padding[1] = 1; }));
  EXPECT_FALSE(with([](Problem& p) { p.padding[0] = 1; }));
  EXPECT_FALSE(with([](Problem& p) { p.stride[2] = 1; }));
  EXPECT_FALSE(with([](Problem& p) { p.batch = 0; }));
  EXPECT_FALSE(with([](Problem& p) { test::pack(weight_shape(p), Layout::kNcdhw, p.weight_stride); }));
  EXPECT_FALSE(with([](Problem& p) { test::pack(x_shape(p), Layout::kNcdhw, p.x_stride); }));
  EXPECT_FALSE(with([](Problem& p) { test::pack(y_shape(p), Layout::kNcdhw, p.y_stride); }));
  EXPECT_FALSE(with([](Problem& p) { p.x_alignment = 8; }));
  EXPECT_TRUE(with([](Problem& p) { p.y_alignment = 8; }));
  EXPECT_FALSE(with([](Problem& p) { p.y_alignment = 4; }));
  EXPECT_FALSE(with([](Problem& p) { p.add_alignment = 4; }));
  EXPECT_FALSE(with([](Problem& p) { p.add_stride[1] = 0; }));
  EXPECT_FALSE(with([](Problem& p) { p.x_stride[3] += 64; }));         // rows of another matrix
  EXPECT_FALSE(with([](Problem& p) { p.x_stride[4] = 0; }));           // one voxel for all
  EXPECT_FALSE(with([](Problem& p) { p.y_stride[0] = kMostReach; }));  // offsets are of 32 bits
  EXPECT_TRUE(takes(halves(1, 64, 4, 4)));
  EXPECT_FALSE(takes(halves(1, 64, 2, 4)));  // 64 bytes of columns: the copy engine's accesses have 128
}

// The voxels of a slice of channels, and of one with a single voxel along an axis.
TEST(Product, RowsOfX) {
  Problem p = halves(2, 64, 32, 4);
  EXPECT_EQ(x_row(p), 64);
  for (int axis : {0, 2, 3, 4}) p.x_stride[axis] = p.x_stride[axis] / 64 * 80;
  EXPECT_TRUE(takes(p));
  EXPECT_EQ(x_row(p), 80);
  p = halves(1, 64, 32, 1);
  p.x_stride[4] = 7;  // of a dimension of size 1: never used
  EXPECT_TRUE(takes(p));
  EXPECT_EQ(x_row(p), 64);
}

TEST(Product, TilesFillADevice) {
  EXPECT_EQ(warpgroups(halves(1, 64, 32, 4), 132), 1);
  EXPECT_EQ(warpgroups(halves(2, 320, 320, 8), 132), 3);
  for (int count = 1; count <= kMostWarpgroups; ++count) {
    EXPECT_GE(stages(count), 4);
    EXPECT_LE(stages(count), kMostStages);
    EXPECT_LE(stages(count) * stage_bytes(count), kSharedBytes);
  }
  Problem const p = halves(2, 320, 320, 8);
  EXPECT_EQ(position_tiles(p), 8);
  EXPECT_EQ(column_tiles(p, 3), 14);
  EXPECT_EQ(steps(p), 10);
}

// TF32's words of the weight, found in shared memory as the copy engine leaves them there: the k that wgmma wants of
// each lane, all of one column for each of its two rows, and no two lanes of an access in one bank.
TEST(Product, WordsOfTheWeight) {
  for (int warp = 0; warp < 4; ++warp) {
    int columns[32][2];
    for (int i = 0; i < 4; ++i) {
      for (int word = 0; word < 4; ++word) {
        std::set<uint32_t> banks;
        for (int lane = 0; lane < 32; ++lane) {
          int const at = static_cast<int>(next_word(first_word(warp, lane), i, word));
          ASSERT_LT(at, kWeightBytes);
          int const k = at % 4096 / 128, access = at % 128 / 16 ^ k % 8,
                    column = at / 4096 * 32 + access * 4 + at % 16 / 4;
          EXPECT_EQ(k, 8 * i + 4 * (word / 2) + lane % 4);
          int& of_row = columns[lane][word % 2];
          if (i == 0 && word < 2) of_row = column;
          EXPECT_EQ(column, of_row);
          banks.insert(static_cast<uint32_t>(at) / 4 % 32);
        }
        EXPECT_EQ(banks.size(), 32u);
      }
    }
    expect_neighbours(4, warp, columns);
  }
}

// 16-bit types: the tensor core's rows are the columns.
TEST(Product, RowsAreColumns) {
  for (int warp = 0; warp < 4; ++warp) {
    int columns[32][2];
    for (int lane = 0; lane < 32; ++lane) {
      for (int second = 0; second < 2; ++second) columns[lane][second] = warp * 16 + lane / 4 + 8 * second;
    }
    expect_neighbours(2, warp, columns);
  }
}

TEST(Product, IsChosenWhereItIsFaster) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16}) {
    Problem const small = halves(2, 320, 320, 8, dtype), large = halves(2, 256, 128, 32, dtype);
    EXPECT_TRUE(chooses_product(small, 132));
    EXPECT_TRUE(worthwhile(small, kH200));
    EXPECT_TRUE(takes(large));
    EXPECT_FALSE(chooses_product(large, 132));
  }
}

}  // namespace
}  // namespace convt3d::sm90::product
