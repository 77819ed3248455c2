// SPDX-License-Identifier: Apache-2.0
//
// The C interface and the dispatch behind it. Needs no GPU: the choice of a kernel and the checks around a launch
// are tested with families that only record that they were called.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "cases.hpp"
#include "convt3d/activation.hpp"
#include "convt3d/convt3d.h"
#include "convt3d/convt3d_launch.h"
#include "dispatch.hpp"
#include "groups.hpp"

namespace convt3d {
namespace {

constexpr convt3d_device kHopper{90, 132};
constexpr convt3d_device kAmpere{80, 108};

// ---- two made-up families: the first wants compute capability 90, the second takes anything -------------------------

int runs_of_sm80 = 0;

Family const kFakeSm90{CONVT3D_KERNEL_SM90,
                       [](Problem const&, convt3d_device const& device, Message& message) {
                         if (device.compute_capability == 90) return CONVT3D_OK;
                         return message.fail(CONVT3D_NOT_SUPPORTED, "sm90: needs compute capability 90, not %d",
                                             static_cast<int>(device.compute_capability));
                       },
                       [](Problem const&, convt3d_device const&) -> size_t { return 0; },
                       [](Problem const&, convt3d_plan const&, convt3d_tensors const&, void*, Message& message) {
                         return message.fail(CONVT3D_CUDA_ERROR, "launch failed");
                       }};

Family const kFakeSm80{
    CONVT3D_KERNEL_SM80,
    [](Problem const& p, convt3d_device const&, Message& message) {
      if (p.groups != 1) return message.fail(CONVT3D_NOT_SUPPORTED, "sm80: groups is %d", static_cast<int>(p.groups));
      if (p.dilation[0] == 1) return CONVT3D_OK;
      return message.fail(CONVT3D_NOT_SUPPORTED, "sm80: dilation is %d", static_cast<int>(p.dilation[0]));
    },
    [](Problem const& p, convt3d_device const&) -> size_t { return static_cast<size_t>(64 * p.batch); },
    [](Problem const&, convt3d_plan const&, convt3d_tensors const&, void*, Message&) {
      ++runs_of_sm80;
      return CONVT3D_OK;
    }};

Family const* const kFakeFamilies[] = {&kFakeSm90, &kFakeSm80};
constexpr FamilyList kFakes{kFakeFamilies, 2};

// A form of the second for one sample.
int runs_of_small = 0;

Family const kFakeSmall{CONVT3D_KERNEL_SM80,
                        [](Problem const& p, convt3d_device const&, Message& message) {
                          return p.batch == 1 ? CONVT3D_OK : message.fail(CONVT3D_NOT_SUPPORTED, "not small");
                        },
                        [](Problem const&, convt3d_device const&) -> size_t { return 0; },
                        [](Problem const&, convt3d_plan const&, convt3d_tensors const&, void*, Message&) {
                          ++runs_of_small;
                          return CONVT3D_OK;
                        }};
constexpr FamilyList kFakesWithSmall{kFakeFamilies, 2, &kFakeSmall};

class Dispatch : public testing::Test {
 protected:
  Dispatch() {
    std::memset(buffer, 0, sizeof buffer);
    problem.has_bias = problem.has_add = 1;
    tensors = {buffer, buffer + 64, buffer + 128, buffer + 192, buffer + 256, buffer + 320, 128};
  }

  Status run(int32_t kernel, convt3d_device device = kHopper) {
    convt3d_plan const plan{kernel, 0, 128};
    Message message(text, sizeof text);
    return forward(kFakes, problem, plan, tensors, device, nullptr, message);
  }

  void expect_refused(Status status, char const* fragment) {
    int const before = runs_of_sm80;
    EXPECT_EQ(run(CONVT3D_KERNEL_SM80), status);
    EXPECT_NE(std::string(text).find(fragment), std::string::npos) << text;
    EXPECT_EQ(runs_of_sm80, before) << "launched in spite of an error";
  }

