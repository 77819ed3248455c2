// SPDX-License-Identifier: Apache-2.0
//
// convt3d_backward_activation on the GPU through the C interface, against float64: both layouts, all types, any
// strides, in place and not, NaN-poisoned. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "backward/plan.hpp"
#include "convt3d/activation_gradient.hpp"
#include "convt3d/convt3d_backward.h"
#include "gpu_harness.hpp"

namespace convt3d {
namespace {

using test::DeviceBuffer;
using test::DeviceTensor;
using test::Layout;
using test::Random;

class Backward : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    char text[256] = "";
    convt3d_device device{};
    if (convt3d_current_device(&device, text, sizeof text) != CONVT3D_OK) GTEST_SKIP() << text;
  }

  /// Strides of `layout`, of a channel slice of a larger tensor where `slice`.
  static void lay_out(Size5 const& shape, Layout layout, bool slice, int64_t (&stride)[5]) {
    Size5 whole = shape;
    if (slice) whole.v[1] *= 2;
    test::pack(whole, layout, stride);
  }

  static int32_t alignment_of(void const* pointer) {
    uintptr_t const address = reinterpret_cast<uintptr_t>(pointer) | 16;
    return static_cast<int32_t>(address & (~address + 1));
  }

  int turned_cases = 0;

  void run(Random& random, Size5 const& shape, Layout layout, Layout grad_layout, int32_t activation, bool in_place) {
    int32_t const dtype = GetParam();
    convt3d_activation_gradient d{};
    std::copy(shape.v, shape.v + 5, d.size);
    lay_out(shape, grad_layout, random.chance(30), d.grad_output_stride);
    lay_out(shape, layout, random.chance(30), d.t_stride);
    if (random.chance(20)) std::fill(d.grad_output_stride, d.grad_output_stride + 5, 0);
    if (in_place) {
      std::copy(d.t_stride, d.t_stride + 5, d.grad_pre_stride);
    } else {
      lay_out(shape, layout, random.chance(30), d.grad_pre_stride);
    }
    int const element = dtype == CONVT3D_F32 ? 4 : 2;
    auto const skew = [&] { return random.chance(60) ? 0 : static_cast<int>(random.integer(0, 7)) * element; };
    DeviceTensor grad_output(shape, d.grad_output_stride, dtype, skew());
    DeviceTensor t(shape, d.t_stride, dtype, skew());
    DeviceTensor separate(shape, d.grad_pre_stride, dtype, skew());
    DeviceTensor& grad_pre = in_place ? t : separate;
    d.grad_output_alignment = alignment_of(grad_output.pointer());
    d.t_alignment = alignment_of(t.pointer());
    d.grad_pre_alignment = alignment_of(grad_pre.pointer());
    d.dtype = dtype;
    d.activation = activation;
    d.negative_slope = 0.2f;
    d.has_grad_pre = d.has_grad_bias = 1;
    d.has_grad_pre_ndhwc = 1;
    if (!backward::turnable(d)) d.has_grad_pre_ndhwc = 0;
    turned_cases += d.has_grad_pre_ndhwc;
    int64_t turned_stride[5];
    test::pack(shape, Layout::kNdhwc, turned_stride);
    DeviceTensor turned(shape, turned_stride, dtype, 0);
    test::Tensor const g = grad_output.fill([&] { return random.uniform(); });
    test::Tensor const x = t.fill([&] { return 4 * random.uniform(); });
    auto const g_before = grad_output.bytes(), t_before = t.bytes();

    char text[256] = "";
    size_t bytes = 0;
    ASSERT_EQ(convt3d_backward_activation_workspace(&d, &bytes, text, sizeof text), CONVT3D_OK) << text;
    DeviceBuffer workspace(bytes), sums(static_cast<size_t>(shape[1]) * 4);
    convt3d_activation_gradient_tensors const tensors{
        grad_output.pointer(), t.pointer(), grad_pre.pointer(), turned.pointer(), reinterpret_cast<float*>(sums.data()),
        workspace.data(),      bytes};
    ASSERT_EQ(convt3d_backward_activation(&d, &tensors, nullptr, text, sizeof text), CONVT3D_OK) << text;
    test::check_cuda(cudaDeviceSynchronize());

    EXPECT_TRUE(grad_output.bytes() == g_before) << "grad_output was written";
    if (!in_place) {
      EXPECT_TRUE(t.bytes() == t_before) << "t was written";
    }
    auto const stored = grad_pre.bytes();
    EXPECT_TRUE(grad_pre.gaps_are_untouched(stored)) << "wrote outside of grad_pre";
    test::Tensor const actual = grad_pre.read(stored);
    auto const turned_bytes = turned.bytes();
    EXPECT_TRUE(turned.gaps_are_untouched(turned_bytes)) << "wrote outside of grad_pre_ndhwc";
    if (d.has_grad_pre_ndhwc) {
      EXPECT_TRUE(turned.read(turned_bytes) == actual) << "the two orders differ";
    }
    test::Tensor exact_sums(static_cast<size_t>(shape[1])), magnitudes(static_cast<size_t>(shape[1]));
    size_t at = 0;
    test::for_each_index(shape, [&](int64_t const* index) {
      // The host's derivatives are tested against the forward's slope in double; here in fp32, as on the device.
      double const exact =
          apply_activation_gradient(activation, static_cast<float>(g[at]), static_cast<float>(x[at]), d.negative_slope);
      double const bound = 0.5 * test::unit_in_last_place(dtype, exact) + std::abs(g[at]) * 0x1p-20;
      ASSERT_LE(std::abs(actual[at] - exact), bound) << "at " << at << " t " << x[at];
      exact_sums[static_cast<size_t>(index[1])] += exact;
      magnitudes[static_cast<size_t>(index[1])] += std::abs(exact) + std::abs(g[at]);
      ++at;
    });
    auto const host_sums = sums.download();
    for (size_t c = 0; c < exact_sums.size(); ++c) {
      ASSERT_NEAR(test::decode(CONVT3D_F32, host_sums.data() + 4 * c), exact_sums[c], magnitudes[c] * 0x1p-20) << c;
    }
  }
};

