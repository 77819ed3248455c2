// SPDX-License-Identifier: Apache-2.0
//
// Launches one instantiation of the kernel; included by the instance files alone.
#pragma once

#include <cuda_runtime.h>

#include "sm90/kernel.hpp"

namespace convt3d::sm90 {

template <class Tail>
cudaError_t launch_kernel(KernelParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  cudaError_t const error =
      cudaFuncSetAttribute(kernel<Tail>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(Kernel<Tail>::kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel<Tail>, k);
}

}  // namespace convt3d::sm90
