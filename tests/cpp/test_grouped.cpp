// SPDX-License-Identifier: Apache-2.0
//
// Problems with groups: what the kernels for few channels take, how they cut a problem into thread blocks, which taps
// meet in a cell, and one group as a problem of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cases.hpp"
#include "groups.hpp"
#include "sm80/grouped/grouped.hpp"

namespace convt3d::sm80::grouped {
namespace {

using test::Layout;

Problem problem(int64_t groups, int64_t inputs, int64_t outputs, int64_t size, int64_t kernel, int64_t stride,
                Layout layout = Layout::kNcdhw) {
  Problem p = test::cubic_problem(2, groups * inputs, groups * outputs, size, kernel, stride, kernel / 2, 0, layout);
  p.groups = groups;
  test::pack(p, layout);
  return p;
}

std::string refusal(Problem const& p) {
  char text[256] = "";
  Message message(text, sizeof text);
  return supported(p, message) == CONVT3D_OK ? "" : text;
}

// One number takes in 128 products at most.
TEST(Grouped, LongSumsHaveParts) {
  Problem p = problem(4, 1, 1, 8, 7, 2);
  p.stride[0] = 1;
  EXPECT_TRUE(takes_cells(p)) << "7 * 4 * 4";
  EXPECT_GT(products_of_part(p), 7 * 4 * 4);
  p.kernel[0] = 9;
  EXPECT_FALSE(takes_cells(p));
  EXPECT_EQ(products_of_part(p), 16);
  p = problem(40, 16, 1, 8, 7, 1);
  EXPECT_EQ(products_of_part(p), 16 * 343 / 64);
}

TEST(Grouped, TakesMedNeXtAndSmallGroups) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    for (int64_t kernel : {1, 3, 5, 7}) EXPECT_EQ(refusal(problem(32, 1, 1, 64, kernel, 2, layout)), "") << kernel;
    EXPECT_EQ(refusal(problem(8, 4, 3, 16, 3, 2, layout)), "");
    EXPECT_EQ(refusal(problem(100, 8, 8, 16, 3, 2, layout)), "") << "too many groups for a launch each";
  }
}

// By the definition: which inputs the outputs of a tile of positions read, and how many half steps a class has.
TEST(GroupedOnTensorCores, ReachesWhatItsTapsRead) {
  for (int64_t kernel : {1, 2, 3, 5}) {
    for (int64_t stride : {1, 2, 3}) {
      for (int64_t dilation : {1, 2}) {
        Problem p = problem(8, 12, 8, 16, kernel, stride);
        p.dtype = CONVT3D_F16;
        for (int64_t& value : p.dilation) value = dilation;
        for (int axis = 0; axis < 3; ++axis) {
          int64_t low = 0, high = 0;
          bool any = false;
          for (int64_t o = 0; o < stride * mma::kTile[axis]; ++o) {
            for (int64_t k = 0; k < kernel; ++k) {
              int64_t const from = o + p.padding[axis] - k * dilation;
              if (((from % stride) + stride) % stride != 0) continue;
              int64_t const input = (from - ((from % stride) + stride) % stride) / stride;
              low = any ? std::min(low, input) : input;
              high = any ? std::max(high, input) : input;
              any = true;
            }
          }
          mma::Reach const reach = mma::reach(p, axis);
          EXPECT_EQ(reach.low, low) << kernel << stride << dilation;
          EXPECT_EQ(reach.low + reach.extent, high + 1) << kernel << stride << dilation;
        }
        int64_t halves = 0;  // two eighths of 12 channels for each tap of a class, rounded up to whole steps
        for (int64_t i = 0; i < stride * stride * stride; ++i) halves += 2 * residue_class(p, i).taps();
        EXPECT_EQ(mma::steps(p), (halves + 1) / 2);
        EXPECT_EQ(halves, 2 * kernel * kernel * kernel);
      }
    }
  }
}

