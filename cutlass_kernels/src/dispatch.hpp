// SPDX-License-Identifier: Apache-2.0
//
// The choice of a kernel family and the checks around a launch. Every function takes the list of families, so
// that the tests can give their own; the C interface passes `compiled_families()`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "family.hpp"

namespace convt3d {

/// Families in order of preference.
struct FamilyList {
  Family const* const* first;
  size_t count;
  /// The small form of the family with its id, without a workspace, or null. AUTO takes it before all others where both
  /// support the problem; a family that is asked for by name runs its usual kernels at any size.
  Family const* small = nullptr;

  Family const* const* begin() const { return first; }
  Family const* const* end() const { return first + count; }
};

FamilyList compiled_families();

/// "auto", "sm80", "sm90", or null for a value out of range. Known whether or not the family is compiled in.
char const* kernel_name(int32_t kernel);

Status supported(FamilyList families, Problem const& problem, int32_t kernel, convt3d_device const& device,
                 Message& message);

Status make_plan(FamilyList families, Problem const& problem, int32_t kernel, convt3d_device const& device,
                 convt3d_plan* plan, Message& message);

/// Checks everything about a launch, then launches. `device` describes the current device, on which the problem is
/// checked again: a plan made for another problem or device is refused instead of read out of bounds.
Status forward(FamilyList families, Problem const& problem, convt3d_plan const& plan, convt3d_tensors const& tensors,
               convt3d_device const& device, void* stream, Message& message);

/// The same for what `make_plan` has just returned OK for, unchanged and on `device`: only the tensors are checked.
Status launch(FamilyList families, Problem const& problem, convt3d_plan const& plan, convt3d_tensors const& tensors,
              convt3d_device const& device, void* stream, Message& message);

/// The current CUDA device (device.cpp); NOT_SUPPORTED where there is none or the build has no CUDA.
Status current_device(convt3d_device* device, Message& message);

/// Its ordinal, or -1.
int32_t current_ordinal();

}  // namespace convt3d
