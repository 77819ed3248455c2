// SPDX-License-Identifier: Apache-2.0
//
// What the torch binding decides for eager calls (python/csrc/eager_rules.hpp) and remembers of them (plans.hpp),
// without torch.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "eager_rules.hpp"
#include "plans.hpp"

namespace convt3d::binding {
namespace {

TEST(EagerRules, SettingsInOrder) {
  int64_t packed[kSettings];
  for (int i = 0; i < kSettings - 1; ++i) packed[i] = 100 + i;
  double const slope = 0.25;
  std::memcpy(&packed[kSettings - 1], &slope, sizeof slope);
  Settings const s = read_settings(packed);
  int64_t const* const triples[] = {s.stride, s.padding, s.output_padding, s.dilation};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(triples[i / 3][i % 3], 100 + i);
  EXPECT_EQ(s.groups, 112);
  EXPECT_EQ(s.activation, 113);
  EXPECT_EQ(s.add_order, 114);
  EXPECT_EQ(s.precision, 115);
  EXPECT_EQ(s.negative_slope, slope);
}

TEST(EagerRules, KernelOfTheEnvironment) {
  EXPECT_EQ(requested_kernel(nullptr), 0);
  EXPECT_EQ(requested_kernel(""), 0);
  EXPECT_EQ(requested_kernel("auto"), 0);
  EXPECT_EQ(requested_kernel("sm80"), 1);
  EXPECT_EQ(requested_kernel("sm90"), 2);
  EXPECT_EQ(requested_kernel("aten"), -1);
  EXPECT_EQ(requested_kernel("SM90"), -1);
}

struct Dense {
  int64_t shape[5];
  int64_t stride[5];
};

bool suggests_channels_last(Dense const& d) { return binding::suggests_channels_last(d.shape, d.stride); }

Dense packed(std::vector<int64_t> const& shape, std::vector<int> const& inner_to_outer) {
  Dense d{};
  int64_t next = 1;
  for (int dim : inner_to_outer) {
    d.shape[dim] = shape[dim];
    d.stride[dim] = next;
    next *= shape[dim];
  }
  return d;
}

std::vector<int> const kContiguous = {4, 3, 2, 1, 0};
std::vector<int> const kChannelsLast = {1, 4, 3, 2, 0};

// The expected values are Tensor.suggest_memory_format's, as python/convt3d/_memory_format.py states and tests it.
TEST(EagerRules, DenseTensorsSuggestTheirFormat) {
  std::vector<int64_t> const shape = {2, 3, 4, 5, 6};
  EXPECT_TRUE(suggests_channels_last(packed(shape, kChannelsLast)));
  EXPECT_FALSE(suggests_channels_last(packed(shape, kContiguous)));
  EXPECT_FALSE(suggests_channels_last(packed(shape, {1, 4, 2, 3, 0})));
}

TEST(EagerRules, AmbiguousTensors) {
  // One channel: dense either way, and channels-last wins as long as N does not tie.
  EXPECT_TRUE(suggests_channels_last(packed({2, 1, 4, 5, 6}, kChannelsLast)));
  EXPECT_FALSE(suggests_channels_last(packed({2, 1, 4, 5, 6}, kContiguous)));
  // (N, C, 1, 1, 1): the same strides but for those of size-1 dimensions.
  EXPECT_FALSE(suggests_channels_last(packed({2, 3, 1, 1, 1}, kContiguous)));
  EXPECT_TRUE(suggests_channels_last(packed({2, 3, 1, 1, 1}, kChannelsLast)));
  // (N, 1, 1, 1, 1) with all strides alike counts as contiguous.
  EXPECT_FALSE(suggests_channels_last(packed({2, 1, 1, 1, 1}, kChannelsLast)));
  EXPECT_FALSE(suggests_channels_last(packed({2, 3, 0, 5, 6}, kChannelsLast)));
  Dense expanded = packed({2, 3, 4, 5, 6}, kChannelsLast);
  expanded.stride[1] = 0;
  EXPECT_FALSE(suggests_channels_last(expanded));
}

TEST(EagerRules, SlicesKeepTheFormat) {
  Dense slice = packed({2, 6, 4, 5, 6}, kChannelsLast);
  slice.shape[1] = 3;
  EXPECT_TRUE(suggests_channels_last(slice));
  Dense batch_of_one = packed({2, 6, 4, 5, 6}, kChannelsLast);
  batch_of_one.shape[0] = 1;
  batch_of_one.stride[0] = 0;  // expanded
  EXPECT_FALSE(suggests_channels_last(batch_of_one));
}

Planned planned(int64_t batch, int64_t kernel, int64_t device, size_t workspace_bytes) {
  Planned p;
  std::memset(static_cast<void*>(&p), 0, sizeof p);
  p.problem.batch = batch;
  p.kernel = kernel;
  p.device_index = device;
  p.plan.workspace_bytes = workspace_bytes;
  return p;
}

TEST(Plans, FoundForTheSameProblemKernelAndDeviceAlone) {
  Plans plans;
  Planned const p = planned(2, 1, 3, 77);
  EXPECT_EQ(plans.find(p.problem, 1, 3), nullptr);
  Planned const* const kept = plans.keep(p);
  EXPECT_EQ(plans.find(p.problem, 1, 3), kept);
  EXPECT_EQ(kept->plan.workspace_bytes, 77u);
  EXPECT_EQ(plans.find(p.problem, 0, 3), nullptr);
  EXPECT_EQ(plans.find(p.problem, 1, 2), nullptr);
}

TEST(Plans, EveryByteOfAProblemCounts) {
  Plans plans;
  Planned const p = planned(2, 1, 3, 77);
  plans.keep(p);
  for (size_t i = 0; i < sizeof p.problem; ++i) {
    convt3d_problem other = p.problem;
    reinterpret_cast<unsigned char*>(&other)[i] ^= 1;
    EXPECT_EQ(plans.find(other, 1, 3), nullptr) << i;
  }
}

TEST(Plans, TheOldestMakesRoom) {
  Plans plans;
  for (int i = 0; i < Plans::kCount + 2; ++i) plans.keep(planned(i, 0, 0, size_t(i)));
  for (int i = 0; i < Plans::kCount + 2; ++i) {
    Planned const* const found = plans.find(planned(i, 0, 0, 0).problem, 0, 0);
    ASSERT_EQ(found != nullptr, i >= 2) << i;
    if (found != nullptr) {
      EXPECT_EQ(found->plan.workspace_bytes, size_t(i));
    }
  }
}

}  // namespace
}  // namespace convt3d::binding
