// SPDX-License-Identifier: Apache-2.0
//
// The compiled columns kernels, by type of the operands.
#pragma once

#include <cuda_runtime_api.h>

#include "convt3d/problem.hpp"

namespace convt3d::sm80::columns {

struct ColumnsCall {
  Problem const* problem;
  convt3d_tensors const* tensors;
  bool overlap;  // the device lets a kernel start while the one before it still runs
};

using ColumnsLaunchFn = cudaError_t (*)(ColumnsCall const& call, cudaStream_t stream);

cudaError_t launch_f16(ColumnsCall const& call, cudaStream_t stream);
cudaError_t launch_bf16(ColumnsCall const& call, cudaStream_t stream);
cudaError_t launch_tf32(ColumnsCall const& call, cudaStream_t stream);
cudaError_t launch_ieee(ColumnsCall const& call, cudaStream_t stream);

/// The kernel for a problem that the family supports and has no patch kernel for; null where it is not possible or not
/// the fastest.
ColumnsLaunchFn select(Problem const& problem, convt3d_device const& device);

}  // namespace convt3d::sm80::columns