TEST(GroupedOnTensorCores, IsChosenWhereItIsFaster) {
  auto const chosen = [](int64_t groups, int64_t inputs, int64_t outputs, int64_t size, int64_t kernel, int64_t stride,
                         Layout layout = Layout::kNcdhw, convt3d_dtype dtype = CONVT3D_F16) {
    Problem p = problem(groups, inputs, outputs, size, kernel, stride, layout);
    p.dtype = dtype;
    return on_tensor_cores(p);
  };
  EXPECT_TRUE(chosen(32, 8, 8, 16, 3, 2)) << "0.18 ms, 0.43 with a launch for each group";
  EXPECT_TRUE(chosen(32, 8, 8, 16, 3, 2, Layout::kNdhwc, CONVT3D_BF16)) << "0.18, 0.75";
  EXPECT_FALSE(chosen(4, 16, 16, 32, 3, 2)) << "0.29, 0.11";
  EXPECT_FALSE(chosen(16, 32, 32, 16, 3, 2)) << "0.42, 0.23";
  EXPECT_TRUE(chosen(16, 16, 16, 16, 3, 1)) << "0.07, 0.23";
  EXPECT_TRUE(chosen(40, 8, 8, 8, 3, 2)) << "0.042, 0.19 by the gather";
  EXPECT_TRUE(chosen(64, 4, 4, 16, 3, 2)) << "0.25, 0.39 by the gather";
  EXPECT_FALSE(chosen(64, 4, 4, 16, 3, 2, Layout::kNdhwc)) << "0.39, 0.38";
  EXPECT_FALSE(chosen(64, 2, 2, 16, 3, 2)) << "0.23, 0.12";
  EXPECT_FALSE(chosen(32, 8, 8, 16, 3, 2, Layout::kNcdhw, CONVT3D_F32)) << "16-bit types alone";
  EXPECT_FALSE(chosen(40, 33, 8, 8, 3, 2)) << "too many channels";
  EXPECT_FALSE(chosen(32, 8, 8, 16, 13, 1)) << "too many weights";
}

TEST(Grouped, RefusesWhatDoesNotFit) {
  auto const with = [](auto change) {
    Problem p = problem(32, 1, 1, 16, 3, 2);
    change(p);
    return refusal(p);
  };
  std::string const groups = "sm80: with groups, ";
  EXPECT_EQ(with([](Problem& p) { p.in_channels = 160; }),
            groups + "the input channels of one is 5, the kernel takes at most 4");
  EXPECT_EQ(with([](Problem& p) { p.stride[0] = 9; }), groups + "a stride is 9, the kernel takes at most 8");
  EXPECT_EQ(with([](Problem& p) { p.kernel[0] = p.kernel[1] = p.kernel[2] = 23; }),
            groups + "the number of taps is 12167, the kernel takes at most 11264");
  EXPECT_EQ(refusal(problem(32, 1, 1, 16, 8, 2, Layout::kNdhwc)),
            groups + "the weights of a thread block is 16384, the kernel takes at most 11264");
  EXPECT_EQ(with([](Problem& p) { p.x_stride[2] = int64_t{1} << 28; }),
            groups + "a stride of x is 268435456, the kernel takes less than 2^31 over all that taps reach");
  EXPECT_EQ(with([](Problem& p) { p.x_stride[2] = p.x_stride[3] = int64_t{1} << 26; }),
            groups + "the distance within a channel of x is 3355443225, the kernel takes less than 2^31 elements");
  EXPECT_EQ(refusal(problem(100, 17, 1, 16, 3, 2)),
            groups + "the input channels of one is 17, the kernel takes at most 16 beyond 32 groups");
  EXPECT_EQ(with([](Problem& p) { p.in_channels = p.groups = int64_t{1} << 31; }),
            groups + "the input channel count is 2147483648, the kernel takes less than 2^31");
  EXPECT_EQ(with([](Problem& p) { p.batch = int64_t{1} << 30; }),
            groups + "the batch is 1073741824, the kernel takes less than 2^31 tiles of all samples");
  EXPECT_EQ(with([](Problem& p) { p.in_size[0] = p.in_size[1] = p.in_size[2] = 1 << 12; }),
            groups + "the number of voxels is 17179869184, the kernel takes less than 2^31 in each residue class");
}

TEST(Grouped, TilesHoldEveryPosition) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    for (int64_t size : {2, 3, 17, 64}) {
      for (int64_t stride : {1, 2, 3}) {
        for (int64_t kernel : {2, 3, 5}) {
          for (int64_t channels : {2, 31, 33, 64}) {
            Problem const p = problem(channels, 1, 1, size, kernel, stride, layout);
            int64_t const outputs_of_position = takes_cells(p) ? 4 * cells_of_position(p) : stride == 2 ? 2 : 1;
            Size5 const y = y_shape(p);
            EXPECT_GE(class_count(p) * positions(p) * outputs_of_position, y[2] * y[3] * y[4]);
            for (int64_t index = 0; index < residue_class_count(p.stride); ++index) {
              EXPECT_TRUE(takes_cells(p) || residue_class(p, index).outputs() <= positions(p));
            }
            EXPECT_LE(positions(p), position_tiles(p) * positions_per_block(p));
            EXPECT_GE(channel_blocks(p) * lane_channels(p), p.out_channels);
            EXPECT_TRUE(y[4] == 1 || lanes_are_channels(p) == (layout == Layout::kNdhwc));
            EXPECT_EQ(takes_cells(p), stride == 2 && kernel % 2 == 1);
          }
        }
      }
    }
  }
}

