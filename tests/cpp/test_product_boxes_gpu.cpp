// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family's product kernel on the GPU, where the kernel is larger than the stride: boxes of positions, residue
// classes, zeros outside x. Skipped where there is no Hopper GPU.
#include "product_cases.hpp"

namespace convt3d {
namespace {

using test::Three;

struct Geometry {
  int64_t batch, in, out;
  Three size, kernel{3, 3, 3}, stride{2, 2, 2}, padding{1, 1, 1}, output_padding{1, 1, 1};
};

Problem problem(Geometry const& g) {
  return test::product_problem(g.batch, g.in, g.out, g.size, g.kernel, g.stride, g.padding, g.output_padding);
}

class ProductBoxes : public test::ProductCases {
 protected:
  bool takes(Problem const& p) const override {
    sm90::product::Operands const of = sm90::product::operands(p);
    return !of.in_rows() && of.in_boxes();
  }
};

// Boxes that are whole, that end outside the outputs along each axis, that have fewer rows than a tile, and that hold
// several samples; classes of unequal size and of none; taps that lie outside x.
TEST_P(ProductBoxes, Geometries) {
  for (Geometry const& g : {Geometry{4, 16, 64, {4, 4, 4}},
                            {3, 24, 64, {4, 4, 4}},
                            {2, 40, 64, {3, 5, 7}},
                            {2, 16, 64, {3, 5, 7}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}},
                            {1, 8, 64, {2, 3, 40}},
                            {1, 16, 64, {1, 1, 1}},
                            {1, 16, 64, {1, 1, 1}, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}},  // classes of none
                            {2, 16, 64, {4, 5, 6}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}},
                            {2, 16, 64, {5, 4, 3}, {5, 5, 5}, {2, 2, 2}, {2, 2, 2}},
                            {2, 16, 64, {5, 4, 3}, {5, 5, 5}, {2, 2, 2}, {0, 0, 0}, {0, 0, 0}},
                            {2, 16, 64, {4, 4, 4}, {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}},
                            {2, 16, 64, {4, 4, 4}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0}, {1, 1, 1}},  // planes without a tap
                            {1, 16, 64, {6, 6, 4}, {3, 3, 1}, {2, 2, 1}, {1, 1, 0}, {1, 1, 0}},
                            {1, 16, 64, {4, 6, 5}, {1, 3, 3}, {1, 2, 2}, {0, 1, 1}, {0, 1, 1}},
                            {2, 16, 64, {5, 6, 4}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}},
                            {2, 16, 64, {5, 6, 4}, {3, 2, 5}, {1, 1, 1}, {2, 0, 0}, {0, 0, 0}},
                            {2, 16, 64, {3, 4, 5}, {3, 4, 5}, {1, 2, 4}, {0, 3, 2}, {0, 1, 2}}}) {
    run(problem(g), static_cast<uint64_t>(g.in));
  }
}

// Channels off the steps of products, off the sums of these and off the columns of a warpgroup.
TEST_P(ProductBoxes, Channels) {
  for (int64_t in : {8, 64, 72, 136, 264}) run(problem({1, in, 64, {3, 4, 4}}), 3);
  for (int64_t out : {128, 192, 256, 320, 448}) run(problem({1, 40, out, {2, 4, 3}}), 4);
  if (GetParam().dtype == CONVT3D_F32) run(problem({1, 40, 32, {3, 4, 4}}), 5);
}

// More tiles than thread blocks, which get them forwards and backwards in turn: with fewer steps than stages, as many,
// and more; of one to three warpgroups.
TEST_P(ProductBoxes, TilesOneAfterTheOther) {
  struct Limit {
    ~Limit() { sm90::most_ctas = INT_MAX; }
  } const limit;
  for (int ctas : {1, 2, 7}) {
    sm90::most_ctas = ctas;
    for (int64_t in : {16, 136}) run(problem({3, in, 64, {4, 6, 8}}), 4);
  }
  sm90::most_ctas = INT_MAX;
  // Of the last ones some warpgroups have no columns, and the weight's boxes reach into those of the next tap, which
  // may be anything.
  for (int64_t out : {64, 128, 192, 256, 320}) {
    Problem const p = typed(problem({2, 16, out, {16, 16, 12}}));
    EXPECT_EQ(sm90::product::warpgroups(sm90::product::tiling(p), 132), out < 192 ? out / 64 : 3);
    run(p, 5);
  }
  run(problem({2, 16, 256, {16, 16, 12}}), 6, test::uniform_draw, test::nonfinite_draw);
}

