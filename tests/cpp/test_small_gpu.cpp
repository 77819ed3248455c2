// SPDX-License-Identifier: Apache-2.0
//
// Small problems as AUTO runs them: one launch of plain fp32 multiply-adds, the same cases and the same bound as the
// other kernels. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <string>

#include "family.hpp"
#include "gpu_harness.hpp"

namespace convt3d {
namespace {

using test::kModes;
using test::Layout;

class Small : public test::GpuCases {
 protected:
  /// Runs `problem` where it is small: AUTO chooses so, without a workspace.
  void run(Problem const& problem, uint64_t seed, float (*draw)(test::Random&) = test::uniform_draw,
           float (*draw_weight)(test::Random&) = nullptr) {
    Problem const p = typed(problem);
    convt3d_plan plan{};
    ASSERT_EQ(convt3d_make_plan(&p, CONVT3D_KERNEL_AUTO, &device, &plan, nullptr, 0), CONVT3D_OK);
    if (plan.reserved != kSmallForm) return;
    EXPECT_EQ(plan.workspace_bytes, 0u);
    run_typed(p, CONVT3D_KERNEL_AUTO, seed, draw, draw_weight);
  }
};

TEST_P(Small, RandomCases) {
  test::Random random(43);
  for (uint64_t seed = 0; seed < 150 && !HasFailure(); ++seed) run(test::random_problem(random, {}), seed);
  EXPECT_GE(ran, 100);
}

TEST_P(Small, EveryActivationBeforeAndAfterAdd) {
  test::for_each_activation([](Layout layout) { return test::cubic_problem(2, 9, 15, 3, 3, 2, 1, 1, layout); },
                            [this](Problem const& p, uint64_t seed) { run(p, seed); });
}

// Only taps that reach an output may touch it; magnitudes of every kind; sums of many products.
TEST_P(Small, Values) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = test::cubic_problem(1, 16, 18, 3, 3, 2, 1, 1, layout);
    p.has_bias = 1;
    for (uint64_t seed = 0; seed < 3; ++seed) run(p, seed, test::nonfinite_draw);
    run(p, 3, test::nonfinite_draw, test::uniform_draw);
    if (GetParam().dtype != CONVT3D_F16) {
      run(p, 4, test::decades_draw);
      run(p, 5, test::near_infinity_draw, test::small_draw);
    }
    run(test::cubic_problem(1, 128, 8, 4, 1, 1, 0, 0, layout), 6);
  }
}

TEST_P(Small, ViewsAndSlices) {
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem p = test::cubic_problem(2, 8, 16, 3, 3, 2, 1, 0, layout);
    p.has_add = 1;
    p.x_alignment = p.add_alignment = p.y_alignment = GetParam().dtype == CONVT3D_F32 ? 4 : 2;
    run(p, 9);
    Problem wide = p;
    wide.out_channels = 40;
    test::pack(wide, layout);
    std::copy(wide.y_stride, wide.y_stride + 5, p.y_stride);
    for (int64_t& stride : p.add_stride) stride = 0;
    run(p, 10);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Small, testing::ValuesIn(kModes), [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
