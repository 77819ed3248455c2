// SPDX-License-Identifier: Apache-2.0
//
// The operator on the GPU, every kernel family through the same cases: both layouts, all types, any geometry, any
// tail, against float64. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <array>
#include <climits>
#include <cstdio>
#include <string>
#include <tuple>

#include "gpu_harness.hpp"
#include "sm90/most_ctas.hpp"

namespace convt3d {
namespace {

using test::kModes;
using test::Layout;
using test::Mode;
using test::Outcome;

constexpr convt3d_kernel kKernels[] = {CONVT3D_KERNEL_SM80, CONVT3D_KERNEL_SM90};

constexpr Layout kLayouts[] = {Layout::kNdhwc, Layout::kNcdhw};

// The sm80 family must take every case here on any GPU from SM80 on. The sm90 family takes what it says it takes, in
// the modes and layouts that it has; each test then wants at least one case to have run.
class Forward : public testing::TestWithParam<std::tuple<convt3d_kernel, Mode>> {
 protected:
  void SetUp() override {
    char text[256] = "";
    convt3d_device device{};
    if (convt3d_current_device(&device, text, sizeof text) != CONVT3D_OK) GTEST_SKIP() << text;
    if (kernel() == CONVT3D_KERNEL_SM80) {
      if (device.compute_capability < 80) GTEST_SKIP() << "the GPU is older than SM80";
      return;
    }
    for (Layout layout : kLayouts) {
      Problem const probe = typed(test::reference_problem(1, layout));
      if (convt3d_supported(&probe, kernel(), &device, text, sizeof text) == CONVT3D_OK) return;
    }
    GTEST_SKIP() << text;
  }

  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_GT(ran, 0) << "no case ran";
    std::printf("%d cases ran, %d not supported, largest error / bound %.3f\n", ran, not_supported, worst);
  }

  static convt3d_kernel kernel() { return std::get<0>(GetParam()); }

  static Problem typed(Problem p) {
    p.dtype = std::get<1>(GetParam()).dtype;
    p.precision = std::get<1>(GetParam()).precision;
    return p;
  }

  void run(Problem const& p, uint64_t seed, float (*draw)(test::Random&) = test::uniform_draw,
           float (*draw_weight)(test::Random&) = nullptr) {
    Outcome const outcome = test::run_case(typed(p), kernel(), seed, &worst, draw, draw_weight);
    if (outcome == Outcome::kNotSupported) {
      ++not_supported;
      EXPECT_NE(kernel(), CONVT3D_KERNEL_SM80) << test::describe(p);
    } else {
      ++ran;
    }
  }

