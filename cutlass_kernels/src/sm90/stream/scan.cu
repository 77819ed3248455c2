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

/// One CTA's share of the weights of channel tile `tile`. Neighbouring threads read neighbours: taps, or channels.
__device__ uint32_t scan_weights(PieceParams const& p, int tile, int part) {
  constexpr int kBatch = 16;  // loads of a thread in flight
  int const channels = min(kTileChannels, p.out_channels - tile * kTileChannels);
  int const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  bool const along_channels = p.weight_stride[1] == 1;
  bool const even = p.weight_stride[3] == p.kernel[2] * p.weight_stride[4] &&
                    p.weight_stride[2] == p.kernel[1] * p.weight_stride[3];  // from tap to tap
  int const inner = along_channels ? channels : taps;
  int const outer = along_channels ? taps : channels;
  auto tap_offset = [&](int tap) {
    return even ? tap * p.weight_stride[4]
                : tap / (p.kernel[1] * p.kernel[2]) * p.weight_stride[2] +
                      tap / p.kernel[2] % p.kernel[1] * p.weight_stride[3] + tap % p.kernel[2] * p.weight_stride[4];
  };
  // A thread's place, and the way from one to its next.
  struct Place {
    int inner, outer, in_channel;
  };
  auto place = [&](int i) { return Place{i % inner, i / inner % outer, i / inner / outer}; };
  Place at = place(part * kThreads + static_cast<int>(threadIdx.x));
  Place const step = place(kWeightScanResults * kThreads);
  float const* const from = static_cast<float const*>(p.weight) + tile * kTileChannels * p.weight_stride[1];
  uint32_t largest = 0;
  while (at.in_channel < p.in_channels) {
    uint32_t bits[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      int const channel = along_channels ? at.inner : at.outer;
      int const tap = along_channels ? at.outer : at.inner;
      bits[b] = at.in_channel < p.in_channels ? __float_as_uint(__ldg(from + at.in_channel * p.weight_stride[0] +
                                                                      channel * p.weight_stride[1] + tap_offset(tap)))
                                              : 0;
      at.inner += step.inner;
      bool const next_outer = at.inner >= inner;
      if (next_outer) at.inner -= inner;
      at.outer += step.outer + (next_outer ? 1 : 0);
      bool const next_channel = at.outer >= outer;
      if (next_channel) at.outer -= outer;
      at.in_channel += step.in_channel + (next_channel ? 1 : 0);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) largest = max(largest, finite_magnitude(bits[b]));
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
  for (int i = cta * kThreads + static_cast<int>(threadIdx.x); i < p.batch * p.in_size[0]; i += gridDim.x * kThreads) {
    p.split.tiny_x[i] = 0;
  }
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