// Each output of a cell against the definition: every tap once, from the input that it reaches.
template <int K>
void expect_taps_of_a_cell() {
  for (int64_t padding = K / 2 % 2; padding <= K + 2; padding += 2) {
    int64_t const shift = cell_shift(K, padding);
    int64_t const j = 20;
    for (int residue = 0; residue < 2; ++residue) {
      std::vector<int64_t> from(K, -1);
      for (int m = 0; m < Cell<K>::kWindow; ++m) {
        int const tap = Cell<K>::tap(residue, m);
        if (tap < 0 || tap >= K) continue;
        EXPECT_EQ(from[static_cast<size_t>(tap)], -1) << "tap " << tap << " twice";
        from[static_cast<size_t>(tap)] = j + shift + Cell<K>::kFirst + m;
      }
      for (int64_t k = 0; k < K; ++k) {
        int64_t const twice = 2 * j + residue + padding - k;
        EXPECT_EQ(from[static_cast<size_t>(k)], twice % 2 == 0 ? twice / 2 : -1)
            << "K " << K << " padding " << padding << " residue " << residue << " tap " << k;
      }
    }
  }
}

TEST(Grouped, CellsTakeTheirTaps) {
  expect_taps_of_a_cell<3>();
  expect_taps_of_a_cell<5>();
  expect_taps_of_a_cell<7>();
}

TEST(Grouped, PairsStartAtEvenElements) {
  Problem p = problem(8, 1, 1, 8, 3, 2);  // 15 outputs in a row
  EXPECT_FALSE(pairs_are_aligned(y_shape(p), p.y_stride, 16, 4));
  p.output_padding[0] = p.output_padding[1] = p.output_padding[2] = 1;
  test::pack(p, Layout::kNcdhw);
  EXPECT_TRUE(pairs_are_aligned(y_shape(p), p.y_stride, 16, 4));
  EXPECT_TRUE(pairs_are_aligned(y_shape(p), p.y_stride, 8, 4));
  EXPECT_FALSE(pairs_are_aligned(y_shape(p), p.y_stride, 4, 4));
  test::pack(p, Layout::kNdhwc);
  EXPECT_FALSE(pairs_are_aligned(y_shape(p), p.y_stride, 16, 4));
}

// ---- one group as a problem -----------------------------------------------------------------------------------------

TEST(OneGroup, IsAViewOfEveryTensor) {
  Problem p = problem(3, 6, 5, 4, 3, 2);
  p.has_bias = p.has_add = 1;
  Problem const part = one_group(p);
  EXPECT_EQ(part.groups, 1);
  EXPECT_EQ(part.in_channels, 6);
  EXPECT_EQ(part.out_channels, 5);
  EXPECT_EQ(part.x_stride[0], p.x_stride[0]) << "of the whole tensor";
  char memory[8];
  convt3d_tensors const all{memory, memory, memory, nullptr, memory, memory, 8};
  convt3d_tensors const third = group_tensors(p, all, 2);
  auto const distance = [&](void const* pointer) { return static_cast<char const*>(pointer) - memory; };
  EXPECT_EQ(distance(third.x), 2 * 6 * 4 * 4 * 4 * 4);
  EXPECT_EQ(distance(third.weight), 2 * 6 * 5 * 27 * 4);
  EXPECT_EQ(distance(third.bias), 2 * 5 * 4);
  EXPECT_EQ(third.add, nullptr);
  EXPECT_EQ(distance(third.y), 2 * 5 * 7 * 7 * 7 * 4);
  EXPECT_EQ(third.workspace, memory);
}

TEST(OneGroup, PromisesWhatTheOffsetsLeaveOfAnAlignment) {
  EXPECT_EQ(offset_alignment(16, 4, 4), 16);
  EXPECT_EQ(offset_alignment(16, 6, 4), 8);
  EXPECT_EQ(offset_alignment(16, 343, 4), 4);
  EXPECT_EQ(offset_alignment(16, 343, 2), 2);
  EXPECT_EQ(offset_alignment(16, 0, 2), 16);
  EXPECT_EQ(offset_alignment(4, 8, 4), 4);
  EXPECT_EQ(offset_alignment(16, int64_t{1} << 61, 4), 16);
}

}  // namespace
}  // namespace convt3d::sm80::grouped
