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

/// With all tensors channels last.
Problem channels_last(Problem p) {
  test::pack(p, Layout::kNdhwc);
  test::pack(weight_shape(p), Layout::kNdhwc, p.weight_stride);
  return p;
}

Problem halves(int batch, int in, int out, int size, convt3d_dtype dtype = CONVT3D_F32) {
  return channels_last(make(batch, in, out, {size, size, size}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}, dtype, true));
}

/// Kernel 3, stride 2, as large as x twice.
Problem k3(int batch, int in, int out, std::vector<int> size, convt3d_dtype dtype) {
  return channels_last(make(batch, in, out, size, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, true));
}

/// Whether x and the weight are read as they lie.
bool reads_in_place(Problem const& p) { return takes_rows(p) || takes_boxes(p, p.out_channels); }

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

TEST(Product, TakesPatches) {
  for (convt3d_dtype dtype : {CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16})
    EXPECT_TRUE(takes(halves(2, 320, 320, 8, dtype)));
  auto with = [](auto change) {
    Problem p = halves(2, 64, 32, 4);
    change(p);
    return takes(p);
  };
  auto in_place = [](auto change) {
    Problem p = halves(2, 64, 32, 4);
    change(p);
    EXPECT_TRUE(takes(p));
    return reads_in_place(p);
  };
  auto in_pairs = [](auto change) {
    Problem p = halves(2, 64, 32, 4);
    change(p);
    EXPECT_TRUE(takes(p) && reads_in_place(p));
    EXPECT_EQ(takes_rows(p), has_pairs(p));
    return has_pairs(p);
  };
  EXPECT_TRUE(with([](Problem&) {}));
  EXPECT_TRUE(with([](Problem& p) { p.has_add = 0; }));
  EXPECT_TRUE(with([](Problem& p) { p.activation = CONVT3D_ACT_RELU; }));
  EXPECT_TRUE(with([](Problem& p) { p.activation = CONVT3D_ACT_GELU; }));
  EXPECT_FALSE(with([](Problem& p) { p.precision = CONVT3D_IEEE; }));
  EXPECT_FALSE(with([](Problem& p) { p.batch = 0; }));
  EXPECT_TRUE(in_place([](Problem&) {}));
  EXPECT_FALSE(in_place([](Problem& p) { test::pack(weight_shape(p), Layout::kNcdhw, p.weight_stride); }));
  EXPECT_FALSE(in_place([](Problem& p) { test::pack(x_shape(p), Layout::kNcdhw, p.x_stride); }));
  EXPECT_FALSE(in_place([](Problem& p) { p.x_alignment = 8; }));
  EXPECT_FALSE(in_place([](Problem& p) { p.x_stride[4] = 0; }));  // one voxel for all
  EXPECT_TRUE(in_pairs([](Problem&) {}));
  EXPECT_FALSE(in_pairs([](Problem& p) { test::pack(y_shape(p), Layout::kNcdhw, p.y_stride); }));
  EXPECT_TRUE(in_pairs([](Problem& p) { p.y_alignment = 8; }));
  EXPECT_FALSE(in_pairs([](Problem& p) { p.y_alignment = 4; }));
  EXPECT_FALSE(in_pairs([](Problem& p) { p.add_alignment = 4; }));
  EXPECT_FALSE(in_pairs([](Problem& p) { p.add_stride[1] = 0; }));
  EXPECT_FALSE(with([](Problem& p) { p.y_stride[0] = kMostReach; }));  // offsets are of 32 bits
  EXPECT_TRUE(takes(halves(1, 64, 4, 4)));
}