  Problem problem = test::cubic_problem(2, 8, 8, 4, 3, 2, 1, 1);
  alignas(64) char buffer[512];
  convt3d_tensors tensors;
  convt3d_plan plan{};
  char text[512] = "";
};

TEST_F(Dispatch, AutoTakesTheFirstThatSupportsTheProblem) {
  Message message(text, sizeof text);
  ASSERT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_AUTO, kHopper, &plan, message), CONVT3D_OK);
  EXPECT_EQ(plan.kernel, CONVT3D_KERNEL_SM90);
  EXPECT_EQ(plan.workspace_bytes, 0u);
  ASSERT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_AUTO, kAmpere, &plan, message), CONVT3D_OK);
  EXPECT_EQ(plan.kernel, CONVT3D_KERNEL_SM80);
  EXPECT_EQ(plan.workspace_bytes, 128u);
  EXPECT_STREQ(text, "");
}

TEST_F(Dispatch, AForcedKernelIsTakenOrRefused) {
  Message message(text, sizeof text);
  ASSERT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_SM80, kHopper, &plan, message), CONVT3D_OK);
  EXPECT_EQ(plan.kernel, CONVT3D_KERNEL_SM80);
  plan = {-1, -1, 99};
  EXPECT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_SM90, kAmpere, &plan, message), CONVT3D_NOT_SUPPORTED);
  EXPECT_STREQ(text, "sm90: needs compute capability 90, not 80");
  EXPECT_EQ(plan.workspace_bytes, 99u) << "a failed call writes no plan";
}

TEST_F(Dispatch, EveryFamilysReasonIsGiven) {
  problem.dilation[0] = 2;
  Message message(text, sizeof text);
  EXPECT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_AUTO, kAmpere, &plan, message), CONVT3D_NOT_SUPPORTED);
  EXPECT_STREQ(text, "sm90: needs compute capability 90, not 80; sm80: dilation is 2");
}

TEST_F(Dispatch, GroupsThatAFamilyDoesNotTakeRunOneAfterTheOther) {
  Message message(text, sizeof text);
  problem.in_channels = problem.out_channels = 12;
  problem.groups = 3;
  test::pack(problem, test::Layout::kNcdhw);
  ASSERT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_SM80, kHopper, &plan, message), CONVT3D_OK);
  runs_of_sm80 = 0;
  EXPECT_EQ(forward(kFakes, problem, plan, tensors, kHopper, nullptr, message), CONVT3D_OK) << text;
  EXPECT_EQ(runs_of_sm80, 3);
  problem.batch = 0;  // the strides of an empty tensor may be anything
  problem.x_stride[1] = problem.y_stride[1] = INT64_MAX / 2;
  EXPECT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_SM80, kHopper, &plan, message), CONVT3D_NOT_SUPPORTED);
  problem.batch = 2;
  problem.in_channels = problem.out_channels = problem.groups = kMaxGroupRuns + 1;
  test::pack(problem, test::Layout::kNcdhw);
  EXPECT_EQ(make_plan(kFakes, problem, CONVT3D_KERNEL_SM80, kHopper, &plan, message), CONVT3D_NOT_SUPPORTED);
}

TEST_F(Dispatch, ALibraryWithoutKernelsSaysSo) {
  Message message(text, sizeof text);
  EXPECT_EQ(make_plan({nullptr, 0}, problem, CONVT3D_KERNEL_AUTO, kHopper, &plan, message), CONVT3D_NOT_SUPPORTED);
  EXPECT_STREQ(text, "no kernel is compiled into this library");
  EXPECT_EQ(supported({kFakeFamilies, 1}, problem, CONVT3D_KERNEL_SM80, kHopper, message), CONVT3D_NOT_SUPPORTED);
  EXPECT_STREQ(text, "kernel sm80 is not compiled into this library");
}

