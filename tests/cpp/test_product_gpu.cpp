// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family's product kernel on the GPU: tiles, thread blocks of one to three warpgroups, several tiles of a
// block, and operands that are not finite. Skipped where there is no Hopper GPU.
#include <gtest/gtest.h>

#include <array>
#include <climits>

#include "gpu_harness.hpp"
#include "sm90/most_ctas.hpp"
#include "sm90/product/choice.hpp"

namespace convt3d {
namespace {

using test::Layout;

struct Geometry {
  int64_t batch, in, out;
  std::array<int64_t, 3> size, kernel;
};
constexpr std::array<int64_t, 3> kHalves{2, 2, 2};

Problem problem(Geometry const& g) {
  Problem p = test::cubic_problem(g.batch, g.in, g.out, 1, 2, 2, 0, 0, Layout::kNdhwc);
  for (size_t axis = 0; axis < 3; ++axis) {
    p.in_size[axis] = g.size[axis];
    p.kernel[axis] = p.stride[axis] = g.kernel[axis];
  }
  test::pack(p, Layout::kNdhwc);
  test::pack(weight_shape(p), Layout::kNdhwc, p.weight_stride);
  p.has_bias = p.has_add = 1;
  p.activation = CONVT3D_ACT_LEAKY_RELU;
  p.negative_slope = 0.1f;
  return p;
}

class Product : public test::KernelCases<sm90::product::wherever_possible, CONVT3D_KERNEL_SM90> {
 protected:
  void SetUp() override {
    KernelCases::SetUp();
    if (!IsSkipped() && device.compute_capability != 90) GTEST_SKIP() << "the GPU is not of SM90";
  }

  bool takes(Problem const& p) const override { return sm90::product::takes(p); }
};

// Positions that fill tiles, end within one, and lie in several; samples that end within a tile; kernels that differ
// by axis; a half of a warpgroup's columns.
TEST_P(Product, Tiles) {
  for (Geometry const& g : {Geometry{1, 32, 16, {4, 4, 4}, kHalves},
                            {3, 40, 24, {2, 4, 3}, kHalves},
                            {2, 8, 8, {1, 1, 8}, kHalves},
                            {1, 16, 40, {1, 1, 1}, kHalves},
                            {2, 72, 48, {8, 8, 8}, kHalves},
                            {5, 16, 32, {4, 6, 2}, {1, 2, 2}},
                            {2, 48, 16, {3, 5, 2}, {2, 4, 4}},
                            {1, 24, 64, {5, 3, 7}, {2, 1, 2}}}) {
    run(problem(g), static_cast<uint64_t>(g.in));
  }
}

// Input channels off the steps of products and off the sums of these.
TEST_P(Product, Channels) {
  for (int64_t in : {8, 64, 72, 128, 136, 256, 264, 1000}) run(problem({1, in, 16, {3, 4, 4}, kHalves}), 3);
}

// More tiles than thread blocks, so that x and the weight of the next come in beside the outputs of one: with fewer
// steps than stages, as many, and more.
TEST_P(Product, TilesOneAfterTheOther) {
  {
    struct Limit {
      Limit() { sm90::most_ctas = 2; }
      ~Limit() { sm90::most_ctas = INT_MAX; }
    } const limit;
    for (int64_t in : {16, 256, 320}) run(problem({3, in, 24, {4, 6, 8}, kHalves}), 4);
  }
  run(problem({3, 16, 96, {10, 12, 12}, kHalves}), 4);
}

TEST_P(Product, Tails) {
  for (int32_t activation = 0; activation < CONVT3D_ACT_COUNT; ++activation) {
    for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
      for (int parts = 0; parts < 8; ++parts) {
        Problem p = problem({2, 40, 16, {3, 4, parts / 4 ? 32 : 5}, kHalves});  // of whole tiles, and of none
        p.activation = activation;
        p.add_order = order;
        p.has_bias = parts % 2;
        p.has_add = parts / 2 % 2;
        run(p, static_cast<uint64_t>(activation));
      }
    }
  }
}

TEST_P(Product, OperandsOfOneSign) {
  for (int64_t in : {320, 2048}) run(problem({1, in, 16, {4, 4, 4}, kHalves}), 1, test::one_sign_draw);
}

// Only products that belong to an output may touch it, and infinities stay what fp32 makes of them.
TEST_P(Product, NonFiniteValues) {
  Problem p = problem({2, 136, 24, {3, 4, 7}, kHalves});
  for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, test::nonfinite_draw);
  run(p, 3, test::uniform_draw, test::nonfinite_draw);
  Problem other = p;
  other.activation = CONVT3D_ACT_SIGMOID;
  for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
    other.add_order = order;
    run(other, 0, test::nonfinite_draw);
  }
  if (GetParam().dtype == CONVT3D_F16) return;
  p.has_add = 0;  // which would take sums next to infinity beyond it, before the activation makes them small again
  p.activation = CONVT3D_ACT_NONE;
  run(p, 4, test::decades_draw);
  run(p, 5, test::near_infinity_draw, test::small_draw);
}

TEST_P(Product, SlicesAndAccessesOfTwoChannels) {
  Problem p = problem({2, 16, 16, {4, 2, 4}, kHalves});
  p.add_alignment = p.y_alignment = GetParam().dtype == CONVT3D_F32 ? 8 : 4;
  run(p, 9);
  p.add_alignment = p.y_alignment = 16;
  test::slice(p, 48, 40, Layout::kNdhwc);
  run(p, 10);
}

// One value for each channel, or for each channel of a sample.
TEST_P(Product, AddOfChannels) {
  for (int64_t of_sample : {0, 24}) {
    for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
      Problem p = problem({3, 40, 24, {2, 4, 3}, kHalves});
      p.add_order = order;
      for (int64_t& stride : p.add_stride) stride = 0;
      p.add_stride[0] = of_sample;
      p.add_stride[1] = 1;
      run(p, 11);
    }
  }
}

// The copy engine does not take such a weight: the workspace has room for one that it takes.
TEST_P(Product, WeightThatStartsAnywhere) {
  Problem const p = typed(problem({2, 40, 24, {4, 4, 4}, kHalves}));
  ASSERT_TRUE(takes(p));
  for (int skew : {element_bytes(p), 8}) {
    EXPECT_EQ(test::run_case(p, CONVT3D_KERNEL_SM90, 12, &worst, test::uniform_draw, nullptr, skew),
              test::Outcome::kRan);
    ++ran;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Product, testing::ValuesIn(test::kModes + 1, test::kModes + 4),
                         [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
