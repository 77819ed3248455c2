// SPDX-License-Identifier: Apache-2.0
#include "dispatch.hpp"

#include <algorithm>
#include <cinttypes>

#include "checks.hpp"
#include "groups.hpp"

namespace convt3d {
namespace {

constexpr char const* kKernelNames[] = {"auto", "sm80", "sm90"};
constexpr int32_t kKernelCount = sizeof(kKernelNames) / sizeof(kKernelNames[0]);
static_assert(CONVT3D_KERNEL_AUTO == 0 && CONVT3D_KERNEL_SM80 == 1 && CONVT3D_KERNEL_SM90 == 2,
              "kKernelNames follows convt3d_kernel");

Family const* find(FamilyList families, int32_t kernel) {
  for (Family const* family : families) {
    if (family->id == kernel) return family;
  }
  return nullptr;
}

bool takes(Family const& family, Problem const& problem, convt3d_device const& device) {
  Message ignored(nullptr, 0);
  return family.supported(problem, device, ignored) == CONVT3D_OK;
}

/// What a family is asked for, and runs for each group: the problem as it is, if it takes that, or else one group.
Problem part_of(Family const& family, Problem const& problem, convt3d_device const& device) {
  // Nothing is known of the strides of an empty tensor: they cannot be multiplied.
  bool const whole = problem.groups == 1 || problem.groups > kMaxGroupRuns || element_count(y_shape(problem)) == 0 ||
                     takes(family, problem, device);
  return whole ? problem : one_group(problem);
}

bool takes_small_form(FamilyList families, Problem const& problem, convt3d_device const& device) {
  if (families.small == nullptr) return false;
  Family const* const usual = find(families, families.small->id);
  return usual != nullptr && takes(*families.small, problem, device) && takes(*usual, problem, device);
}

Status check_device(convt3d_device const& device, Message& message) {
  if (device.compute_capability > 0 && device.multiprocessors > 0) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT,
                      "device must have a positive compute_capability and multiprocessors, but has %" PRId32
                      " and %" PRId32,
                      device.compute_capability, device.multiprocessors);
}

Status choose_fastest(FamilyList families, Problem const& problem, convt3d_device const& device, Family const** chosen,
                      Message& message) {
  char reasons[512];
  Message all_reasons(reasons, sizeof reasons);
  if (problem.groups > 1) {  // all groups in one launch, where a family has that
    for (Family const* family : families) {
      if (!takes(*family, problem, device)) continue;
      if (family->worthwhile != nullptr && !family->worthwhile(problem, device)) {
        return message.fail(CONVT3D_NOT_SUPPORTED,
                            "%s: ATen computes such groups faster; asked for by name, the kernel takes them",
                            kernel_name(family->id));
      }
      *chosen = family;
      return CONVT3D_OK;
    }
  }
  for (Family const* family : families) {
    char reason[256];
    Message one_reason(reason, sizeof reason);
    Problem const part = part_of(*family, problem, device);
    if (family->supported(part, device, one_reason) == CONVT3D_OK) {
      if (*chosen == nullptr) *chosen = family;
      bool const is_last = family == *(families.end() - 1);
      // For groups one after the other ATen was not measured.
      if (family->worthwhile == nullptr || family->worthwhile(part, device) || (is_last && problem.groups > 1)) {
        *chosen = family;
        return CONVT3D_OK;
      }
      if (is_last) {
        return message.fail(CONVT3D_NOT_SUPPORTED,
                            "ATen computes such long sums faster; asked for by name, a kernel takes them");
      }
    }
    all_reasons.append("%s%s", reasons[0] == '\0' ? "" : "; ", reason);
  }
  if (*chosen != nullptr) return CONVT3D_OK;  // the families after it do not take the problem
  if (families.count == 0) {
    return message.fail(CONVT3D_NOT_SUPPORTED, "no kernel is compiled into this library");
  }
  return message.fail(CONVT3D_NOT_SUPPORTED, "%s", reasons);
}

Status check_tensors(Problem const& p, convt3d_tensors const& t, Message& message) {
  using checks::check_pointer;
  int const element = element_bytes(p);
  Status status = check_pointer("x", t.x, p.x_alignment, message);
  if (status == CONVT3D_OK) status = check_pointer("weight", t.weight, element, message);
  if (status == CONVT3D_OK && p.has_bias) status = check_pointer("bias", t.bias, element, message);
  if (status == CONVT3D_OK && p.has_add) status = check_pointer("add", t.add, p.add_alignment, message);
  if (status == CONVT3D_OK) status = check_pointer("y", t.y, p.y_alignment, message);
  if (status != CONVT3D_OK) return status;
  // Slices of one buffer may interleave without sharing an element, so only the plain mistake is caught here.
  if (t.y == t.x || t.y == t.weight || (p.has_bias && t.y == t.bias) || (p.has_add && t.y == t.add)) {
    return message.fail(CONVT3D_INVALID_ARGUMENT, "y starts at the address of an input; it must not overlap any");
  }
  return CONVT3D_OK;
}

/// What a plan that fits the problem and the device launches.
Status enqueue(FamilyList families, Problem const& problem, convt3d_plan const& plan, convt3d_tensors const& tensors,
               convt3d_device const& device, size_t needed, void* stream, Message& message) {
  if (plan.reserved == kSmallForm) return families.small->run(problem, plan, tensors, stream, message);
  if (tensors.workspace_bytes < needed) {
    return message.fail(CONVT3D_WORKSPACE_TOO_SMALL, "workspace_bytes is %zu, but %zu are needed",
                        tensors.workspace_bytes, needed);
  }
  Status status = CONVT3D_OK;
  if (needed > 0) {
    status = checks::check_pointer("workspace", tensors.workspace, checks::kWorkspaceAlignment, message);
  }
  Family const* family = find(families, plan.kernel);
  Problem const part = part_of(*family, problem, device);
  if (status == CONVT3D_OK && part.groups == problem.groups) {
    return family->run(problem, plan, tensors, stream, message);
  }
  for (int64_t group = 0; group < problem.groups && status == CONVT3D_OK; ++group) {
    status = family->run(part, plan, group_tensors(problem, tensors, group), stream, message);
  }
  return status;
}

}  // namespace

