// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch. CUTLASS has the same two instructions, but as no-ops unless a macro is set for
// the whole build, and a missing wait would be a silent race.
#pragma once

#include <cuda_runtime.h>

namespace convt3d {

#if defined(__CUDACC__)
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Until every kernel this one depends on has finished and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Enqueues `kernel` so that it may start while the one before it is still running; it must wait for it itself.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared_bytes,
                             cudaStream_t stream, Arguments const&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
#endif

}  // namespace convt3d