// Padding, planes without a tap and a kernel larger than the stride are for boxes, whose columns are output channels.
TEST(Product, RowsOrBoxes) {
  Problem const patch = halves(2, 64, 32, 4);
  EXPECT_TRUE(takes_rows(patch));
  auto in_boxes = [&](auto change) {
    Problem p = patch;
    change(p);
    p = channels_last(p);
    EXPECT_FALSE(takes_rows(p));
    return takes_boxes(p, p.out_channels);
  };
  EXPECT_TRUE(in_boxes([](Problem& p) { p.output_padding[1] = 1; }));
  EXPECT_TRUE(in_boxes([](Problem& p) { p.padding[0] = 1; }));
  EXPECT_TRUE(in_boxes([](Problem& p) { p.stride[2] = 1; }));
  EXPECT_TRUE(in_boxes([](Problem& p) { p.kernel[0] = 4; }));
  Problem other_rows = patch;
  other_rows.x_stride[3] += 64;
  EXPECT_FALSE(takes_rows(other_rows));
  EXPECT_TRUE(takes_boxes(other_rows, 32));
  auto cubic = [](Problem& p, int kernel, int stride) {
    for (int axis = 0; axis < 3; ++axis) p.kernel[axis] = kernel, p.stride[axis] = stride;
  };
  EXPECT_TRUE(in_boxes([&](Problem& p) { cubic(p, 3, 1); }));
  EXPECT_TRUE(in_boxes([&](Problem& p) { cubic(p, 5, 2); }));
  EXPECT_FALSE(in_boxes([&](Problem& p) { cubic(p, 5, 3); }));  // 27 classes
  EXPECT_FALSE(in_boxes([&](Problem& p) {
    cubic(p, 3, 2);
    p.out_channels = 16;  // 64 bytes of columns
  }));
  Problem p = make(2, 64, 32, {4, 5, 6}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, CONVT3D_F32, true);
  EXPECT_FALSE(reads_in_place(p));
  p = channels_last(p);
  EXPECT_TRUE(reads_in_place(p));
  for (int axis : {0, 2, 3, 4}) {
    Problem other = p;
    other.x_stride[axis] += 2;  // 8 bytes
    EXPECT_FALSE(reads_in_place(other));
    other.x_stride[axis] = 0;
    EXPECT_FALSE(reads_in_place(other));
    other.x_stride[axis] = p.in_channels - 4;  // voxels that overlap
    EXPECT_FALSE(reads_in_place(other));
  }
  for (int axis : {0, 2, 3, 4}) p.x_stride[axis] *= 2;  // a slice of x
  EXPECT_TRUE(reads_in_place(p));
}

// What cannot be read as it lies is copied, channels last, and nothing else is; y and add stay where they are.
TEST(Product, OperandsThatAreCopied) {
  auto expect = [](Problem const& p, bool x, bool weight) {
    Operands const of = operands(p);
    EXPECT_TRUE(takes(p));
    EXPECT_EQ(reads_in_place(of.p), !of.is_padded());
    EXPECT_EQ(of.copies_x, x);
    EXPECT_EQ(of.copies_weight, weight);
    for (int axis = 0; axis < 5; ++axis) {
      EXPECT_EQ(of.p.y_stride[axis], p.y_stride[axis]);
      EXPECT_EQ(of.p.add_stride[axis], p.add_stride[axis]);
      if (!x) {
        EXPECT_EQ(of.p.x_stride[axis], p.x_stride[axis]);
      }
    }
    return of;
  };
  for (bool rows : {true, false}) {
    Problem const p = rows ? halves(2, 64, 32, 4) : k3(2, 64, 32, {4, 5, 6}, CONVT3D_F32);
    Problem other = p;
    expect(p, false, false);
    test::pack(weight_shape(p), Layout::kNcdhw, other.weight_stride);
    expect(other, false, true);
    test::pack(other, Layout::kNcdhw);
    expect(other, true, true);
    test::pack(y_shape(p), Layout::kNdhwc, other.y_stride);
    test::pack(y_shape(p), Layout::kNdhwc, other.add_stride);
    EXPECT_EQ(takes_rows(expect(other, true, true).p), rows);
    test::pack(weight_shape(p), Layout::kNdhwc, other.weight_stride);
    expect(other, true, false);
    EXPECT_EQ(workspace_bytes(p), size_t{64 * 32 * 4} * static_cast<size_t>(tap_count(p)));
    EXPECT_EQ(workspace_bytes(other), workspace_bytes(p) + 4 * static_cast<size_t>(element_count(x_shape(p))));
  }
  // Channels that do not fill the copy engine's 16 bytes.
  Problem p = k3(2, 6, 32, {4, 5, 6}, CONVT3D_F32);
  Operands const of = expect(p, true, false);
  EXPECT_EQ(of.p.x_stride[4], 8);
  EXPECT_EQ(of.p.x_stride[0], 4 * 5 * 6 * 8);
  EXPECT_EQ(workspace_bytes(p), size_t{8 * 27 * 32 * 4 + 2 * 4 * 5 * 6 * 8 * 4});
  p.x_stride[0] = p.y_stride[0] = kMostReach;  // y's offsets are of 32 bits, x's are not
  EXPECT_FALSE(takes(p));
  // Columns for channels that there are not: the copy engine's accesses have 128 bytes.
  for (int channels : {1, 2, 30, 33}) {
    p = k3(2, 64, channels, {4, 5, 6}, CONVT3D_F32);
    Operands const padded = expect(p, false, true);
    EXPECT_EQ(padded.tap_columns, channels > 32 ? 64 : 32);
    EXPECT_FALSE(padded.moves_pairs());
    EXPECT_EQ(workspace_bytes(p), static_cast<size_t>(64 * 27 * padded.tap_columns * 4));
  }
  EXPECT_FALSE(expect(halves(1, 64, 2, 4), false, true).in_rows());
  EXPECT_TRUE(expect(halves(1, 64, 4, 4), false, false).in_rows());
}