// A tile by a cluster of two or four blocks: steps that they share evenly and not, blocks without any, positions that
// end within a block's, and infinities there.
TEST_P(ProductBoxes, Clusters) {
  for (int64_t in : {72, 136, 200, 328}) {
    for (Three const& size : {Three{4, 4, 4}, Three{3, 4, 5}, Three{2, 3, 3}}) {
      Problem const p = problem({2, in, 64, size});
      run(p, static_cast<uint64_t>(in));
      run(p, static_cast<uint64_t>(in), test::nonfinite_draw);
    }
    run(problem({1, in, 192, {4, 4, 4}}), 1);  // 24 tiles
    run(problem({1, in, 384, {4, 4, 4}}), 2);  // 48 tiles, by two
  }
  for (int32_t activation = 0; activation < CONVT3D_ACT_COUNT; ++activation) {
    for (int64_t size : {3, 4}) {
      Problem p = problem({2, 136, 64, {4, 4, size}});
      p.activation = activation;
      run(p, static_cast<uint64_t>(activation));
    }
  }
}

// Input channels off the copy engine's steps, too.
TEST_P(ProductBoxes, OtherLayouts) {
  for (Geometry const& g : {Geometry{4, 16, 64, {4, 4, 4}},
                            {2, 37, 128, {3, 5, 7}},
                            {1, 24, 320, {5, 4, 3}, {4, 4, 4}, {2, 2, 2}, {1, 1, 1}, {0, 0, 0}},
                            {2, 5, 64, {5, 6, 4}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}},
                            {1, 200, 64, {3, 4, 5}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}},  // by clusters
                            {2, 136, 192, {4, 4, 4}}}) {
    Problem const last = problem(g);
    run_copied_operands(last, static_cast<uint64_t>(g.in));
    run_copied_operands(last, static_cast<uint64_t>(g.in), test::nonfinite_draw);
    Problem first = last;
    test::pack(first, test::Layout::kNcdhw);
    test::pack(weight_shape(first), test::Layout::kNcdhw, first.weight_stride);
    run(first, static_cast<uint64_t>(g.in));
    if (g.in % 8 == 0) {
      run_channels_apart(last, static_cast<uint64_t>(g.in));
      run_channels_apart(last, static_cast<uint64_t>(g.in), test::nonfinite_draw);
    }
  }
  // Output channels that do not fill a tap's columns, and a warp's.
  for (int64_t out : {1, 2, 5, 24, 31, 48, 96, 130}) {
    Problem const last = problem({2, 40, out, {3, 4, 5}});
    run(last, static_cast<uint64_t>(out));
    run(last, static_cast<uint64_t>(out), test::nonfinite_draw);
    Problem first = last;
    test::pack(first, test::Layout::kNcdhw);
    run(first, static_cast<uint64_t>(out));
    run(problem({1, 264, out, {3, 3, 3}}), static_cast<uint64_t>(out));  // by clusters
  }
  for (int64_t of_sample : {0, 64}) {
    Problem p = problem({3, 40, 64, {2, 4, 3}});
    test::pack(p, test::Layout::kNcdhw);
    for (int64_t& stride : p.add_stride) stride = 0;
    p.add_stride[0] = of_sample;
    p.add_stride[1] = 1;
    run(p, 11);
    p.add_stride[1] = 0;
    run(p, 12);
  }
}

TEST_P(ProductBoxes, TailsInOtherLayouts) {
  Problem whole = problem({2, 16, 64, {4, 4, 4}}), odd = problem({2, 136, 64, {4, 4, 3}});
  test::pack(whole, test::Layout::kNcdhw);
  test::pack(odd, test::Layout::kNcdhw);
  run_tails(whole, odd);
}

// Of whole tiles, and of none.
TEST_P(ProductBoxes, Tails) { run_tails(problem({2, 16, 64, {4, 4, 4}}), problem({2, 16, 64, {4, 4, 3}})); }

TEST_P(ProductBoxes, OperandsOfOneSign) {
  for (int64_t in : {72, 520}) run(problem({1, in, 64, {2, 3, 4}}), 1, test::one_sign_draw);
}

// Only products that belong to an output may touch it, not those of what lies outside x.
TEST_P(ProductBoxes, NonFiniteValues) {
  for (Three const& size : {Three{3, 4, 7}, Three{4, 4, 4}}) run_nonfinite_values(problem({2, 72, 64, size}));
}

TEST_P(ProductBoxes, SlicesAndAccessesOfTwoChannels) {
  run_slices(problem({2, 16, 64, {4, 2, 4}}), 80, 72);
  Problem p = problem({2, 16, 64, {4, 3, 5}});
  p.x_stride[0] += 400;  // voxels that are no rows of one matrix
  p.x_stride[3] += 16;
  p.x_stride[2] += 80;
  run(p, 11);
}

TEST_P(ProductBoxes, AddOfChannels) { run_add_of_channels(problem({3, 40, 64, {2, 4, 3}})); }

TEST_P(ProductBoxes, WeightThatStartsAnywhere) {
  for (int64_t stride : {1, 2}) {
    run_weight_that_starts_anywhere(
        problem({2, 40, 64, {4, 4, 4}, {3, 3, 3}, {stride, stride, stride}, {1, 1, 1}, {0, 0, 0}}));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ProductBoxes, testing::ValuesIn(test::kModes + 1, test::kModes + 4),
                         [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
