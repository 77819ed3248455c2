// SPDX-License-Identifier: Apache-2.0
//
// The sm80 family's columns kernel on the GPU: tiles, parts, both layouts of every tensor, taps that overlap and taps
// that are not there. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "gpu_harness.hpp"
#include "sm80/columns/geometry.hpp"

namespace convt3d {
namespace {

using test::kModes;
using test::Layout;

constexpr Layout kLayouts[] = {Layout::kNcdhw, Layout::kNdhwc};

struct Geometry {
  int64_t batch, in, out;
  std::array<int64_t, 3> size;
};

/// Kernel size, stride, padding, output padding and dilation of all dimensions.
struct Window {
  int64_t kernel, stride, padding, output_padding, dilation;
};
constexpr Window kHalves{2, 2, 0, 0, 1}, kThirds{3, 2, 1, 1, 1};

Problem problem(Geometry const& g, Window const& w, Layout layout) {
  Problem p = test::cubic_problem(g.batch, g.in, g.out, 1, w.kernel, w.stride, w.padding, w.output_padding, layout);
  for (size_t axis = 0; axis < 3; ++axis) {
    p.in_size[axis] = g.size[axis];
    p.dilation[axis] = w.dilation;
  }
  test::pack(p, layout);
  return p;
}

void give_tail(Problem& p) {
  p.has_bias = p.has_add = 1;
  p.activation = CONVT3D_ACT_LEAKY_RELU;
  p.negative_slope = 0.1f;
}

class Columns : public test::KernelCases<sm80::columns::wherever_possible> {
 protected:
  bool takes(Problem const& p) const override { return sm80::columns::takes(p); }