TEST_F(Dispatch, KernelAndDeviceMustMakeSense) {
  Message message(text, sizeof text);
  for (int32_t kernel : {-1, 0, 3}) {
    EXPECT_EQ(supported(kFakes, problem, kernel, kHopper, message), CONVT3D_INVALID_ARGUMENT);
    EXPECT_NE(std::string(text).find("kernel must name one kernel"), std::string::npos) << text;
  }
  EXPECT_EQ(make_plan(kFakes, problem, 9, kHopper, &plan, message), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(make_plan(kFakes, problem, 0, {0, 132}, &plan, message), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(supported(kFakes, problem, CONVT3D_KERNEL_SM80, {90, 0}, message), CONVT3D_INVALID_ARGUMENT);
  EXPECT_NE(std::string(text).find("multiprocessors"), std::string::npos) << text;
}

TEST_F(Dispatch, RunsTheKernelOfThePlan) {
  int const before = runs_of_sm80;
  EXPECT_EQ(run(CONVT3D_KERNEL_SM80), CONVT3D_OK) << text;
  EXPECT_EQ(runs_of_sm80, before + 1);
  EXPECT_EQ(run(CONVT3D_KERNEL_SM90), CONVT3D_CUDA_ERROR);
  EXPECT_STREQ(text, "launch failed");
}

TEST_F(Dispatch, LaunchesWhatWasPlanned) {
  Message message(text, sizeof text);
  auto const launch_plan = [&] { return launch(kFakesWithSmall, problem, plan, tensors, kAmpere, nullptr, message); };
  ASSERT_EQ(make_plan(kFakesWithSmall, problem, CONVT3D_KERNEL_AUTO, kAmpere, &plan, message), CONVT3D_OK);
  int const before = runs_of_sm80, small_before = runs_of_small;
  EXPECT_EQ(launch_plan(), CONVT3D_OK) << text;
  EXPECT_EQ(runs_of_sm80, before + 1);
  tensors.workspace_bytes = 127;
  EXPECT_EQ(launch_plan(), CONVT3D_WORKSPACE_TOO_SMALL);
  tensors.workspace_bytes = 128;
  char* const x = buffer;
  tensors.x = nullptr;
  EXPECT_EQ(launch_plan(), CONVT3D_INVALID_ARGUMENT);
  tensors.x = x;
  EXPECT_EQ(runs_of_sm80, before + 1) << "launched in spite of an error";

  problem.batch = 1;
  ASSERT_EQ(make_plan(kFakesWithSmall, problem, CONVT3D_KERNEL_AUTO, kAmpere, &plan, message), CONVT3D_OK);
  EXPECT_EQ(launch_plan(), CONVT3D_OK) << text;
  EXPECT_EQ(runs_of_small, small_before + 1);
  EXPECT_EQ(runs_of_sm80, before + 1);
  runs_of_small = small_before;
}

TEST_F(Dispatch, RefusesAPlanForAnotherDeviceOrProblem) {
  EXPECT_EQ(run(CONVT3D_KERNEL_SM90, kAmpere), CONVT3D_NOT_SUPPORTED);
  EXPECT_EQ(run(CONVT3D_KERNEL_AUTO), CONVT3D_INVALID_ARGUMENT);
  problem.batch = 3;  // needs 192 bytes; the plan and the workspace have 128
  expect_refused(CONVT3D_WORKSPACE_TOO_SMALL, "128, but 192 are needed");
}

TEST_F(Dispatch, ChecksTheWorkspace) {
  tensors.workspace_bytes = 127;
  expect_refused(CONVT3D_WORKSPACE_TOO_SMALL, "workspace_bytes is 127, but 128 are needed");
  tensors.workspace_bytes = 128;
  tensors.workspace = nullptr;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "workspace is a null pointer");
  tensors.workspace = buffer + 328;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "not aligned to 16 bytes");
}

TEST_F(Dispatch, ChecksThePointers) {
  convt3d_tensors const good = tensors;
  tensors.x = nullptr;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "x is a null pointer");
  tensors = good, tensors.weight = nullptr;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "weight is a null pointer");
  tensors = good, tensors.bias = nullptr;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "bias is a null pointer");
  tensors = good, tensors.add = nullptr;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "add is a null pointer");
  tensors = good, tensors.y = nullptr;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "y is a null pointer");
  tensors = good, tensors.x = buffer + 8;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "is not aligned to 16 bytes");
  tensors = good, tensors.weight = buffer + 66;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "is not aligned to 4 bytes");
  tensors = good, tensors.y = buffer;
  expect_refused(CONVT3D_INVALID_ARGUMENT, "y starts at the address of an input");
  // Without bias and add their pointers do not matter.
  tensors = good, tensors.bias = tensors.add = nullptr;
  problem.has_bias = problem.has_add = 0;
  EXPECT_EQ(run(CONVT3D_KERNEL_SM80), CONVT3D_OK) << text;
}

