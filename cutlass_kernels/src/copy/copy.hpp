// SPDX-License-Identifier: Apache-2.0
//
// convt3d_copy.h's functions without their null checks, and how a copy is laid out.
#pragma once

#include "convt3d/convt3d_copy.h"
#include "message.hpp"

#if CONVT3D_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace convt3d::copy {

using Description = convt3d_copy;

constexpr int kAccessBytes = 16;

/// `count` rows of `vectors` accesses each; pitches from one row to the next, in accesses.
struct Rows {
  int64_t count;
  int64_t vectors;
  int64_t source_pitch;
  int64_t target_pitch;
};

/// OK and the rows of a copy that has elements, or what is wrong with it, or why it is not taken.
convt3d_status lay_out(Description const& description, Rows& rows, Message& message);

/// Checks the pointers as well, then launches.
convt3d_status run(Description const& description, void const* source, void* target, void* stream, Message& message);

#if CONVT3D_WITH_CUDA
cudaError_t launch(Rows const& rows, void const* source, void* target, cudaStream_t stream);
#endif

}  // namespace convt3d::copy
