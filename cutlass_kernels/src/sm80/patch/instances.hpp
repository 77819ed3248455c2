// SPDX-License-Identifier: Apache-2.0
//
// The compiled patch-expansion kernels, by arithmetic and the elements of a unit.
#pragma once

#include <cuda_runtime_api.h>

#include "convt3d/problem.hpp"

namespace convt3d::sm80::patch {

struct PatchCall {
  Problem const* problem;  // one that takes() takes on `device`
  convt3d_tensors const* tensors;
  convt3d_device device;  // the current one
  bool overlap;           // with the pre-kernel: the device lets a kernel start while the one before it still runs
};

/// One compiled file.
using PatchLaunchFn = cudaError_t (*)(PatchCall const& call, cudaStream_t stream);

#define CONVT3D_PATCH_INSTANCE(name) cudaError_t name(PatchCall const&, cudaStream_t)
CONVT3D_PATCH_INSTANCE(tf32_u2);
CONVT3D_PATCH_INSTANCE(tf32_u4);
CONVT3D_PATCH_INSTANCE(ieee_u2);
CONVT3D_PATCH_INSTANCE(ieee_u4);
CONVT3D_PATCH_INSTANCE(f16_u2);
CONVT3D_PATCH_INSTANCE(f16_u4);
CONVT3D_PATCH_INSTANCE(f16_u8);
CONVT3D_PATCH_INSTANCE(bf16_u2);
CONVT3D_PATCH_INSTANCE(bf16_u4);
CONVT3D_PATCH_INSTANCE(bf16_u8);
#undef CONVT3D_PATCH_INSTANCE

}  // namespace convt3d::sm80::patch
