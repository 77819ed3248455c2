// SPDX-License-Identifier: Apache-2.0
//
// Problems with groups on the GPU, by the cases and the bound of the other kernels. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <string>

#include "gpu_harness.hpp"
#include "sm80/grouped/grouped.hpp"

namespace convt3d {
namespace {

using test::kModes;
using test::Layout;

Problem grouped(Problem p, int64_t groups, int64_t inputs, int64_t outputs, Layout layout) {
  p.groups = groups;
  p.in_channels = groups * inputs;
  p.out_channels = groups * outputs;
  test::pack(p, layout);
  return p;
}

Problem depthwise(Problem p, int64_t channels, int64_t multiplier, Layout layout) {
  return grouped(p, channels, 1, multiplier, layout);
}

class GroupedGpu : public test::GpuCases {
 protected:
  void run(Problem const& p, uint64_t seed, float (*draw)(test::Random&) = test::uniform_draw,
           float (*draw_weight)(test::Random&) = nullptr, convt3d_kernel kernel = CONVT3D_KERNEL_SM80) {
    run_typed(typed(p), kernel, seed, draw, draw_weight);
  }
};

TEST_P(GroupedGpu, RandomCases) {
  test::Random random(47);
  for (uint64_t seed = 0; seed < 100 && !HasFailure(); ++seed) {
    Problem p = test::random_problem(random, {});
    Layout const layout = random.chance(50) ? Layout::kNcdhw : Layout::kNdhwc;
    p = depthwise(p, random.integer(2, 40), random.chance(70) ? 1 : random.integer(2, 3), layout);
    if (random.chance(40)) p.add_stride[random.integer(0, 4)] = 0;
    run(p, seed);
  }
}

// A launch for each group, of whatever kernel takes one.
TEST_P(GroupedGpu, GroupsOfManyChannels) {
  test::Random random(53);
  for (uint64_t seed = 0; seed < 40 && !HasFailure(); ++seed) {
    Problem p = test::random_problem(random, {});
    Layout const layout = random.chance(50) ? Layout::kNcdhw : Layout::kNdhwc;
    bool const eights = random.chance(50);
    auto const channels = [&] { return eights ? 8 * random.integer(1, 3) : random.integer(1, 20); };
    p = grouped(p, random.integer(2, 4), channels(), channels(), layout);
    for (convt3d_kernel kernel : {CONVT3D_KERNEL_SM80, CONVT3D_KERNEL_AUTO}) {
      run(p, seed, test::uniform_draw, nullptr, kernel);
    }
  }
}

// In 16-bit types all groups in one launch, on tensor cores.
TEST_P(GroupedGpu, SeveralChannels) {
  if (GetParam().dtype == CONVT3D_F32) GTEST_SKIP() << "a launch for each group";
  test::Random random(59);
  int taken = 0;
  for (uint64_t seed = 0; seed < 150 && !HasFailure(); ++seed) {
    Problem p = test::random_problem(random, {});
    Layout const layout = random.chance(50) ? Layout::kNcdhw : Layout::kNdhwc;
    int64_t const inputs = random.chance(50) ? 8 * random.integer(1, 4) : random.integer(2, 32);
    p = typed(grouped(p, random.integer(2, 12), inputs, random.chance(50) ? 8 : random.integer(1, 40), layout));
    if (random.chance(40)) p.add_stride[random.integer(0, 4)] = 0;
    if (!sm80::grouped::on_tensor_cores(p)) continue;
    ++taken;
    run(p, seed);
  }
  EXPECT_GT(taken, 75);
}

TEST_P(GroupedGpu, SeveralChannelsOfEveryValue) {
  if (GetParam().dtype == CONVT3D_F32) GTEST_SKIP() << "a launch for each group";
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    for (int64_t stride : {1, 2, 3}) {
      Problem p = test::cubic_problem(2, 1, 1, 9, 3, stride, 1, stride - 1);
      p.has_bias = p.has_add = 1;
      for (int64_t inputs : {8, 5}) {
        Problem const own = grouped(p, 6, inputs, 8, layout);
        ASSERT_TRUE(sm80::grouped::on_tensor_cores(typed(own)));
        for (uint64_t seed = 0; seed < 3; ++seed) run(own, seed, test::nonfinite_draw);
        run(own, 3, test::nonfinite_draw, test::uniform_draw);
        run(own, 4, test::uniform_draw, test::nonfinite_draw);
        run(own, 5, test::one_sign_draw);
        if (GetParam().dtype == CONVT3D_BF16) run(own, 6, test::near_infinity_draw, test::small_draw);
      }
      run(grouped(p, 12, 32, 24, layout), 7, test::one_sign_draw);  // 864 products at stride 1
    }
  }
}

TEST_P(GroupedGpu, SeveralChannelsInViews) {
  if (GetParam().dtype == CONVT3D_F32) GTEST_SKIP() << "a launch for each group";
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = grouped(test::cubic_problem(2, 1, 1, 6, 3, 2, 1, 1), 4, 8, 8, layout);
    p.has_add = 1;
    p.x_alignment = p.add_alignment = p.y_alignment = 2;
    ASSERT_TRUE(sm80::grouped::on_tensor_cores(typed(p)));
    run(p, 9);
    for (bool aligned : {false, true}) {
      if (aligned) p.x_alignment = p.add_alignment = p.y_alignment = 16;
      test::slice(p, aligned ? 64 : 50, aligned ? 48 : 41, layout);
      ASSERT_TRUE(sm80::grouped::on_tensor_cores(typed(p)));
      run(p, 10);
      for (int64_t& stride : p.add_stride) stride = 0;
      run(p, 11);
    }
  }
}

