// SPDX-License-Identifier: Apache-2.0
//
// What the torch binding decides for eager calls (python/csrc/eager_rules.hpp), without torch.
#include <gtest/gtest.h>

#include "eager_rules.hpp"

namespace convt3d::binding {
namespace {

TEST(EagerRules, TriplesUnpackInOrder) {
  EXPECT_EQ(unpack(0x10000100001), (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(unpack(3 | int64_t{5} << 20 | int64_t{7} << 40), (std::vector<int64_t>{3, 5, 7}));
  int64_t const most = (1 << 20) - 1;
  EXPECT_EQ(unpack(most | most << 20 | most << 40), (std::vector<int64_t>{most, most, most}));
}

TEST(EagerRules, Options) {
  int64_t const options = 10 + 256 + 512;
  EXPECT_EQ(activation(options), 10);
  EXPECT_EQ(add_order(options), 1);
  EXPECT_EQ(precision(options), 1);
  EXPECT_EQ(activation(2) + add_order(2) + precision(2), 2);
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

}  // namespace
}  // namespace convt3d::binding