  int64_t parts(Problem const& p) const { return sm80::columns::parts(typed(p)); }
};

// Positions and columns that fill tiles, end within one, and lie in several; samples that end within a tile.
TEST_P(Columns, Tiles) {
  for (Layout layout : kLayouts) {
    for (Geometry const& g :
         {Geometry{1, 16, 8, {4, 4, 4}}, Geometry{3, 24, 16, {2, 4, 2}}, Geometry{1, 8, 8, {1, 1, 8}},
          Geometry{2, 72, 40, {3, 4, 6}}, Geometry{5, 16, 24, {4, 6, 2}}}) {
      for (Window const& w : {kHalves, kThirds}) {
        Problem p = problem(g, w, layout);
        give_tail(p);
        run(p, static_cast<uint64_t>(g.in));
      }
    }
  }
}

// Classes without taps, taps that reach beyond x, steps of one, outputs that nothing reaches; one window for each axis.
TEST_P(Columns, Windows) {
  for (Layout layout : kLayouts) {
    for (Window const& w :
         {Window{4, 2, 1, 0, 1}, Window{3, 2, 0, 0, 1}, Window{3, 2, 1, 0, 1}, Window{2, 3, 0, 2, 1},
          Window{1, 2, 0, 1, 1}, Window{3, 4, 1, 3, 1}, Window{2, 1, 0, 0, 1}, Window{2, 1, 1, 0, 1},
          Window{2, 2, 1, 1, 2}, Window{1, 1, 0, 0, 1}, Window{3, 2, 2, 1, 3}, Window{4, 4, 0, 0, 1}}) {
      Problem p = problem({2, 16, 8, {3, 2, 4}}, w, layout);
      give_tail(p);
      run(p, static_cast<uint64_t>(w.kernel * 8 + w.stride));
    }
    Problem p = problem({2, 16, 8, {3, 2, 4}}, kHalves, layout);
    p.kernel[0] = 1, p.stride[0] = 1, p.kernel[1] = 3, p.padding[1] = 1, p.kernel[2] = 4, p.stride[2] = 4;
    test::pack(p, layout);
    give_tail(p);
    run(p, 5);
  }
}

// Input channels off the steps of products; output channels off the groups of the gather; weights of both layouts; a
// single channel.
TEST_P(Columns, Channels) {
  for (Layout layout : kLayouts) {
    for (auto const& [in, out] : {std::pair<int64_t, int64_t>{8, 1}, {40, 3}, {136, 5}, {200, 72}, {16, 130}}) {
      for (Layout weights : kLayouts) {
        for (Window const& w : {kHalves, Window{4, 2, 1, 0, 1}}) {
          Problem p = problem({1, in, out, {2, 2, 4}}, w, layout);
          test::pack(weight_shape(p), weights, p.weight_stride);
          give_tail(p);
          run(p, static_cast<uint64_t>(in));
        }
      }
    }
  }
}

// Where x is contiguous any number of input channels will do; and y may have another layout than x.
TEST_P(Columns, LayoutsOfXAndY) {
  for (int64_t in : {1, 3, 19, 67}) run(problem({2, in, 8, {2, 3, 4}}, kHalves, Layout::kNcdhw), 1);
  for (Layout layout : kLayouts) {
    for (Window const& w : {kHalves, kThirds}) {
      Problem p = problem({2, 24, 16, {2, 3, 8}}, w, layout);
      Layout const other = layout == Layout::kNcdhw ? Layout::kNdhwc : Layout::kNcdhw;
      test::pack(y_shape(p), other, p.y_stride);
      test::pack(y_shape(p), other, p.add_stride);
      give_tail(p);
      run(p, 2);
    }
  }
}

// The sum in parts, of equal and of different lengths.
TEST_P(Columns, Parts) {
  for (Layout layout : kLayouts) {
    for (int64_t in : {256, 328, 1000}) {
      for (Window const& w : {kHalves, kThirds}) {
        Problem p = problem({1, in, 24, {2, 4, 4}}, w, layout);
        EXPECT_GT(parts(p), 1);
        give_tail(p);
        run(p, static_cast<uint64_t>(in));
      }
    }
  }
}

TEST_P(Columns, EveryActivationBeforeAndAfterAdd) {
  test::for_each_activation([](Layout layout) { return problem({1, 16, 24, {2, 2, 4}}, kHalves, layout); },
                            [this](Problem const& p, uint64_t seed) { run(p, seed); });
}

// Every sum only grows, in one part and in several.
TEST_P(Columns, OperandsOfOneSign) {
  for (Layout layout : kLayouts) {
    for (Window const& w : {kHalves, kThirds}) {
      run(problem({1, 1024, 24, {2, 4, 4}}, w, layout), 1, test::one_sign_draw);
      run(problem({4, 128, 264, {2, 4, 8}}, w, layout), 1, test::one_sign_draw);
    }
  }
}

// Only taps that reach an output may touch it, and infinities stay what fp32 makes of them.
TEST_P(Columns, NonFiniteValues) {
  for (Layout layout : kLayouts) {
    for (Window const& w : {kHalves, kThirds, Window{4, 2, 1, 0, 1}}) {
      Problem p = problem({1, 264, 24, {3, 4, 4}}, w, layout);
      p.has_bias = 1;
      for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, test::nonfinite_draw);
      run(p, 3, test::uniform_draw, test::nonfinite_draw);
      if (GetParam().dtype != CONVT3D_F16) {
        run(p, 4, test::decades_draw);
        run(p, 5, test::near_infinity_draw, test::small_draw);
      }
    }
  }
}

TEST_P(Columns, ViewsSlicesAndBroadcasts) {
  int const element = GetParam().dtype == CONVT3D_F32 ? 4 : 2;
  for (Layout layout : kLayouts) {
    Problem p = problem({2, 16, 16, {4, 2, 4}}, kHalves, layout);
    p.has_add = 1;
    p.add_alignment = p.y_alignment = element;
    run(p, 9);
    p.add_alignment = p.y_alignment = 16;
    test::slice(p, 48, 40, layout);
    run(p, 10);
    for (int axis = 0; axis < 5; ++axis) p.add_stride[axis] = axis == 1;
    run(p, 11);
    p.add_stride[1] = 0;
    run(p, 12);
    Problem const broadcast = problem({2, 16, 16, {4, 2, 4}}, kHalves, layout);
    for (int axis : {0, 1}) {
      p = broadcast;
      p.x_stride[axis] = 0;
      if (axis == 0 || layout == Layout::kNcdhw) run(p, 13);
    }
    if (layout == Layout::kNdhwc) {
      p = broadcast;
      p.x_stride[2] = p.x_stride[3] = p.x_stride[4] = 0;
      run(p, 14);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Columns, testing::ValuesIn(kModes), [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
