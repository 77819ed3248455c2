// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "cases.hpp"
#include "convt3d/convt3d.h"

namespace convt3d {
namespace {

using test::Layout;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

Problem valid_problem() {
  Problem p = test::cubic_problem(2, 8, 12, 5, 3, 2, 1, 1);
  p.has_bias = p.has_add = 1;
  return p;
}

// Each line spoils one thing. The message must name the argument and show its value.
struct BadCase {
  char const* name;
  void (*spoil)(Problem& p);
  char const* fragments[2];
};

void PrintTo(BadCase const& bad, std::ostream* out) { *out << bad.name; }

BadCase const kBadCases[] = {
    {"negative_batch", [](Problem& p) { p.batch = -1; }, {"batch", "-1"}},
    {"no_in_channels", [](Problem& p) { p.in_channels = 0; }, {"in_channels", "0"}},
    {"no_out_channels", [](Problem& p) { p.out_channels = 0; }, {"out_channels", "0"}},
    {"zero_groups", [](Problem& p) { p.groups = 0; }, {"groups", "0"}},
    {"negative_groups", [](Problem& p) { p.groups = -4; }, {"groups", "-4"}},
    {"extreme_groups", [](Problem& p) { p.groups = kHuge; }, {"groups must divide in_channels", "9223372036854775807"}},
    {"groups_in", [](Problem& p) { p.groups = 3; }, {"groups must divide in_channels", "3 does not divide 8"}},
    {"groups_out", [](Problem& p) { p.groups = 8; }, {"groups must divide out_channels", "8 does not divide 12"}},
    {"empty_input", [](Problem& p) { p.in_size[0] = 0; }, {"in_size", "(0, 5, 5)"}},
    {"no_kernel", [](Problem& p) { p.kernel[1] = 0; }, {"kernel", "(3, 0, 3)"}},
    {"no_stride", [](Problem& p) { p.stride[2] = 0; }, {"stride", "(2, 2, 0)"}},
    {"negative_stride", [](Problem& p) { p.stride[0] = -2; }, {"stride", "(-2, 2, 2)"}},
    {"negative_padding", [](Problem& p) { p.padding[0] = -1; }, {"padding", "(-1, 1, 1)"}},
    {"negative_output_padding", [](Problem& p) { p.output_padding[2] = -1; }, {"output_padding", "(1, 1, -1)"}},
    {"no_dilation", [](Problem& p) { p.dilation[1] = 0; }, {"dilation", "(1, 0, 1)"}},
    {"output_padding_equals_stride",
     [](Problem& p) { p.output_padding[1] = 2; },
     {"output_padding", "along H it is 2"}},
    {"output_padding_is_per_dimension",
     [](Problem& p) { p.stride[2] = 1; },
     {"output_padding", "along W it is 1 with stride 1 and dilation 1"}},
    {"negative_output", [](Problem& p) { p.padding[2] = 9; }, {"output size along W is negative (-6)", "padding 9"}},
    {"kernel_overflow",
     [](Problem& p) {
       p.kernel[0] = kHuge;
       p.dilation[0] = 3;
     },
     {"output size along D overflows", "kernel 9223372036854775807"}},
    {"dilation_overflow", [](Problem& p) { p.dilation[1] = kHuge; }, {"output size along H overflows", "dilation"}},
    {"stride_overflow", [](Problem& p) { p.stride[1] = kHuge; }, {"output size along H overflows", "stride"}},
    {"padding_overflow", [](Problem& p) { p.padding[1] = kHuge; }, {"output size along H overflows", "padding"}},
    {"in_size_overflow", [](Problem& p) { p.in_size[1] = kHuge; }, {"output size along H overflows", "in_size"}},
    {"dtype", [](Problem& p) { p.dtype = 3; }, {"dtype must be in 0..2", "3"}},
    {"negative_dtype", [](Problem& p) { p.dtype = -1; }, {"dtype", "-1"}},
    {"precision", [](Problem& p) { p.precision = 2; }, {"precision must be in 0..1", "2"}},
    {"activation", [](Problem& p) { p.activation = CONVT3D_ACT_COUNT; }, {"activation must be in 0..10", "11"}},
    {"add_order", [](Problem& p) { p.add_order = 2; }, {"add_order", "2"}},
    {"has_bias", [](Problem& p) { p.has_bias = 7; }, {"has_bias", "7"}},
    {"has_add", [](Problem& p) { p.has_add = -1; }, {"has_add", "-1"}},
    {"negative_x_stride", [](Problem& p) { p.x_stride[3] = -5; }, {"x_stride", "-5 along H"}},
    {"negative_weight_stride", [](Problem& p) { p.weight_stride[1] = -1; }, {"weight_stride", "-1 along Cout"}},
    {"weight_broadcast", [](Problem& p) { p.weight_stride[0] = 0; }, {"weight_stride", "0 along Cin"}},
    {"negative_bias_stride", [](Problem& p) { p.bias_stride = -1; }, {"bias_stride", "-1"}},
    {"bias_overflow", [](Problem& p) { p.bias_stride = kHuge; }, {"bias_stride", "9223372036854775807"}},
    {"negative_add_stride", [](Problem& p) { p.add_stride[4] = -1; }, {"add_stride", "-1 along W"}},
    {"y_broadcast", [](Problem& p) { p.y_stride[0] = 0; }, {"y_stride", "0 along N"}},
    {"y_overlaps_itself", [](Problem& p) { p.y_stride[1] = 3; }, {"y_stride", "two elements one address"}},
    {"x_offset_overflow", [](Problem& p) { p.x_stride[0] = kHuge; }, {"x of size (2, 8, 5, 5, 5)", "64-bit"}},
    {"x_bytes_overflow", [](Problem& p) { p.x_stride[0] = kHuge / 2; }, {"x of size", "64-bit"}},
    {"y_offset_overflow", [](Problem& p) { p.y_stride[2] = kHuge; }, {"y of size", "64-bit"}},
    {"add_offset_overflow", [](Problem& p) { p.add_stride[2] = kHuge; }, {"add of size", "64-bit"}},
    {"weight_offset_overflow", [](Problem& p) { p.weight_stride[2] = kHuge; }, {"weight of size", "64-bit"}},
    {"count_overflow",
     [](Problem& p) {
       p.batch = int64_t{1} << 62;
       for (int64_t& stride : p.x_stride) stride = 0;
     },
     {"x of size (4611686018427387904", "64-bit"}},
    {"no_x_alignment", [](Problem& p) { p.x_alignment = 0; }, {"x_alignment", "is 0"}},
    {"odd_y_alignment", [](Problem& p) { p.y_alignment = 12; }, {"y_alignment", "is 12"}},
    {"large_add_alignment", [](Problem& p) { p.add_alignment = 32; }, {"add_alignment", "is 32"}},
    {"alignment_below_element", [](Problem& p) { p.x_alignment = 2; }, {"x_alignment", "is 2"}},
};

class RefusedDescription : public testing::TestWithParam<BadCase> {};

TEST_P(RefusedDescription, NamesTheArgumentAndItsValue) {
  Problem p = valid_problem();
  GetParam().spoil(p);
  char message[512] = "";
  ASSERT_EQ(convt3d_validate(&p, message, sizeof message), CONVT3D_INVALID_ARGUMENT);
  for (char const* fragment : GetParam().fragments) {
    EXPECT_NE(std::string(message).find(fragment), std::string::npos) << message << "\nlacks: " << fragment;
  }
  EXPECT_EQ(std::string(message).find('\n'), std::string::npos) << "one line";
  // No message is asked for: the same status, and nothing is touched.
  EXPECT_EQ(convt3d_validate(&p, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
}

INSTANTIATE_TEST_SUITE_P(Table, RefusedDescription, testing::ValuesIn(kBadCases),
                         [](auto const& info) { return std::string(info.param.name); });

void expect_valid(Problem const& p) {
  char message[512] = "";
  EXPECT_EQ(convt3d_validate(&p, message, sizeof message), CONVT3D_OK) << message << "\n" << test::describe(p);
}

TEST(Validate, AcceptsRandomProblems) {
  test::Random random(11);
  test::CaseLimits limits;
  limits.groups = true;
  for (int trial = 0; trial < 2000; ++trial) expect_valid(test::random_problem(random, limits));
}

TEST(Validate, AcceptsEmptyBatchAndEmptyOutput) {
  Problem p = valid_problem();
  p.batch = 0;
  expect_valid(p);
  p = test::cubic_problem(1, 2, 2, 1, 1, 1, 0, 0);
  p.kernel[0] = 2;
  p.padding[0] = 1;  // (1 - 1) * 1 - 2 + 1 + 0 + 1 = 0
  test::pack(p, Layout::kNcdhw);
  ASSERT_EQ(output_size(p, 0), 0);
  expect_valid(p);
}

TEST(Validate, AcceptsOutputPaddingBelowDilation) {
  Problem p = test::cubic_problem(1, 2, 2, 3, 3, 1, 0, 0);
  for (int axis = 0; axis < 3; ++axis) {
    p.dilation[axis] = 3;
    p.output_padding[axis] = 2;
  }
  test::pack(p, Layout::kNdhwc);
  expect_valid(p);
}

TEST(Validate, AcceptsBroadcastInputsAndChannelSlices) {
  Problem p = valid_problem();
  for (int axis = 0; axis < 5; ++axis) p.x_stride[axis] = p.add_stride[axis] = 0;
  p.bias_stride = 0;
  expect_valid(p);
  // y is 12 channels out of 20, in either layout.
  for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
    Problem wide = valid_problem();
    wide.out_channels = 20;
    test::pack(wide, layout);
    std::copy(wide.y_stride, wide.y_stride + 5, p.y_stride);
    expect_valid(p);
  }
}

TEST(Validate, IgnoresWhatIsNotThere) {
  Problem p = valid_problem();
  p.has_bias = p.has_add = 0;
  p.add_alignment = 0;
  p.add_stride[0] = -3;
  p.bias_stride = -3;
  expect_valid(p);
}

TEST(Validate, IgnoresStridesOfSingletonDimensions) {
  Problem p = valid_problem();
  p.batch = 1;
  p.x_stride[0] = p.y_stride[0] = 0;
  expect_valid(p);
  p.x_stride[0] = p.y_stride[0] = kHuge;
  expect_valid(p);
}

TEST(Validate, AcceptsAnyNegativeSlope) {
  Problem p = valid_problem();
  for (float slope : {-2.0f, 0.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    p.negative_slope = slope;
    expect_valid(p);
  }
}

TEST(Validate, AcceptsTensorsBeyond32Bits) {
  Problem p = test::reference_problem(int64_t{1} << 20);
  ASSERT_GT(element_count(y_shape(p)), int64_t{1} << 40);
  expect_valid(p);
}

TEST(Validate, MessageIsCutToItsCapacity) {
  Problem p = valid_problem();
  p.groups = 0;
  char message[8] = {'x', 'x', 'x', 'x', 'x', 'x', 'x', 'x'};
  EXPECT_EQ(convt3d_validate(&p, message, 4), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(message, "gro");
  EXPECT_EQ(message[4], 'x') << "wrote past the capacity";
  EXPECT_EQ(convt3d_validate(&p, message, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(message, "gro");
}

// ---- problem.hpp --------------------------------------------------------------------------------------------------

TEST(OutputSize, FollowsTheFormula) {
  Problem const reference = test::reference_problem(128);
  int64_t out[3] = {};
  ASSERT_EQ(convt3d_output_size(&reference, out, nullptr, 0), CONVT3D_OK);
  EXPECT_EQ(out[0], 32);
  EXPECT_EQ(out[1], 32);
  EXPECT_EQ(out[2], 32);

  test::Random random(5);
  for (int trial = 0; trial < 500; ++trial) {
    Problem const p = test::random_problem(random);
    ASSERT_EQ(convt3d_output_size(&p, out, nullptr, 0), CONVT3D_OK);
    for (int axis = 0; axis < 3; ++axis) {
      EXPECT_EQ(out[axis], (p.in_size[axis] - 1) * p.stride[axis] - 2 * p.padding[axis] +
                               p.dilation[axis] * (p.kernel[axis] - 1) + p.output_padding[axis] + 1);
    }
  }
}

TEST(OutputSize, NeedsNoChannelsOrStrides) {
  Problem p{};
  for (int axis = 0; axis < 3; ++axis) p.in_size[axis] = p.kernel[axis] = p.stride[axis] = p.dilation[axis] = 2;
  int64_t out[3] = {};
  EXPECT_EQ(convt3d_output_size(&p, out, nullptr, 0), CONVT3D_OK);
  EXPECT_EQ(out[0], 5);
}

TEST(OutputSize, WritesNothingOnFailure) {
  Problem p = valid_problem();
  p.kernel[2] = 0;
  int64_t out[3] = {-7, -7, -7};
  EXPECT_EQ(convt3d_output_size(&p, out, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(out[0], -7);
}

TEST(ProblemLayout, IsReadFromTheStrides) {
  Problem p = test::cubic_problem(2, 8, 12, 5, 3, 2, 1, 1, Layout::kNdhwc);
  EXPECT_TRUE(is_ndhwc(x_shape(p), p.x_stride));
  EXPECT_FALSE(is_ncdhw(x_shape(p), p.x_stride));
  EXPECT_TRUE(has_unit_channel_stride(x_shape(p), p.x_stride));
  test::pack(p, Layout::kNcdhw);
  EXPECT_TRUE(is_ncdhw(x_shape(p), p.x_stride));
  EXPECT_FALSE(is_ndhwc(x_shape(p), p.x_stride));
  EXPECT_FALSE(has_unit_channel_stride(x_shape(p), p.x_stride));
  // One channel: both layouts at once, whatever the channel stride says.
  p.in_channels = 1;
  test::pack(p, Layout::kNcdhw);
  p.x_stride[1] = 12345;
  EXPECT_TRUE(is_ncdhw(x_shape(p), p.x_stride) && is_ndhwc(x_shape(p), p.x_stride));
  EXPECT_TRUE(has_unit_channel_stride(x_shape(p), p.x_stride));
}

TEST(ProblemLayout, EffectiveAddStrideIsZeroWhereItBroadcasts) {
  Problem p = valid_problem();
  p.batch = 1;
  p.add_stride[0] = 999;
  p.add_stride[3] = 0;
  Size5 const stride = effective_add_stride(p);
  EXPECT_EQ(stride[0], 0);
  EXPECT_EQ(stride[1], p.add_stride[1]);
  EXPECT_EQ(stride[3], 0);
  p.has_add = 0;
  EXPECT_EQ(effective_add_stride(p)[1], 0);
}

TEST(ProblemLayout, AccessBytes) {
  Problem p = test::cubic_problem(2, 8, 12, 5, 3, 2, 1, 1, Layout::kNdhwc);
  EXPECT_EQ(access_bytes(x_shape(p), p.x_stride, 1, 16, 4), 16);
  EXPECT_EQ(access_bytes(x_shape(p), p.x_stride, 1, 8, 4), 8) << "the base address limits it";
  EXPECT_EQ(access_bytes(x_shape(p), p.x_stride, 4, 16, 4), 4) << "no unit stride along W";
  EXPECT_EQ(access_bytes(y_shape(p), p.y_stride, 1, 16, 2), 8) << "12 channels of 2 bytes";
  p.x_stride[4] = 9;
  EXPECT_EQ(access_bytes(x_shape(p), p.x_stride, 1, 16, 4), 4) << "another stride limits it";
}

}  // namespace
}  // namespace convt3d