FamilyList compiled_families() {
#if CONVT3D_WITH_CUDA
  static Family const* const families[] = {
#if CONVT3D_WITH_SM90
      sm90_family(),
#endif
      sm80_family(),
  };
  return {families, sizeof(families) / sizeof(families[0]), sm80_small_family()};
#else
  return {nullptr, 0};
#endif
}

char const* kernel_name(int32_t kernel) {
  return kernel >= 0 && kernel < kKernelCount ? kKernelNames[kernel] : nullptr;
}

Status supported(FamilyList families, Problem const& problem, int32_t kernel, convt3d_device const& device,
                 Message& message) {
  if (kernel == CONVT3D_KERNEL_AUTO || kernel_name(kernel) == nullptr) {
    return message.fail(CONVT3D_INVALID_ARGUMENT, "kernel must name one kernel (1..%" PRId32 "), but is %" PRId32,
                        kKernelCount - 1, kernel);
  }
  Status const status = check_device(device, message);
  if (status != CONVT3D_OK) return status;
  Family const* family = find(families, kernel);
  if (family == nullptr) {
    return message.fail(CONVT3D_NOT_SUPPORTED, "kernel %s is not compiled into this library", kernel_name(kernel));
  }
  return family->supported(part_of(*family, problem, device), device, message);
}

Status make_plan(FamilyList families, Problem const& problem, int32_t kernel, convt3d_device const& device,
                 convt3d_plan* plan, Message& message) {
  Family const* family = nullptr;
  Status status = check_device(device, message);
  if (status != CONVT3D_OK) return status;
  if (kernel == CONVT3D_KERNEL_AUTO && takes_small_form(families, problem, device)) {
    *plan = convt3d_plan{static_cast<int32_t>(families.small->id), kSmallForm, 0};
    return CONVT3D_OK;
  }
  if (kernel == CONVT3D_KERNEL_AUTO) {
    status = choose_fastest(families, problem, device, &family, message);
  } else {
    status = supported(families, problem, kernel, device, message);
    if (status == CONVT3D_OK) family = find(families, kernel);
  }
  if (status != CONVT3D_OK) return status;
  size_t const workspace_bytes = family->workspace_bytes(part_of(*family, problem, device), device);
  *plan = convt3d_plan{static_cast<int32_t>(family->id), 0, workspace_bytes};
  return CONVT3D_OK;
}

Status forward(FamilyList families, Problem const& problem, convt3d_plan const& plan, convt3d_tensors const& tensors,
               convt3d_device const& device, void* stream, Message& message) {
  Status status = check_tensors(problem, tensors, message);
  if (status == CONVT3D_OK) status = supported(families, problem, plan.kernel, device, message);
  if (status != CONVT3D_OK) return status;

  if (plan.reserved != 0) {
    bool const takes = plan.reserved == kSmallForm && takes_small_form(families, problem, device);
    if (!takes || plan.kernel != families.small->id) {
      return message.fail(CONVT3D_INVALID_ARGUMENT, "kernel %s has no form %" PRId32 " for this problem",
                          kernel_name(plan.kernel), plan.reserved);
    }
  }
  Family const* family = find(families, plan.kernel);
  size_t const own = plan.reserved != 0 ? 0 : family->workspace_bytes(part_of(*family, problem, device), device);
  return enqueue(families, problem, plan, tensors, device, std::max(plan.workspace_bytes, own), stream, message);
}

Status launch(FamilyList families, Problem const& problem, convt3d_plan const& plan, convt3d_tensors const& tensors,
              convt3d_device const& device, void* stream, Message& message) {
  Status const status = check_tensors(problem, tensors, message);
  if (status != CONVT3D_OK) return status;
  return enqueue(families, problem, plan, tensors, device, plan.workspace_bytes, stream, message);
}

}  // namespace convt3d