  int ran = 0;
  int not_supported = 0;
  double worst = 0;
};

TEST_P(Forward, RandomCases) {
  test::Random random(41);
  test::CaseLimits limits;
  limits.hopper = kernel() == CONVT3D_KERNEL_SM90;
  for (uint64_t seed = 0; seed < 150 && !HasFailure(); ++seed) run(test::random_problem(random, limits), seed);
  EXPECT_GE(ran, 30) << "the family takes too few of the random cases to be tested by them";
}

TEST_P(Forward, ReferenceWorkloadReduced) {
  for (Layout layout : kLayouts) run(test::reference_problem(1, layout), 1);
}

TEST_P(Forward, EveryActivationBeforeAndAfterAdd) {
  test::for_each_activation([](Layout layout) { return test::cubic_problem(2, 8, 16, 4, 3, 2, 1, 1, layout); },
                            [this](Problem const& p, uint64_t seed) { run(p, seed); });
}

// The kernels people use: k2 s2, k3 s2 p1 op1, k4 s2 p1, an anisotropic one, and outputs that no tap reaches.
TEST_P(Forward, CommonGeometries) {
  for (Layout layout : kLayouts) {
    for (auto const& [kernel_size, stride, padding, extra] :
         {std::array{2, 2, 0, 0}, {3, 2, 1, 1}, {3, 2, 1, 0}, {4, 2, 1, 0}, {4, 4, 0, 0}, {1, 2, 0, 1}, {3, 1, 1, 0}}) {
      Problem p = test::cubic_problem(2, 16, 24, 6, kernel_size, stride, padding, extra, layout);
      p.has_bias = 1;
      run(p, static_cast<uint64_t>(kernel_size * 10 + stride));
    }
    Problem p = test::cubic_problem(1, 16, 16, 4, 3, 2, 1, 1, layout);
    p.kernel[2] = p.stride[2] = 1;
    p.padding[2] = p.output_padding[2] = 0;
    test::pack(p, layout);
    run(p, 7);
  }
}

TEST_P(Forward, OddChannelCounts) {
  for (Layout layout : kLayouts) {
    for (int64_t channels : {1, 2, 3, 5, 13, 45}) {
      for (int64_t extra : {0, 1}) {
        Problem p = test::cubic_problem(1, channels, channels + 1, 3, 3, 2, 1, extra, layout);
        p.has_bias = p.has_add = 1;
        run(p, static_cast<uint64_t>(channels));
      }
    }
  }
}

// Several N tiles, the last one in part; several M tiles; both widths of the N tile.
TEST_P(Forward, SeveralTiles) {
  for (Layout layout : kLayouts) {
    for (int64_t channels : {24, 136}) {
      Problem p = test::cubic_problem(2, 16, channels, 6, 3, 2, 1, 1, layout);
      p.has_bias = p.has_add = 1;
      p.activation = CONVT3D_ACT_SILU;
      run(p, static_cast<uint64_t>(channels));
    }
  }
}

// Sums that are long and enough tiles to fill a device, for which the sm80 family has tiles of 96 channels: one in
// part, whose rows are no whole accesses, and two. More tiles than are started longest class first, x in blocks of
// channels, the last one in part.
TEST_P(Forward, TilesOf96Channels) {
  for (Layout layout : kLayouts) {
    for (int64_t channels : {90, 180}) {
      Problem p = test::cubic_problem(2, 40, channels, 1, 3, 2, 1, 1, layout);
      p.in_size[0] = 8;
      p.in_size[1] = 17;
      p.in_size[2] = 16;
      test::pack(p, layout);
      p.has_bias = p.has_add = 1;
      p.activation = CONVT3D_ACT_LEAKY_RELU;
      p.negative_slope = 0.1f;
      bool const one_sign = kernel() == CONVT3D_KERNEL_SM80 && channels == 90;
      run(p, static_cast<uint64_t>(channels), one_sign ? test::one_sign_draw : test::uniform_draw);
    }
  }
}

// Weights that do not stay in shared memory: several slabs of input channels, one of them in part; several tiles along
// every dimension, the last ones in part; a D pair too many; every kernel size; no tail, and one value per channel.
TEST_P(Forward, WideLayers) {
  struct Wide {
    int64_t in, out, kernel, padding, extra, depth, height, width;
  };
  for (Layout layout : kLayouts) {
    for (Wide const& w :
         {Wide{72, 72, 3, 1, 1, 3, 9, 18}, Wide{136, 24, 2, 0, 0, 2, 8, 4}, Wide{40, 64, 4, 1, 0, 1, 17, 16},
          Wide{80, 16, 5, 2, 1, 2, 3, 20}, Wide{200, 8, 2, 0, 0, 5, 4, 34}, Wide{72, 24, 3, 1, 1, 1, 9, 30}}) {
      Problem p = test::cubic_problem(2, w.in, w.out, 1, w.kernel, 2, w.padding, w.extra, layout);
      p.in_size[0] = w.depth;
      p.in_size[1] = w.height;
      p.in_size[2] = w.width;
      test::pack(p, layout);
      p.activation = CONVT3D_ACT_LEAKY_RELU;
      p.negative_slope = 0.1f;
      run(p, static_cast<uint64_t>(w.in));
      p.has_bias = p.has_add = 1;
      run(p, static_cast<uint64_t>(w.in) + 1);
      p.activation = CONVT3D_ACT_SILU;
      p.add_order = CONVT3D_ADD_AFTER;
      for (int axis = 2; axis < 5; ++axis) p.add_stride[axis] = 0;
      p.add_stride[0] = w.out;
      p.add_stride[1] = 1;
      run(p, static_cast<uint64_t>(w.in) + 2);
    }
  }
}

// Several tiles for each CTA of the sm90 family, in the buffers of the one before: weights in shared memory and slabs
// of them, tiles of 16 and of 12 positions along W, rows of whole 16 bytes and others, no tail. Few products, as a
// sanitizer takes a hundred times as long for them (scripts/gpu_run.py).
TEST_P(Forward, FewCtas) {
  struct Limit {
    Limit() { sm90::most_ctas = 2; }
    ~Limit() { sm90::most_ctas = INT_MAX; }
  } const limit;
  struct Small {
    int64_t in, out, kernel, padding, extra, depth, height, width;
  };
  for (Layout layout : kLayouts) {
    for (Small const& s :
         {Small{72, 8, 3, 1, 1, 4, 4, 8}, Small{40, 18, 3, 1, 0, 4, 4, 9}, Small{72, 8, 3, 1, 1, 2, 4, 12},
          Small{136, 8, 2, 0, 0, 4, 4, 8}, Small{16, 16, 3, 1, 1, 12, 4, 8}}) {
      Problem p = test::cubic_problem(1, s.in, s.out, 1, s.kernel, 2, s.padding, s.extra, layout);
      p.in_size[0] = s.depth;
      p.in_size[1] = s.height;
      p.in_size[2] = s.width;
      test::pack(p, layout);
      p.has_bias = p.has_add = s.kernel == 3;
      // Narrow tiles have few activations.
      if (p.has_add) p.activation = s.width == 12 ? CONVT3D_ACT_RELU : CONVT3D_ACT_X_HARDSWISH;
      run(p, static_cast<uint64_t>(s.in + s.width));
    }
  }
}

// Operands of one sign, whose sums a tensor core that cuts off instead of rounding makes too small: the most products
// that weights in shared memory have, of either D parity, and several slabs of channels where sums are short
// (docs/numerics.md).
TEST_P(Forward, OperandsOfOneSign) {
  bool const sm80 = kernel() == CONVT3D_KERNEL_SM80;
  for (Layout layout : kLayouts) {
    run(test::reference_problem(1, layout), 1, test::one_sign_draw);
    for (int64_t padding : {0, 1}) {
      Problem p = test::cubic_problem(1, 32, 16, 1, 3, 2, padding, 1, layout);
      p.in_size[0] = 3;
      p.in_size[1] = p.in_size[2] = 8;
      test::pack(p, layout);
      run(p, 2, test::one_sign_draw);
    }
    Problem p = test::cubic_problem(1, 256, 16, 4, 3, 2, 1, 1, layout);
    p.in_size[1] = p.in_size[2] = 8;
    test::pack(p, layout);
    run(p, 3, test::one_sign_draw);
    if (sm80) {
      // Many short sums, in each width of tiles; products that fill no iteration of the mainloop.
      for (int64_t out : {16, 40, 72}) {
        run(test::cubic_problem(1, 520, out, 4, 3, 1, 1, 0, layout), 4, test::one_sign_draw);
        run(test::cubic_problem(1, 5, out, 6, 5, 1, 2, 0, layout), 5, test::one_sign_draw);
      }
    }
  }
}

// Strides whose product is beyond the classes of one launch.
TEST_P(Forward, ManyClasses) {
  for (Layout layout : kLayouts) {
    for (int stride : {3, 4}) {
      Problem p = test::cubic_problem(2, 8, 16, 3, 4, stride, 1, 1, layout);
      p.has_add = 1;
      if (kernel() == CONVT3D_KERNEL_SM80) run(p, static_cast<uint64_t>(stride));
      p.stride[0] = 2;
      p.in_size[1] = 9;
      p.in_size[2] = 17;
      test::pack(p, layout);
      run(p, static_cast<uint64_t>(stride) + 10);
    }
  }
}

// Every length of a row modulo 16 bytes, of full tiles and of last ones: rows of y and of add start anywhere.
TEST_P(Forward, RowsOfAnyLength) {
  for (Layout layout : kLayouts) {
    for (int64_t width = 13; width < 22; ++width) {
      Problem p = test::cubic_problem(2, 24, 20, 3, 3, 2, 1, 0, layout);
      p.in_size[1] = 6;
      p.in_size[2] = width;
      test::pack(p, layout);
      p.has_bias = p.has_add = 1;
      p.activation = CONVT3D_ACT_SILU;
      run(p, static_cast<uint64_t>(width));
      p.has_add = 0;
      p.activation = CONVT3D_ACT_RELU;
      run(p, static_cast<uint64_t>(width) + 100);
    }
  }
}

// Slabs so large that the streaming kernel's ring is shorter than from a warp's unit to its next, and rows that the
// warp stores by itself.
TEST_P(Forward, OddRowsBesideLargeSlabs) {
  struct Size {
    int64_t kernel[3], stride[3], padding[3];
  };
  for (Layout layout : kLayouts) {
    for (Size const& s : {Size{{5, 5, 5}, {2, 2, 2}, {2, 2, 2}}, Size{{2, 2, 2}, {1, 1, 1}, {0, 0, 0}},
                          Size{{1, 3, 3}, {1, 1, 1}, {0, 1, 1}}, Size{{2, 3, 3}, {1, 1, 1}, {0, 0, 0}},
                          Size{{3, 1, 1}, {1, 1, 1}, {1, 0, 0}}, Size{{3, 4, 4}, {1, 2, 2}, {1, 1, 1}},
                          Size{{5, 4, 4}, {1, 2, 2}, {2, 1, 1}}}) {
      Problem p = test::cubic_problem(1, 72, 40, 3, 2, 1, 0, 0, layout);
      for (int axis = 0; axis < 3; ++axis) {
        p.kernel[axis] = s.kernel[axis];
        p.stride[axis] = s.stride[axis];
        p.padding[axis] = s.padding[axis];
      }
      p.in_size[1] = 9;
      p.in_size[2] = 19;
      test::pack(p, layout);
      p.has_bias = 1;
      run(p, static_cast<uint64_t>(s.kernel[0]));
      p.has_add = 1;
      p.activation = CONVT3D_ACT_RELU;
      run(p, static_cast<uint64_t>(s.kernel[0]) + 10);
    }
  }
}

TEST_P(Forward, OutputIsAChannelSliceOfALargerBuffer) {
  for (Layout layout : kLayouts) {
    Problem p = test::cubic_problem(2, 8, 16, 4, 2, 2, 0, 0, layout);
    Problem wide = p;
    wide.out_channels = 40;
    test::pack(wide, layout);
    std::copy(wide.y_stride, wide.y_stride + 5, p.y_stride);
    run(p, 5);
  }
}

TEST_P(Forward, OffsetViews) {
  for (Layout layout : kLayouts) {
    Problem p = test::cubic_problem(2, 8, 16, 3, 3, 2, 1, 1, layout);
    p.has_add = 1;
    int const element = element_bytes(typed(p));
    p.x_alignment = p.add_alignment = p.y_alignment = element;
    run(p, 9);
    p.x_alignment = p.y_alignment = 16;
    run(p, 10);
    p.y_alignment = 8;
    p.add_alignment = 16;
    run(p, 11);
    p.in_size[2] = 8;  // rows of whole 16 bytes: of add they are boxes all the same
    test::pack(p, layout);
    p.y_alignment = 8;
    run(p, 12);
    p.y_alignment = 16;
    p.add_alignment = element;
    run(p, 13);
  }
}

TEST_P(Forward, AddBroadcastsFromOneElement) {
  for (Layout layout : kLayouts) {
    Problem p = test::cubic_problem(2, 8, 16, 4, 3, 2, 1, 1, layout);
    p.has_add = 1;
    for (int64_t& stride : p.add_stride) stride = 0;
    run(p, 3);
  }
}

// inf and nan among the operands: only taps that reach an output may touch it, and every output is what fp32 arithmetic
// over these taps gives; through bias, add, activation and both orders, over several tiles.
TEST_P(Forward, NonFiniteOperands) {
  for (Layout layout : kLayouts) {
    for (int64_t channels : {24, 136}) {
      for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
        Problem p = test::cubic_problem(2, channels == 136 ? 72 : 8, channels, 5, 3, 2, 1, 1, layout);
        p.in_size[2] = 6;
        test::pack(p, layout);
        p.has_bias = p.has_add = 1;
        p.activation = order == CONVT3D_ADD_BEFORE ? CONVT3D_ACT_X_HARDSWISH : CONVT3D_ACT_LEAKY_RELU;
        p.negative_slope = 0.2f;
        p.add_order = order;
        run(p, static_cast<uint64_t>(channels + order), test::nonfinite_draw);
      }
    }
  }
}

