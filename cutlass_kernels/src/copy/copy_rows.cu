// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "copy/copy.hpp"

namespace convt3d::copy {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // loads of a thread under way
constexpr int64_t kPerBlock = int64_t{kThreads} * kAtOnce;

// A step takes kPerBlock neighbouring accesses, which may begin within a row and span several. Its place is found
// once in 64 bits; what a thread divides is small.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(__grid_constant__ Rows const rows, uint4 const* __restrict__ source, uint4* __restrict__ target,
                     int64_t total) {
  auto const vectors = static_cast<unsigned>(rows.vectors);
  for (int64_t first = blockIdx.x * kPerBlock; first < total; first += gridDim.x * kPerBlock) {
    int64_t const row = first / rows.vectors;
    auto const column = static_cast<unsigned>(first - row * rows.vectors);
    uint4 value[kAtOnce];
    int64_t to[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      unsigned const ahead = i * kThreads + threadIdx.x;
      unsigned const rows_on = (column + ahead) / vectors;
      unsigned const at = column + ahead - rows_on * vectors;
      to[i] = first + ahead < total ? (row + rows_on) * rows.target_pitch + at : -1;
      // Read once: not to stay in the caches.
      if (to[i] >= 0) value[i] = __ldcs(source + (row + rows_on) * rows.source_pitch + at);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (to[i] >= 0) target[to[i]] = value[i];
    }
  }
}

}  // namespace

cudaError_t launch(Rows const& rows, void const* source, void* target, cudaStream_t stream) {
  int64_t const total = rows.count * rows.vectors;
  auto const blocks = static_cast<unsigned>(std::min<int64_t>((total + kPerBlock - 1) / kPerBlock, int64_t{1} << 30));
  copy_rows_kernel<<<blocks, kThreads, 0, stream>>>(rows, static_cast<uint4 const*>(source),
                                                    static_cast<uint4*>(target), total);
  return cudaGetLastError();
}

}  // namespace convt3d::copy
