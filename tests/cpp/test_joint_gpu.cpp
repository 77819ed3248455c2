// SPDX-License-Identifier: Apache-2.0
//
// The sm80 family's joint kernel on the GPU: every way in which its tiles lie over samples, planes and channels, both
// ways of getting weights, and sums in parts. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <vector>

#include "gpu_harness.hpp"
#include "sm80/joint/geometry.hpp"

namespace convt3d {
namespace {

using test::kModes;
using test::Layout;
using test::Mode;

constexpr Layout kLayouts[] = {Layout::kNcdhw, Layout::kNdhwc};

struct Geometry {
  int64_t batch, in, out, depth, height, width;
};

Problem problem(Geometry const& g, int output_padding, Layout layout) {
  Problem p = test::cubic_problem(g.batch, g.in, g.out, 1, 3, 2, 1, output_padding, layout);
  p.in_size[0] = g.depth;
  p.in_size[1] = g.height;
  p.in_size[2] = g.width;
  test::pack(p, layout);
  return p;
}

class Joint : public test::KernelCases<sm80::joint::wherever_possible> {
 protected:
  bool takes(Problem const& p) const override { return sm80::joint::takes(p); }
};

// Tiles of whole samples, of parts of a sample with the next plane in reach, and of planes too far apart for that; all
// of them with an end in the middle of a tile; rows of one voxel; odd outputs along every dimension.
TEST_P(Joint, Tiles) {
  for (Layout layout : kLayouts) {
    for (Geometry const& g : {Geometry{3, 16, 16, 4, 4, 4}, Geometry{17, 16, 8, 2, 2, 2}, Geometry{1, 24, 24, 1, 1, 1},
                              Geometry{2, 16, 24, 3, 5, 7}, Geometry{1, 16, 16, 9, 8, 8},
                              Geometry{1, 16, 16, 3, 13, 12}, Geometry{1, 8, 8, 2, 3, 40}, Geometry{1, 8, 16, 2, 5, 20},
                              Geometry{2, 8, 8, 5, 1, 16}, Geometry{1, 8, 8, 1, 17, 16}, Geometry{2, 8, 8, 4, 6, 2}}) {
      for (int output_padding : {1, 0}) {
        Problem p = problem(g, output_padding, layout);
        p.has_bias = p.has_add = 1;
        p.activation = CONVT3D_ACT_LEAKY_RELU;
        p.negative_slope = 0.1f;
        run(p, static_cast<uint64_t>(g.width));
      }
    }
  }
}

// Channels off the steps of products and accesses; several tiles of output channels; weights that lie as they are read.
TEST_P(Joint, Channels) {
  for (Layout layout : kLayouts) {
    for (auto const& [in, out] : {std::pair<int, int>{1, 1}, {3, 5}, {12, 40}, {17, 17}, {40, 72}, {100, 8}}) {
      for (Layout weights : kLayouts) {
        Problem p = problem({2, in, out, 3, 3, 5}, 1, layout);
        test::pack(weight_shape(p), weights, p.weight_stride);
        p.has_bias = 1;
        run(p, static_cast<uint64_t>(in));
      }
    }
  }
}

// Too few tiles for a device: the input channels in parts, of equal and of different lengths.
TEST_P(Joint, Parts) {
  for (Layout layout : kLayouts) {
    for (int64_t in : {128, 200, 321}) {
      Problem p = problem({1, in, 40, 3, 4, 3}, 1, layout);
      p.dtype = GetParam().dtype;
      EXPECT_GT(sm80::joint::splits(p), 1);
      p.has_bias = p.has_add = 1;
      p.activation = CONVT3D_ACT_SILU;
      run(p, static_cast<uint64_t>(in));
    }
  }
}

TEST_P(Joint, EveryActivationBeforeAndAfterAdd) {
  test::for_each_activation([](Layout layout) { return problem({1, 8, 24, 4, 4, 4}, 1, layout); },
                            [this](Problem const& p, uint64_t seed) { run(p, seed); });
}

// Every sum only grows. TF32's are short; in 16-bit types those of 16 channels are.
TEST_P(Joint, OperandsOfOneSign) {
  for (Layout layout : kLayouts) {
    run(problem({4, GetParam().dtype == CONVT3D_F32 ? 256 : 16, 24, 3, 4, 4}, 1, layout), 1, test::one_sign_draw);
  }
}

// Only taps that reach an output may touch it, and infinities stay what fp32 makes of them.
TEST_P(Joint, NonFiniteValues) {
  for (Layout layout : kLayouts) {
    for (Geometry const& g :
         {Geometry{2, 16, 24, 4, 4, 4}, Geometry{1, 16, 16, 3, 13, 12}, Geometry{1, 96, 8, 3, 3, 3}}) {
      Problem p = problem(g, 1, layout);
      p.has_bias = 1;
      for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, test::nonfinite_draw);
      run(p, 3, test::uniform_draw, test::nonfinite_draw);
      if (GetParam().dtype != CONVT3D_F16) run(p, 4, test::decades_draw);
    }
  }
}

TEST_P(Joint, ViewsSlicesAndBroadcasts) {
  int const element = GetParam().dtype == CONVT3D_F32 ? 4 : 2;
  for (Layout layout : kLayouts) {
    Problem p = problem({2, 16, 16, 4, 3, 4}, 1, layout);
    p.has_add = 1;
    p.x_alignment = p.add_alignment = p.y_alignment = element;
    run(p, 9);
    p.x_alignment = p.add_alignment = p.y_alignment = 16;
    test::slice(p, 48, 40, layout);
    run(p, 10);
    for (int axis = 0; axis < 5; ++axis) p.add_stride[axis] = axis == 1;
    run(p, 11);
    p.add_stride[1] = 0;
    run(p, 12);
  }
}

std::vector<Mode> modes() { return {kModes[1], kModes[2], kModes[3]}; }  // ieee has other kernels

INSTANTIATE_TEST_SUITE_P(All, Joint, testing::ValuesIn(modes()), [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
