// SPDX-License-Identifier: Apache-2.0
//
// The columns kernel's mathematics on the host: where operands lie, how the sum is divided, and what it takes.
#include <gtest/gtest.h>

#include <set>

#include "cases.hpp"
#include "sm80/columns/geometry.hpp"

namespace convt3d::sm80::columns {
namespace {

using convt3d::test::Layout;

Problem sized(int64_t in, int64_t out, int64_t size, int64_t kernel = 2, Layout layout = Layout::kNcdhw) {
  Problem p = test::cubic_problem(1, in, out, size, kernel, 2, kernel == 3, kernel == 3, layout);
  p.dtype = CONVT3D_F16;
  return p;
}

// A column for every output channel and tap, where the weight has it.
TEST(Columns, StepsFollowTheWeight) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = sized(8, 5, 4);
    p.kernel[1] = 3;
    p.kernel[2] = 4;
    test::pack(weight_shape(p), layout, p.weight_stride);
    ColumnSteps const steps = column_steps(p);
    std::set<int64_t> seen;
    for (int64_t c = 0; c < p.out_channels; ++c) {
      for (int64_t d = 0; d < 2; ++d) {
        for (int64_t h = 0; h < 3; ++h) {
          for (int64_t w = 0; w < 4; ++w) {
            int64_t const column = c * steps.channel + d * steps.tap[0] + h * steps.tap[1] + w * steps.tap[2];
            int64_t const* const stride = p.weight_stride;
            EXPECT_EQ(column, c * stride[1] + d * stride[2] + h * stride[3] + w * stride[4]);
            seen.insert(column);
          }
        }
      }
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), column_count(p));
    EXPECT_EQ(*seen.rbegin(), column_count(p) - 1);
    p.weight_stride[2] += 8;
    EXPECT_EQ(column_steps(p).channel, -1);
  }
}

TEST(Columns, VoxelsAreOneDimensionOrNot) {
  Problem p = sized(8, 8, 4);
  EXPECT_EQ(voxel_step(p), 1);
  test::pack(p, Layout::kNdhwc);
  EXPECT_EQ(voxel_step(p), 8);
  p.in_size[2] = 1;
  test::pack(p, Layout::kNdhwc);
  p.x_stride[4] = 99;  // of a dimension of size 1: never used
  EXPECT_EQ(voxel_step(p), 8);
  p.x_stride[2] += 8;
  EXPECT_EQ(voxel_step(p), -1);
}

// The parts cover all steps, none is empty, and none is so short that its start is all of it.
TEST(Columns, PartsCoverTheSum) {
  for (int64_t in : {8, 64, 200, 256, 768, 4096}) {
    for (int64_t out : {8, 32, 128, 520}) {
      for (int64_t size : {2, 4, 8, 16}) {
        for (int64_t kernel : {2, 3}) {
          Problem const p = sized(in, out, size, kernel);
          int64_t const part = steps_of_part(p);
          EXPECT_GE(parts(p) * part, steps(p));
          EXPECT_LT((parts(p) - 1) * part, steps(p));
          EXPECT_GE(part, std::min(kLeastSteps, steps(p)));
          EXPECT_LE(parts(p), kMostParts);
          if (4 * part_floats(p) <= kMostBytes) {
            EXPECT_LE(workspace_bytes(p), kMostBytes);
          }
          if (parts(p) > 1) {
            EXPECT_LE(parts(p) * tiles(p), kWantedBlocks);
          }
        }
      }
    }
  }
  EXPECT_GT(parts(sized(768, 128, 6)), 2);
  EXPECT_EQ(parts(sized(64, 64, 16)), 1);
}

TEST(Columns, TakesMatricesInWholeAccesses) {
  EXPECT_TRUE(takes(sized(768, 128, 6)));
  EXPECT_TRUE(takes(sized(768, 128, 6, 3)));
  EXPECT_TRUE(takes(sized(768, 128, 6, 2, Layout::kNdhwc)));
  EXPECT_FALSE(takes(sized(64, 64, 5)));  // 125 voxels: rows of x start anywhere
  EXPECT_TRUE(takes(sized(64, 64, 5, 2, Layout::kNdhwc)));
  EXPECT_FALSE(takes(sized(12, 64, 5, 2, Layout::kNdhwc)));
  EXPECT_FALSE(takes(sized(64, 3, 4, 3)));     // 81 columns
  EXPECT_FALSE(takes(sized(64, 256, 32, 3)));  // 900 MB of them
  Problem p = sized(64, 64, 4);
  p.x_alignment = 8;
  EXPECT_FALSE(takes(p));
  p = sized(64, 64, 4);
  p.groups = 2;
  EXPECT_FALSE(takes(p));
  p = sized(64, 64, 4);
  p.stride[1] = 5;
  EXPECT_FALSE(takes(p));
  p = sized(64, 64, 4, 5);
  p.padding[0] = p.padding[1] = p.padding[2] = 2;
  EXPECT_FALSE(takes(p));  // three taps
  p = sized(64, 64, 4);
  p.weight_stride[0] += 4;
  EXPECT_FALSE(takes(p));
  p = sized(64, 64, 4);
  p.x_stride[2] = p.x_stride[3] = p.x_stride[4] = 0;
  EXPECT_FALSE(takes(p));  // one voxel for all
  p = sized(64, 64, 4, 2, Layout::kNdhwc);
  p.x_stride[2] = p.x_stride[3] = p.x_stride[4] = 0;
  EXPECT_TRUE(takes(p));
  p = sized(64, 64, 4);
  p.batch = int64_t{1} << 40;
  EXPECT_FALSE(takes(p));
}

}  // namespace
}  // namespace convt3d::sm80::columns
