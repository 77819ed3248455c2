// SPDX-License-Identifier: Apache-2.0
//
// Launches one instantiation of the kernel; included by the instance files alone.
#pragma once

#include <cuda_runtime.h>

#include "convt3d/activation.hpp"
#include "sm90/kernel.hpp"

namespace convt3d::sm90 {

/// On `ctas` CTAs, as the programmatic dependent of the pre-kernel.
template <class Params>
cudaError_t launch_persistent(void (*function)(Params), int threads, Params const& k, size_t shared_bytes, int ctas,
                              cudaStream_t stream) {
  // The same for all calls: another thread's with another size may come in between.
  cudaError_t const error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedLimit));
  if (error != cudaSuccess) return error;
  return launch_dependent(function, static_cast<unsigned>(ctas), static_cast<unsigned>(threads), shared_bytes, stream,
                          k);
}

template <class T, bool kChannelsLast, class Tail>
cudaError_t launch_kernel(KernelParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  return launch_persistent(kernel<T, kChannelsLast, Tail>, Kernel<T, kChannelsLast, Tail>::kThreads, k, shared_bytes,
                           ctas, stream);
}

/// The activations worth a kernel of their own, and one kernel for all others.
template <class T, bool kChannelsLast>
cudaError_t launch_tail(KernelParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  EpilogueParams const& e = k.epilogue;
  if (!e.add_after && e.activation == CONVT3D_ACT_X_HARDSWISH) {
    return launch_kernel<T, kChannelsLast, XHardswishTail>(k, shared_bytes, ctas, stream);
  }
  if (!e.add_after && is_linear(e.activation)) {
    return launch_kernel<T, kChannelsLast, LinearTail>(k, shared_bytes, ctas, stream);
  }
  return launch_kernel<T, kChannelsLast, AnyTail>(k, shared_bytes, ctas, stream);
}

}  // namespace convt3d::sm90