/// By looking at every box.
int64_t fewest_boxes(Box const& grid) {
  auto const& g = grid.size;
  int64_t fewest = INT64_MAX;
  for (int w = 1; w <= kPositions; ++w) {
    for (int h = 1; h * w <= kPositions; ++h) {
      for (int d = 1; d * h * w <= kPositions; ++d) {
        int const n = kPositions / (d * h * w);
        int64_t const count = int64_t{ceil_div(g[0], n)} * ceil_div(g[1], d) * ceil_div(g[2], h) * ceil_div(g[3], w);
        fewest = count < fewest ? count : fewest;
      }
    }
  }
  return fewest;
}

// Boxes of at most 128 positions that cover a class's outputs with as few tiles as any shape does; of several the
// longest rows.
TEST(Product, BoxesOfPositions) {
  auto boxes = [](int batch, std::vector<int> size, std::vector<int> kernel) {
    return choose_boxes(
        make(batch, 64, 64, size, kernel, {1, 1, 1}, {kernel[0] % 2, kernel[1] % 2, kernel[2] % 2}, CONVT3D_F32, true));
  };
  auto expect = [](Boxes const& b, std::vector<int> size, int64_t count) {
    for (int axis = 0; axis < 4; ++axis) EXPECT_EQ(b.size.size[axis], size[static_cast<size_t>(axis)]);
    EXPECT_EQ(b.count, count);
  };
  expect(boxes(64, {4, 4, 4}, {3, 3, 3}), {2, 4, 4, 4}, 32);
  expect(boxes(2, {8, 8, 8}, {4, 4, 4}), {1, 2, 8, 8}, 8);
  expect(boxes(1, {1, 1, 300}, {3, 3, 3}), {1, 1, 1, 100}, 3);
  expect(boxes(3, {1, 1, 1}, {3, 3, 3}), {3, 1, 1, 1}, 1);
  expect(boxes(1, {1, 16, 16}, {3, 3, 3}), {1, 1, 8, 16}, 2);  // not 16 x 8
  for (int batch : {1, 2, 5}) {
    for (int d : {1, 3, 7}) {
      for (int h : {2, 5, 13}) {
        for (int w : {1, 6, 40}) {
          Problem const p = make(batch, 64, 64, {d, h, w}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, CONVT3D_F32, true);
          Box const grid = position_grid(p);
          for (int axis = 0; axis < 3; ++axis) EXPECT_EQ(grid.size[1 + axis], p.in_size[axis]);
          Boxes const b = choose_boxes(p);
          EXPECT_LE(b.size.rows(), kPositions);
          int64_t count = 1;
          for (int axis = 0; axis < 4; ++axis) {
            int const size = b.size.size[axis], tiles = b.tiles.size[axis];
            EXPECT_GE(size * tiles, grid.size[axis]);
            EXPECT_LT(size * (tiles - 1), grid.size[axis]);
            count *= tiles;
          }
          EXPECT_EQ(count, b.count);
          EXPECT_EQ(count, fewest_boxes(grid));
        }
      }
    }
  }
}

TEST(Product, ClassesWithTheMostTapsFirst) {
  for (int kernel : {2, 3, 4, 5}) {
    Problem const p = make(1, 64, 64, {4, 4, 4}, {kernel, kernel, 3}, {0, 1, 0}, {0, 0, 0}, CONVT3D_F32, true);
    Classes const classes = classes_by_taps(p);
    int64_t taps = 0;
    std::set<int64_t> first_outputs;
    for (int i = 0; i < class_total(p); ++i) {
      ResidueClass const& c = classes.v[i];
      if (i > 0) {
        EXPECT_LE(c.taps(), classes.v[i - 1].taps());
      }
      EXPECT_GE(c.taps(), 1);  // a tile has steps
      taps += c.taps();
      first_outputs.insert((c.dim[0].origin * 2 + c.dim[1].origin) * 2 + c.dim[2].origin);
    }
    EXPECT_EQ(taps, tap_count(p));
    EXPECT_EQ(first_outputs.size(), 8u);
  }
}

TEST(Product, TilesOfBoxes) {
  Problem const p = k3(64, 256, 128, {4, 4, 4}, CONVT3D_F16);
  Tiling const t = tiling(p);
  EXPECT_EQ(t.most_warpgroups, 2);  // no third 64 of 128 channels
  EXPECT_EQ(warpgroups(t, 132), 2);
  EXPECT_EQ(t.tiles(2), 32 * 8);
  EXPECT_EQ(t.tiles(1), 32 * 8 * 2);
  EXPECT_EQ(warpgroups(t, 1000), 1);
  // Of 27 taps of 4 steps, for each of 32 boxes; one tile of eight taps has 32.
  EXPECT_DOUBLE_EQ(longest_steps(p, t.tiles(2), 12), 27 * 4 * 32 / 12.);
  EXPECT_DOUBLE_EQ(longest_steps(p, t.tiles(2), 132), 8 * 4);
}

