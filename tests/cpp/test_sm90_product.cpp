// SPDX-License-Identifier: Apache-2.0
//
// The product kernel's host code: what it takes, how it divides the work, and where it is chosen.
#include <gtest/gtest.h>

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
  EXPECT_FALSE(with([](Problem& p) { p.activation = CONVT3D_ACT_GELU; }));
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
