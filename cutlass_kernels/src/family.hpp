// SPDX-License-Identifier: Apache-2.0
//
// How a kernel family plugs into the library. A family is a constant table of functions; dispatch.cpp lists the
// families that are compiled in, fastest first. All functions receive a valid problem.
#pragma once

#include <cstddef>

#include "convt3d/problem.hpp"
#include "message.hpp"

namespace convt3d {

/// In a plan's `reserved`: the form of a family for problems so small that the host's time counts.
constexpr int32_t kSmallForm = 1;

struct Family {
  convt3d_kernel id;

  /// OK, or NOT_SUPPORTED with the reason, which starts with the family's name ("sm80: groups is 2, ..."), so that
  /// the reasons of several families make one line. Never OK for what `run` cannot do. Called for descriptions of
  /// devices that need not be there, so it must not touch CUDA.
  Status (*supported)(Problem const& problem, convt3d_device const& device, Message& message);

  /// Device memory `run` needs, for a supported problem. Zero where the output is empty.
  size_t (*workspace_bytes)(Problem const& problem, convt3d_device const& device);

  /// Enqueues the work on `stream` of the current device. The problem is supported there and has outputs; pointers
  /// are not null where they are needed and keep the promised alignments; the workspace is large enough.
  Status (*run)(Problem const& problem, convt3d_plan const& plan, convt3d_tensors const& tensors, void* stream,
                Message& message);

  /// Whether a supported problem is likely to run faster here than in the families after it, or, of the last one and
  /// with groups, than in ATen. Null: always.
  bool (*worthwhile)(Problem const& problem, convt3d_device const& device) = nullptr;
};

#if CONVT3D_WITH_CUDA
Family const* sm80_family();        // src/sm80
Family const* sm80_small_family();  // src/sm80/direct: its form for small problems
#endif
#if CONVT3D_WITH_SM90
Family const* sm90_family();  // src/sm90
#endif

}  // namespace convt3d