// Too many for that.
TEST_P(GroupedGpu, ManyGroups) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = grouped(test::cubic_problem(2, 1, 1, 5, 3, 2, 1, 1), 40, 6, 2, layout);
    p.has_bias = p.has_add = 1;
    run(p, 3);
  }
}

TEST_P(GroupedGpu, MedNeXt) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    for (int64_t kernel : {1, 3, 5, 7}) {
      for (int64_t output_padding : {0, 1}) {
        Problem p = test::cubic_problem(2, 1, 1, kernel == 3 ? 19 : 7, kernel, 2, kernel / 2, output_padding);
        p = depthwise(p, kernel == 3 ? 3 : 34, 1, layout);
        p.has_bias = p.has_add = 1;
        p.activation = CONVT3D_ACT_GELU;
        run(p, static_cast<uint64_t>(kernel));
      }
    }
  }
}

// Sums that only grow, so that every rounding counts: hundreds of products, by either kernel, or by the general one
// where the other would have too many.
TEST_P(GroupedGpu, LongSumsOfOneSign) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = depthwise(test::cubic_problem(1, 1, 1, 10, 7, 1, 3, 0), 40, 1, layout);
    run(p, 1, test::one_sign_draw);
    p = grouped(test::cubic_problem(1, 1, 1, 8, 3, 1, 1, 0), 40, 12, 1, layout);
    run(p, 2, test::one_sign_draw);
    for (int64_t depth : {7, 13}) {
      if (depth > 7 && layout == Layout::kNdhwc) continue;  // too many weights for a block's shared memory
      p = test::cubic_problem(1, 1, 1, 8, 7, 2, 3, 1);
      p.kernel[0] = depth;
      p.stride[0] = 1;
      p.padding[0] = depth / 2;
      p.output_padding[0] = 0;
      p = depthwise(p, 34, 1, layout);
      run(p, static_cast<uint64_t>(depth), test::one_sign_draw);
    }
  }
}

TEST_P(GroupedGpu, EveryActivationBeforeAndAfterAdd) {
  test::for_each_activation(
      [](Layout layout) { return depthwise(test::cubic_problem(2, 1, 1, 5, 3, 2, 1, 1), 9, 1, layout); },
      [this](Problem const& p, uint64_t seed) { run(p, seed); });
}

// Only taps that reach an output may touch it.
TEST_P(GroupedGpu, Values) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    for (int64_t stride : {1, 2, 3}) {
      Problem p = depthwise(test::cubic_problem(1, 1, 1, 9, 3, stride, 1, stride - 1), 16, 1, layout);
      p.has_bias = 1;
      for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, test::nonfinite_draw);
      run(p, 3, test::nonfinite_draw, test::uniform_draw);
      if (GetParam().dtype != CONVT3D_F16) {
        run(p, 4, test::decades_draw);
        run(p, 5, test::near_infinity_draw, test::small_draw);
      }
    }
  }
}

TEST_P(GroupedGpu, ViewsAndSlices) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = depthwise(test::cubic_problem(2, 1, 1, 6, 3, 2, 1, 1), 16, 1, layout);
    p.has_add = 1;
    p.x_alignment = p.add_alignment = p.y_alignment = GetParam().dtype == CONVT3D_F32 ? 4 : 2;
    run(p, 9);
    test::slice(p, 50, 41, layout);
    for (int64_t& stride : p.add_stride) stride = 0;
    run(p, 10);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupedGpu, testing::ValuesIn(kModes), [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
