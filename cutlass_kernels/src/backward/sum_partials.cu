// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backward/launch.hpp"

namespace convt3d::backward {
namespace {

constexpr int kAtOnce = 4;  // loads of a thread under way

// A block per channel: each thread adds every 256th partial sum, then a tree. The order depends on sizes alone.
__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(float const* partial, int64_t channels, int64_t partials, float* grad_bias) {
  __shared__ float shared[kThreads];
  for (int64_t channel = blockIdx.x; channel < channels; channel += gridDim.x) {
    float sums[kAtOnce] = {};
    for (int64_t first = threadIdx.x; first < partials; first += kAtOnce * kThreads) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        int64_t const i = first + u * kThreads;
        if (i < partials) sums[u] += partial[channel * partials + i];
      }
    }
    shared[threadIdx.x] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (threadIdx.x == 0) grad_bias[channel] = shared[0];
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_sum_partials(float const* partial, int64_t channels, int64_t partials, float* grad_bias,
                                cudaStream_t stream) {
  unsigned const blocks = static_cast<unsigned>(std::min<int64_t>(channels, 1 << 30));
  sum_partials_kernel<<<blocks, kThreads, 0, stream>>>(partial, channels, partials, grad_bias);
  return cudaGetLastError();
}

}  // namespace convt3d::backward
