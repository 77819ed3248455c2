// SPDX-License-Identifier: Apache-2.0
//
// The sm80 family as another family's understudy: its launches are enqueued, and run or return at once as a word in
// device memory says by then. No synchronisation, and a captured graph decides anew in every replay.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "convt3d/problem.hpp"
#include "message.hpp"

namespace convt3d::sm80 {

/// Device memory that run_if needs.
size_t run_if_workspace_bytes(Problem const& p);

/// Enqueues the problem, to be computed where `*condition` (device memory) is not zero when the kernels start. fp32 in
/// ieee mode alone. Grids are a few blocks on each multiprocessor, so that returning costs nothing to speak of.
Status run_if(Problem const& p, convt3d_tensors const& tensors, int32_t const* condition, int multiprocessors,
              cudaStream_t stream, Message& message);

}  // namespace convt3d::sm80
