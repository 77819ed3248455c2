// SPDX-License-Identifier: Apache-2.0
//
// fp32 in ieee mode, before the pre-kernel: the largest finite magnitudes of x and of each channel tile's weights,
// which fix the scales of their parts (split.hpp). The whole of both is read, so that no value can be too large.
#include "dependent_launch.hpp"
#include "sm90/stream/params.hpp"

namespace convt3d::sm90::stream {
namespace {

constexpr int kThreads = 512;
constexpr int kBatch = 4;                    // accesses of a thread in flight
constexpr int kSegment = kThreads * kBatch;  // 16-byte vectors that a CTA reads at a time

__device__ uint32_t largest_of(uint4 const& v) {
  return max(max(finite_magnitude(v.x), finite_magnitude(v.y)), max(finite_magnitude(v.z), finite_magnitude(v.w)));
}

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

/// Where x comes in rows of whole vectors: all of it is one, or each channel of a sample. From the end to the start, so
/// that what the pre-kernel reads first has been read last.
__device__ uint32_t scan_rows(PieceParams const& p, int cta) {
  bool const one = p.x_pass == XPass::kCopy;
  int64_t const length = one ? p.x_vectors : p.voxels / 4;
  int64_t const rows = one ? 1 : static_cast<int64_t>(p.batch) * p.in_channels;
  int64_t const segments = (length + kSegment - 1) / kSegment;
  uint32_t largest = 0;
  for (int64_t job = rows * segments - 1 - cta; job >= 0; job -= kScanResults) {
    int64_t const row = job / segments;
    int64_t const first = job % segments * kSegment + threadIdx.x;
    int64_t const offset = one ? 0 : row / p.in_channels * p.x_sample_stride + row % p.in_channels * p.x_channel_stride;
    auto const* from = reinterpret_cast<uint4 const*>(static_cast<float const*>(p.x) + offset);
    uint4 v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      int64_t const at = first + b * kThreads;
      v[b] = at < length ? __ldg(from + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) largest = max(largest, largest_of(v[b]));
  }
  return largest;
}

/// Any strides: element by element, along channels where these are neighbours, otherwise along W.
__device__ uint32_t scan_elements(PieceParams const& p, int cta) {
  int64_t const count = static_cast<int64_t>(p.batch) * p.in_channels * p.voxels;
  bool const channels_first = p.x_stride[1] == 1;
  uint32_t largest = 0;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(cta) * kThreads + threadIdx.x; i < count; i += kScanResults * kThreads) {
    int64_t rest = i;
    int64_t c = 0;
    if (channels_first) {
      c = rest % p.in_channels;
      rest /= p.in_channels;
    }
    int64_t offset = rest % p.in_size[2] * p.x_stride[4];
    rest /= p.in_size[2];
    offset += rest % p.in_size[1] * p.x_stride[3];
    rest /= p.in_size[1];
    offset += rest % p.in_size[0] * p.x_stride[2];
    rest /= p.in_size[0];
    if (!channels_first) {
      c = rest % p.in_channels;
      rest /= p.in_channels;
    }
    offset += c * p.x_stride[1] + rest * p.x_stride[0];
    largest = max(largest, finite_magnitude(__float_as_uint(__ldg(static_cast<float const*>(p.x) + offset))));
  }
  return largest;
}

__global__ void __launch_bounds__(kThreads, 2) scan_kernel(__grid_constant__ PieceParams const p) {
  __shared__ uint32_t warp_largest[kThreads / 32];
  let_next_kernel_start();
  int const cta = static_cast<int>(blockIdx.x);
  int const weight_ctas = p.channel_tiles * kWeightScanResults;
  if (cta == 0 && threadIdx.x == 0) *p.split.state = SplitState{};
  bool const of_weights = cta < weight_ctas;
  uint32_t largest = of_weights                   ? scan_weights(p, cta / kWeightScanResults, cta % kWeightScanResults)
                     : p.x_pass == XPass::kGather ? scan_elements(p, cta - weight_ctas)
                                                  : scan_rows(p, cta - weight_ctas);
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
