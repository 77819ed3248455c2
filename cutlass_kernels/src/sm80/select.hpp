// SPDX-License-Identifier: Apache-2.0
//
// The one place where an sm80 kernel is chosen.
#pragma once

#include "sm80/call.hpp"
#include "sm80/joint/call.hpp"
#include "sm80/patch/instances.hpp"

namespace convt3d::sm80 {

// The kernel that computes all residue classes of a tile in one thread block; null where another one is better or
// needed.
joint::JointLaunchFn select_joint_kernel(Problem const& problem);

// The kernel for patch expansion, which reads x where it lies; null where it is not possible or not the fastest.
patch::PatchLaunchFn select_patch_kernel(Problem const& problem, convt3d_device const& device);

// Otherwise the kernel for a supported problem: operand type by dtype and precision, GEMM N tile by Cout, epilogue by
// the layout of y.
LaunchFn select_kernel(Problem const& problem);

/// Whether thread blocks compute two classes, neighbours along W, where there is a kernel for that and shared memory
/// for two of its blocks. `stash`: it keeps sums there, too.
bool pairs_classes(Problem const& p, bool stash);

}  // namespace convt3d::sm80