TEST_F(Dispatch, AutoAloneTakesTheSmallForm) {
  Message message(text, sizeof text);
  auto const plan_for = [&](int64_t batch, int32_t kernel) {
    problem.batch = batch;
    plan = {};
    return make_plan(kFakesWithSmall, problem, kernel, kHopper, &plan, message);
  };
  ASSERT_EQ(plan_for(1, CONVT3D_KERNEL_AUTO), CONVT3D_OK);
  EXPECT_EQ(plan.kernel, CONVT3D_KERNEL_SM80);
  EXPECT_EQ(plan.reserved, kSmallForm);
  EXPECT_EQ(plan.workspace_bytes, 0u);
  ASSERT_EQ(plan_for(1, CONVT3D_KERNEL_SM80), CONVT3D_OK);
  EXPECT_EQ(plan.reserved, 0);
  ASSERT_EQ(plan_for(2, CONVT3D_KERNEL_AUTO), CONVT3D_OK);
  EXPECT_EQ(plan.kernel, CONVT3D_KERNEL_SM90);
  EXPECT_EQ(plan.reserved, 0);
  problem.dilation[0] = 2;  // which the family itself does not take
  ASSERT_EQ(plan_for(1, CONVT3D_KERNEL_AUTO), CONVT3D_OK);
  EXPECT_EQ(plan.kernel, CONVT3D_KERNEL_SM90);
  EXPECT_EQ(make_plan(kFakesWithSmall, problem, CONVT3D_KERNEL_AUTO, kAmpere, &plan, message), CONVT3D_NOT_SUPPORTED);
}

