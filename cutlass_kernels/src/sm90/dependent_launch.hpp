// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch. CUTLASS has the same two instructions, but as no-ops unless a macro is set for
// the whole build, and a missing wait would be a silent race.
#pragma once

#include "cutlass/cutlass.h"

namespace convt3d::sm90 {

CUTLASS_DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Until every kernel this one depends on has finished and its writes are visible.
CUTLASS_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace convt3d::sm90
