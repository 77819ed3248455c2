// SPDX-License-Identifier: Apache-2.0
//
// The one place where an sm80 kernel is chosen.
#pragma once

#include "sm80/call.hpp"

namespace convt3d::sm80 {

// The kernel for a supported problem: operand type by dtype and precision, GEMM N tile by Cout, epilogue by the
// layout of y.
LaunchFn select_kernel(Problem const& problem);

}  // namespace convt3d::sm80