// Few tiles of many steps are shared by clusters, whose blocks make all steps together.
TEST(Product, ClustersWhereTilesAreFew) {
  auto cube = [](int in, int size) { return k3(1, in, 64, {size, size, size}, CONVT3D_F16); };
  auto blocks = [](Problem const& p, int multiprocessors) {
    Tiling const t = tiling(p);
    int const groups = warpgroups(t, multiprocessors);
    return cluster_blocks(p, t.tiles(groups), groups, multiprocessors);
  };
  EXPECT_EQ(blocks(cube(256, 4), 132), 4);  // 8 tiles
  EXPECT_EQ(blocks(cube(256, 4), 40), 4);
  EXPECT_EQ(blocks(cube(256, 4), 39), 2);
  EXPECT_EQ(blocks(cube(256, 4), 15), 1);
  EXPECT_EQ(blocks(cube(64, 4), 132), 1);  // 8 steps
  EXPECT_EQ(blocks(cube(65, 4), 132), 4);
  EXPECT_EQ(blocks(cube(256, 16), 132), 1);
  EXPECT_EQ(blocks(halves(1, 512, 64, 4, CONVT3D_F16), 132), 1);  // in rows
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
  EXPECT_EQ(warpgroups(tiling(halves(1, 64, 32, 4)), 132), 1);
  Problem const p = halves(2, 320, 320, 8);
  Tiling const t = tiling(p);
  EXPECT_EQ(warpgroups(t, 132), 3);
  EXPECT_EQ(t.position_tiles, 8);
  EXPECT_EQ(t.columns(3), 14);
  EXPECT_EQ(t.tiles(3), 8 * 14);
  EXPECT_EQ(steps(p), 10);
  for (int count = 1; count <= kMostWarpgroups; ++count) {
    EXPECT_GE(stages(count), 4);
    EXPECT_LE(stages(count), kMostStages);
    EXPECT_LE(stages(count) * stage_bytes(count), kSharedBytes);
  }
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
    Problem const tiny = k3(64, 256, 128, {4, 4, 4}, dtype), wide = k3(2, 256, 128, {24, 24, 24}, dtype);
    EXPECT_TRUE(takes(tiny));
    EXPECT_TRUE(chooses_product(tiny, 132));
    EXPECT_TRUE(worthwhile(tiny, kH200));
    EXPECT_TRUE(takes(wide));
    EXPECT_FALSE(chooses_product(wide, 132));
  }
}

// At stride 1 the streaming kernel's share of shared memory may be too small: the product kernel is the family's only
// one, with room in the workspace for a weight that starts anywhere.
TEST(Product, WhereNoOtherKernelIs) {
  Problem p = make(2, 256, 256, {8, 8, 8}, {3, 3, 3}, {1, 1, 1}, {0, 0, 0}, CONVT3D_F16, true);
  for (int axis = 0; axis < 3; ++axis) p.stride[axis] = 1;
  test::pack(p, Layout::kNdhwc);
  EXPECT_FALSE(has_usual_kernel(p, 132));
  Problem other = p;
  other.in_channels = 1;
  test::pack(other, Layout::kNdhwc);
  EXPECT_EQ(refusal(other), "sm90: shared memory left beside x and weights, in 8 KB is 3, the kernel takes at least 5");
  EXPECT_TRUE(chooses_product(p, 132));  // the weight is copied
  EXPECT_EQ(refusal(p), "");
  p = channels_last(p);
  EXPECT_EQ(refusal(p), "");
  EXPECT_TRUE(chooses_product(p, 132));
  EXPECT_TRUE(worthwhile(p, kH200));
  EXPECT_EQ(workspace_bytes(p), 2u * 256 * 256 * 27);
}

// Nor is there one for more than 16 classes: this one computes patches there, too, but against the sm80 family's it has
// not been measured.
TEST(Product, WideStepsAreNotChosen) {
  for (int step : {3, 4}) {
    Problem p = make(1, 256, 64, {8, 8, 8}, {step, step, step}, {0, 0, 0}, {0, 0, 0}, CONVT3D_F16, true);
    for (int axis = 0; axis < 3; ++axis) p.stride[axis] = step;
    p = channels_last(p);
    EXPECT_EQ(refusal(p), "");
    EXPECT_FALSE(worthwhile(p, kH200));
  }
}

}  // namespace
}  // namespace convt3d::sm90::product