TEST_F(Dispatch, RunsTheSmallFormOfItsPlanAlone) {
  Message message(text, sizeof text);
  problem.batch = 1;
  tensors.workspace = nullptr;
  tensors.workspace_bytes = 0;
  auto const run_form = [&](FamilyList families, int32_t kernel, int32_t form) {
    return forward(families, problem, {kernel, form, 0}, tensors, kHopper, nullptr, message);
  };
  EXPECT_EQ(run_form(kFakesWithSmall, CONVT3D_KERNEL_SM80, kSmallForm), CONVT3D_OK) << text;
  EXPECT_EQ(runs_of_small, 1);
  EXPECT_EQ(run_form(kFakesWithSmall, CONVT3D_KERNEL_SM80, 0), CONVT3D_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(run_form(kFakesWithSmall, CONVT3D_KERNEL_SM80, 2), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(run_form(kFakesWithSmall, CONVT3D_KERNEL_SM90, kSmallForm), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(run_form(kFakes, CONVT3D_KERNEL_SM80, kSmallForm), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "kernel sm80 has no form 1 for this problem");
  problem.batch = 2;
  EXPECT_EQ(run_form(kFakesWithSmall, CONVT3D_KERNEL_SM80, kSmallForm), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(runs_of_small, 1);
}

// ---- the exported functions --------------------------------------------------------------------------------------

TEST(Api, Version) {
  int major = -1, minor = -1, patch = -1;
  EXPECT_EQ(std::sscanf(convt3d_version(), "%d.%d.%d", &major, &minor, &patch), 3) << convt3d_version();
  EXPECT_GE(major, 0);
}

TEST(Api, Names) {
  EXPECT_STREQ(convt3d_kernel_name(CONVT3D_KERNEL_AUTO), "auto");
  EXPECT_STREQ(convt3d_kernel_name(CONVT3D_KERNEL_SM80), "sm80");
  EXPECT_STREQ(convt3d_kernel_name(CONVT3D_KERNEL_SM90), "sm90");
  EXPECT_EQ(convt3d_kernel_name(-1), nullptr);
  EXPECT_EQ(convt3d_kernel_name(3), nullptr);
  for (int code = 0; code < CONVT3D_ACT_COUNT; ++code) {
    EXPECT_STREQ(convt3d_activation_name(code), activation_name(code));
  }
  EXPECT_EQ(convt3d_activation_name(CONVT3D_ACT_COUNT), nullptr);
}

TEST(Api, NullArgumentsAreErrors) {
  Problem const problem = test::reference_problem(1);
  convt3d_plan plan{};
  convt3d_tensors const tensors{};
  char text[128] = "";
  EXPECT_EQ(convt3d_validate(nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "problem is null");
  EXPECT_EQ(convt3d_output_size(&problem, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "out_size is null");
  EXPECT_EQ(convt3d_supported(&problem, CONVT3D_KERNEL_SM80, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "device is null");
  EXPECT_EQ(convt3d_make_plan(&problem, CONVT3D_KERNEL_AUTO, &kHopper, nullptr, text, sizeof text),
            CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "plan is null");
  EXPECT_EQ(convt3d_forward(&problem, nullptr, &tensors, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "plan is null");
  EXPECT_EQ(convt3d_forward(&problem, &plan, nullptr, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "tensors is null");
  EXPECT_EQ(convt3d_launch(&problem, &plan, nullptr, &tensors, nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
  EXPECT_STREQ(text, "device is null");
  EXPECT_EQ(convt3d_current_device(nullptr, text, sizeof text), CONVT3D_INVALID_ARGUMENT);
}

TEST(Api, EveryFunctionValidates) {
  Problem problem = test::reference_problem(1);
  problem.output_padding[0] = 2;
  convt3d_plan plan{};
  convt3d_tensors const tensors{};
  int64_t out[3];
  EXPECT_EQ(convt3d_output_size(&problem, out, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(convt3d_supported(&problem, CONVT3D_KERNEL_SM80, &kHopper, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(convt3d_make_plan(&problem, CONVT3D_KERNEL_AUTO, &kHopper, &plan, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
  EXPECT_EQ(convt3d_forward(&problem, &plan, &tensors, nullptr, nullptr, 0), CONVT3D_INVALID_ARGUMENT);
}

TEST(Api, AnEmptyOutputNeedsNoDeviceAndNoPointers) {
  Problem const problem = test::reference_problem(0);
  convt3d_plan const plan{CONVT3D_KERNEL_SM80, 0, 0};
  convt3d_tensors const tensors{};
  char text[128] = "";
  EXPECT_EQ(convt3d_forward(&problem, &plan, &tensors, nullptr, text, sizeof text), CONVT3D_OK) << text;
  convt3d_device const device = kHopper;
  EXPECT_EQ(convt3d_launch(&problem, &plan, &device, &tensors, nullptr, text, sizeof text), CONVT3D_OK) << text;
}

TEST(Api, CurrentDeviceIsThereOrTheReasonIs) {
  convt3d_device device{};
  char text[256] = "";
  Status const status = convt3d_current_device(&device, text, sizeof text);
  if (status == CONVT3D_OK) {
    EXPECT_GE(device.compute_capability, 50);
    EXPECT_GT(device.multiprocessors, 0);
  } else {
    EXPECT_EQ(status, CONVT3D_NOT_SUPPORTED);
    EXPECT_STRNE(text, "");
  }
}

// What is compiled in, asked about devices that need not be there: an answer, and a reason with every no.
TEST(Api, SupportedAndPlanAgree) {
  test::Random random(17);
  test::CaseLimits limits;
  limits.groups = true;
  for (int trial = 0; trial < 300; ++trial) {
    Problem problem = test::random_problem(random, limits);
    problem.dtype = static_cast<int32_t>(random.integer(0, 2));
    problem.precision = static_cast<int32_t>(random.integer(0, 1));
    if (trial % 10 == 0) problem.batch = 0;  // an empty output is a problem like any other
    for (convt3d_device const& device : {kAmpere, kHopper, convt3d_device{70, 80}}) {
      int supported_count = 0;
      for (convt3d_kernel kernel : {CONVT3D_KERNEL_SM80, CONVT3D_KERNEL_SM90}) {
        char text[256] = "";
        convt3d_plan plan{};
        Status const status = convt3d_supported(&problem, kernel, &device, text, sizeof text);
        ASSERT_TRUE(status == CONVT3D_OK || status == CONVT3D_NOT_SUPPORTED) << status << " " << text;
        if (status == CONVT3D_NOT_SUPPORTED) {
          ASSERT_STRNE(text, "") << test::describe(problem);
        }
        ASSERT_EQ(convt3d_make_plan(&problem, kernel, &device, &plan, nullptr, 0), status);
        if (status == CONVT3D_OK) {
          ASSERT_EQ(plan.kernel, kernel);
        }
        supported_count += status == CONVT3D_OK;
      }
      convt3d_plan plan{};
      Status const status = convt3d_make_plan(&problem, CONVT3D_KERNEL_AUTO, &device, &plan, nullptr, 0);
      ASSERT_EQ(status == CONVT3D_OK, supported_count > 0);
      if (status == CONVT3D_OK) {
        ASSERT_NE(plan.kernel, CONVT3D_KERNEL_AUTO);
      }
    }
  }
}

// Sizes at and beyond the limits of 32-bit arithmetic: an answer without a trap or an overflow (the sanitizers look).
TEST(Api, ExtremeSizesGetAnAnswer) {
  test::Random random(18);
  int64_t const extremes[] = {1, 2, 3, 31, 1 << 10, 1 << 20, (1 << 20) + 1, INT32_MAX, int64_t(1) << 40, INT64_MAX};
  auto const draw = [&](int64_t limit) { return std::min(extremes[random.integer(0, 9)], limit); };
  int answered = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    Problem problem = test::reference_problem(1);
    problem.batch = random.integer(0, 3) == 0 ? 0 : draw(INT64_MAX);
    if (random.integer(0, 1)) problem.in_channels = draw(INT64_MAX);
    if (random.integer(0, 1)) problem.out_channels = draw(INT64_MAX);
    for (int axis = 0; axis < 3; ++axis) {
      if (random.integer(0, 1)) problem.in_size[axis] = draw(INT64_MAX);
      if (random.integer(0, 3) == 0) problem.kernel[axis] = draw(INT32_MAX);
      if (random.integer(0, 3) == 0) problem.stride[axis] = draw(INT32_MAX);
      if (random.integer(0, 3) == 0) problem.padding[axis] = draw(INT32_MAX);
      if (random.integer(0, 3) == 0) problem.dilation[axis] = draw(INT32_MAX);
    }
    Size3 sizes{};
    if (convt3d_output_size(&problem, sizes.v, nullptr, 0) != CONVT3D_OK) continue;
    for (int64_t* stride : {problem.x_stride, problem.weight_stride, problem.add_stride, problem.y_stride}) {
      for (int axis = 0; axis < 5; ++axis) stride[axis] = draw(int64_t(1) << 40);
    }
    if (convt3d_validate(&problem, nullptr, 0) != CONVT3D_OK) continue;
    convt3d_plan plan{};
    Status const status = convt3d_make_plan(&problem, CONVT3D_KERNEL_AUTO, &kHopper, &plan, nullptr, 0);
    ASSERT_TRUE(status == CONVT3D_OK || status == CONVT3D_NOT_SUPPORTED) << test::describe(problem);
    ++answered;
  }
  EXPECT_GT(answered, 100);  // the draw reaches the families
}

#if CONVT3D_WITH_CUDA
// The iterators of the mainloop keep some distances in 32 bits.
TEST(Launch, OrdinalOfTheCurrentDevice) {
  convt3d_device device;
  char text[256];
  bool const usable = convt3d_current_device(&device, text, sizeof text) == CONVT3D_OK;
  EXPECT_EQ(convt3d_current_ordinal(), usable ? 0 : -1) << text;
}

TEST(Api, ADistanceBeyond32BitsIsRefused) {
  // x where it lies, its neighbours 4096 elements apart; prepared, they would be 32.
  Problem problem = test::cubic_problem(1, 4096, 8, 2, 2, 1, 0, 0, test::Layout::kNdhwc);
  problem.dtype = CONVT3D_F16;
  problem.in_size[0] = problem.kernel[0] = 1;
  problem.dilation[2] = 1048573;
  test::pack(problem, test::Layout::kNdhwc);
  char text[256] = "";
  EXPECT_EQ(convt3d_supported(&problem, CONVT3D_KERNEL_SM80, &kAmpere, text, sizeof text), CONVT3D_NOT_SUPPORTED);
  EXPECT_NE(std::string(text).find("distance"), std::string::npos) << text;
  problem.dilation[2] = 1000;
  EXPECT_EQ(convt3d_supported(&problem, CONVT3D_KERNEL_SM80, &kAmpere, text, sizeof text), CONVT3D_OK) << text;

  Problem wide = test::cubic_problem(1, 32, int64_t{1} << 20, 1, 1, 1, 0, 0);
  wide.in_size[2] = 8;
  wide.kernel[2] = 10;
  test::pack(wide, test::Layout::kNcdhw);
  EXPECT_EQ(convt3d_supported(&wide, CONVT3D_KERNEL_SM80, &kAmpere, text, sizeof text), CONVT3D_NOT_SUPPORTED);
  EXPECT_NE(std::string(text).find("taps"), std::string::npos) << text;
}
#endif

}  // namespace
}  // namespace convt3d