// fp32 accuracy where magnitudes differ: a few values far below the others, in x alone and in both operands; inf and
// nan in x alone; all magnitudes at once; values that the parts of an operand do not hold.
TEST_P(Forward, MagnitudesInIeeeMode) {
  if (std::get<1>(GetParam()).dtype != CONVT3D_F32 || std::get<1>(GetParam()).precision != CONVT3D_IEEE) {
    GTEST_SKIP() << "fp32 in ieee mode";
  }
  for (int64_t channels : {32, 136}) {  // of the sm90 family, the second is the streaming kernel's
    for (Layout layout : kLayouts) {
      Problem p = test::cubic_problem(2, channels, 24, 6, 3, 2, 1, 1, layout);
      p.in_size[2] = 8;
      test::pack(p, layout);
      p.has_bias = 1;
      run(p, 1, test::few_small_draw, test::uniform_draw);
      run(p, 2, test::few_small_draw);
      run(p, 3, test::nonfinite_draw, test::uniform_draw);
      for (uint64_t seed = 4; seed < 10; ++seed) run(p, seed, test::decades_draw);
      run(p, 10, test::near_infinity_draw, test::small_draw);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Forward, testing::Combine(testing::ValuesIn(kKernels), testing::ValuesIn(kModes)),
                         [](auto const& info) {
                           return std::string(convt3d_kernel_name(std::get<0>(info.param))) + "_" +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace convt3d
