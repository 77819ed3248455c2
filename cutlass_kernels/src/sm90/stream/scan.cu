// SPDX-License-Identifier: Apache-2.0
//
// fp32 in ieee mode, before the pre-kernel: the largest finite magnitudes in a sample of x and of each channel tile's
// weights, which fix the scales of their parts (split.hpp). What the sample has missed, the pre-kernel sees.
#include "dependent_launch.hpp"
#include "sm90/sample.hpp"
#include "sm90/stream/params.hpp"

namespace convt3d::sm90::stream {
namespace {

constexpr int kThreads = kSampleThreads;

/// One CTA's share of the weights of channel tile `tile`.
__device__ uint32_t scan_weights(PieceParams const& p, int tile, int part) {
  int const channels = min(kTileChannels, p.out_channels - tile * kTileChannels);
  int const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  int const count = p.in_channels * channels * taps;
  auto const* weight = static_cast<float const*>(p.weight);
  uint32_t largest = 0;
#pragma unroll 8
  for (int i = part * kThreads + static_cast<int>(threadIdx.x); i < count; i += kWeightScanResults * kThreads) {
    int const tap = i % taps;
    int const c = tile * kTileChannels + i / taps % channels;
    int64_t const k = i / taps / channels;
    float const value =
        __ldg(weight + k * p.weight_stride[0] + c * p.weight_stride[1] +
              tap / (p.kernel[1] * p.kernel[2]) * p.weight_stride[2] +
              tap / p.kernel[2] % p.kernel[1] * p.weight_stride[3] + tap % p.kernel[2] * p.weight_stride[4]);
    largest = max(largest, finite_magnitude(__float_as_uint(value)));
  }
  return largest;
}

/// One CTA's share of the sample of x.
template <bool kVectorized>
__device__ uint32_t scan_x(ScanParams const& p, int cta) {
  constexpr int kWarps = kThreads / 32;
  uint32_t largest = 0;
  see_regions<kVectorized>(p, cta * kWarps + static_cast<int>(threadIdx.x) / 32, kScanResults * kWarps,
                           [&](uint4 const& v) { largest = max(largest, largest_finite(v)); });
  return largest;
}

__global__ void __launch_bounds__(kThreads, 2) scan_kernel(__grid_constant__ PieceParams const p) {
  __shared__ uint32_t warp_largest[kThreads / 32];
  let_next_kernel_start();
  int const cta = static_cast<int>(blockIdx.x);
  int const weight_ctas = p.channel_tiles * kWeightScanResults;
  if (cta == 0 && threadIdx.x == 0) *p.split.state = SplitState{};
  bool const of_weights = cta < weight_ctas;
  uint32_t largest = of_weights            ? scan_weights(p, cta / kWeightScanResults, cta % kWeightScanResults)
                     : p.sample.vectorized ? scan_x<true>(p.sample, cta - weight_ctas)
                                           : scan_x<false>(p.sample, cta - weight_ctas);
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  largest = __reduce_max_sync(0xffffffffu, threadIdx.x < kThreads / 32 ? warp_largest[threadIdx.x] : 0);
  if (threadIdx.x == 0) (of_weights ? p.split.weight_largest[cta] : p.split.x_largest[cta - weight_ctas]) = largest;
}

}  // namespace

cudaError_t scan_operands(PieceParams const& params, cudaStream_t stream) {
  int const ctas = params.channel_tiles * kWeightScanResults + kScanResults;
  scan_kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace convt3d::sm90::stream
