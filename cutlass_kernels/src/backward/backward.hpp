// SPDX-License-Identifier: Apache-2.0
//
// convt3d_backward.h's functions without their null checks.
#pragma once

#include <cstddef>

#include "backward/plan.hpp"
#include "message.hpp"

namespace convt3d::backward {

using Tensors = convt3d_activation_gradient_tensors;

/// Everything that a caller can get wrong in a description. After OK, make_plan is free of overflow.
Status validate(Description const& description, Message& message);

/// Zero where nothing is launched.
size_t workspace_bytes(Description const& description);

/// Checks the pointers and the workspace of a valid description, then launches.
Status run(Description const& description, Tensors const& tensors, void* stream, Message& message);

}  // namespace convt3d::backward