TEST_P(Backward, RandomCases) {
  Random random(11);
  for (int trial = 0; trial < 120 && !HasFailure(); ++trial) {
    Size5 const shape{{random.integer(1, 3), random.chance(20) ? random.integer(1, 300) : random.integer(1, 20),
                       random.integer(1, 5), random.integer(1, 8), random.integer(1, 12)}};
    Layout const layout = random.chance(50) ? Layout::kNcdhw : Layout::kNdhwc;
    Layout const grad_layout = random.chance(80) ? layout : Layout::kNcdhw;
    SCOPED_TRACE("trial " + std::to_string(trial));
    run(random, shape, layout, grad_layout, static_cast<int32_t>(random.integer(0, CONVT3D_ACT_COUNT - 1)),
        random.chance(50));
  }
}

// What the turned walk takes: whole accesses, several tiles of positions and of channels, and their ends.
TEST_P(Backward, BothOrders) {
  Random random(13);
  for (Size5 const& shape : {Size5{{2, 64, 4, 8, 16}}, Size5{{1, 72, 3, 5, 8}}, Size5{{3, 8, 1, 1, 8}},
                             Size5{{1, 200, 9, 9, 16}}, Size5{{2, 16, 30, 31, 8}}}) {
    for (int trial = 0; trial < 6 && !HasFailure(); ++trial) {
      run(random, shape, Layout::kNcdhw, Layout::kNcdhw, trial == 0 ? CONVT3D_ACT_NONE : CONVT3D_ACT_X_HARDSWISH,
          trial % 2 == 0);
    }
  }
  EXPECT_GE(turned_cases, 5);
}

TEST_P(Backward, ManySegmentsAndBlocks) {
  Random random(12);
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    run(random, {{2, 16, 20, 21, 23}}, layout, layout, CONVT3D_ACT_X_HARDSWISH, true);
    run(random, {{1, 3, 30, 31, 33}}, layout, layout, CONVT3D_ACT_GELU, false);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Types, Backward, testing::Values(CONVT3D_F32, CONVT3D_F16, CONVT3D_BF16), [](auto const& info) {
      return std::string(info.param == CONVT3D_F32 ? "fp32" : info.param == CONVT3D_F16 ? "fp16" : "bf16");
    });

}  // namespace
}  // namespace convt3d
