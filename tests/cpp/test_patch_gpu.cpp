// SPDX-License-Identifier: Apache-2.0
//
// The sm80 family's patch-expansion kernel on the GPU: every arithmetic, unit and access, edges of positions, channels
// and steps, and values of every kind. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <array>

#include "gpu_harness.hpp"
#include "sm80/patch/choice.hpp"

namespace convt3d {
namespace {

using test::kModes;
using test::Layout;

constexpr Layout kLayouts[] = {Layout::kNcdhw, Layout::kNdhwc};

struct Geometry {
  int64_t batch, in, out;
  std::array<int64_t, 3> step, size;
};

Problem problem(Geometry const& g, Layout layout) {
  Problem p = test::cubic_problem(g.batch, g.in, g.out, 1, 1, 1, 0, 0, layout);
  for (size_t axis = 0; axis < 3; ++axis) {
    p.kernel[axis] = p.stride[axis] = g.step[axis];
    p.in_size[axis] = g.size[axis];
  }
  test::pack(p, layout);
  return p;
}

class Patch : public test::KernelCases<sm80::patch::wherever_possible> {
 protected:
  bool takes(Problem const& p) const override { return sm80::patch::takes(p, device.compute_capability); }

  int64_t most_channels() const { return sm80::patch::most_channels(typed(Problem{})); }
};

// Steps along W of one to four outputs; rows of all lengths, so that vectors end where rows do, or do not; more
// positions than a tile, and a few.
TEST_P(Patch, StepsAndRows) {
  for (Layout layout : kLayouts) {
    for (int64_t step = 1; step <= 4; ++step) {
      for (int64_t width : {1, 2, 3, 4, 6, 8, 13}) {
        Problem p = problem({2, 20, 11, {1 + step % 2, 2, step}, {3, 5, width}}, layout);
        p.has_bias = p.has_add = 1;
        p.activation = CONVT3D_ACT_LEAKY_RELU;
        p.negative_slope = 0.1f;
        run(p, static_cast<uint64_t>(8 * step + width));
      }
    }
  }
}

// Channels off the steps of products, of units and of accesses.
TEST_P(Patch, Channels) {
  for (Layout layout : kLayouts) {
    for (auto const& [in, out] : {std::pair<int64_t, int64_t>{1, 1},
                                  {3, 5},
                                  {12, 40},
                                  {17, 14},
                                  {33, 8},
                                  {64, 17},
                                  {most_channels(), 24},
                                  {most_channels() - 7, 4}}) {
      for (Layout weights : kLayouts) {
        Problem p = problem({2, in, out, {2, 2, 4}, {3, 2, 6}}, layout);
        test::pack(weight_shape(p), weights, p.weight_stride);
        p.has_bias = 1;
        p.has_add = in % 2;
        run(p, static_cast<uint64_t>(in));
      }
    }
  }
}

// Weights of several blocks, and so many positions that a warp has several tiles.
TEST_P(Patch, SplitsAndTiles) {
  for (Layout layout : kLayouts) {
    Problem p = problem({1, most_channels(), 160, {2, 2, 2}, {3, 3, 6}}, layout);
    p.dtype = GetParam().dtype;
    p.precision = GetParam().precision;
    p.has_bias = p.has_add = 1;
    EXPECT_GE(sm80::patch::splits(p, device.compute_capability), 2);
    run(p, 1);
    run(problem({2, 8, 3, {1, 1, 2}, {40, 52, 50}}, layout), 2);
    run(problem({1, 16, 4, {1, 2, 4}, {30, 41, 42}}, layout), 3);
  }
}

TEST_P(Patch, RandomCases) {
  test::Random random(47);
  for (uint64_t seed = 0; seed < 60 && !HasFailure(); ++seed) {
    Problem p = test::random_problem(random, {});
    for (int axis = 0; axis < 3; ++axis) {
      p.kernel[axis] = p.stride[axis];
      p.padding[axis] = p.output_padding[axis] = 0;
      p.dilation[axis] = 1;
    }
    bool const broadcast = p.has_add && random.chance(25);
    test::pack(p, random.chance(50) ? Layout::kNcdhw : Layout::kNdhwc);
    for (int axis = 0; axis < 5 && broadcast; ++axis) {
      if (random.chance(50)) p.add_stride[axis] = 0;
    }
    run(p, seed);
  }
}

TEST_P(Patch, EveryActivationBeforeAndAfterAdd) {
  test::for_each_activation([](Layout layout) { return problem({1, 9, 8, {2, 2, 2}, {3, 4, 4}}, layout); },
                            [this](Problem const& p, uint64_t seed) { run(p, seed); });
}

TEST_P(Patch, OperandsOfOneSign) {
  for (Layout layout : kLayouts) {
    run(problem({2, GetParam().dtype == CONVT3D_F32 ? most_channels() : 16, 24, {2, 2, 2}, {6, 8, 8}}, layout), 1,
        test::one_sign_draw);
  }
}

TEST_P(Patch, Values) {
  for (Layout layout : kLayouts) {
    for (int64_t step : {2, 4}) {
      Problem p = problem({2, 40, 12, {2, 1, step}, {3, 4, 6}}, layout);
      p.has_bias = 1;
      for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, test::nonfinite_draw);
      run(p, 3, test::uniform_draw, test::nonfinite_draw);
      if (GetParam().dtype == CONVT3D_F16) continue;
      run(p, 4, test::decades_draw);
      run(p, 5, test::near_infinity_draw, test::small_draw);
    }
  }
}

// Bases at any element, slices of wider buffers, broadcasts, and x in the other layout.
TEST_P(Patch, ViewsSlicesAndBroadcasts) {
  int const element = GetParam().dtype == CONVT3D_F32 ? 4 : 2;
  for (Layout layout : kLayouts) {
    for (int64_t step : {2, 4}) {
      Problem p = problem({2, 16, 16, {2, 2, step}, {3, 4, 4}}, layout);
      p.has_add = 1;
      for (int alignment = element; alignment < 16; alignment *= 2) {
        p.x_alignment = p.add_alignment = p.y_alignment = alignment;
        run(p, 9);
      }
      p.x_alignment = p.add_alignment = p.y_alignment = 16;
      test::slice(p, 48, 40, layout);
      run(p, 10);
      test::pack(x_shape(p), layout == Layout::kNcdhw ? Layout::kNdhwc : Layout::kNcdhw, p.x_stride);
      run(p, 11);
      for (int axis = 0; axis < 5; ++axis) p.add_stride[axis] = axis == 1;
      run(p, 12);
      p.add_stride[1] = 0;
      run(p, 13);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Patch, testing::ValuesIn(kModes), [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
