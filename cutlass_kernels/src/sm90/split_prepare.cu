// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda_fp16.h"
#include "dependent_launch.hpp"
#include "sm90/launch.hpp"
#include "sm90/split_prepare.hpp"

namespace convt3d::sm90 {
namespace {

constexpr int kThreads = kSplitPrepareThreads;

__device__ uint32_t finite_magnitude(uint32_t bits) {
  uint32_t const magnitude = bits & 0x7fffffffu;
  return magnitude < kInfinityBits ? magnitude : 0;
}

/// The largest of all threads' values, to all of them.
__device__ uint32_t largest_of_cta(uint32_t value) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  value = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) atomicMax(&largest, value);
  __syncthreads();
  return largest;
}

/// The part of the class's weights that block `block` multiplies, as an image; the scale is that of the whole class.
__device__ void write_block(WeightParams const& p, SplitParams const& s, int cls, int block) {
  auto const* weight = static_cast<float const*>(p.weight);
  int const first_channel = cls * class_channels(4);
  int const channels = min(class_channels(4), p.out_channels - first_channel);
  int const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  // A thread has a (channel, tap) and reads it of several input channels at a time: this must not outlast the look
  // through x.
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < channels * taps; i += kThreads) {
    int const tap = i % taps;
    float const* const from = weight + (first_channel + i / taps) * p.weight_stride[1] +
                              tap / (p.kernel[1] * p.kernel[2]) * p.weight_stride[2] +
                              tap / p.kernel[2] % p.kernel[1] * p.weight_stride[3] +
                              tap % p.kernel[2] * p.weight_stride[4];
    constexpr int kBatch = 8;  // divides the number of input channels
    for (int k = 0; k < p.in_channels; k += kBatch) {
      float v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) v[b] = __ldg(from + (k + b) * p.weight_stride[0]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) largest = max(largest, finite_magnitude(__float_as_uint(v[b])));
    }
  }
  int const exponent = split_exponent(largest_of_cta(largest));
  float const factor = __uint_as_float(power_of_two_bits(exponent));

  bool bad = false;
  unsigned char* const image = p.image + static_cast<int64_t>(cls * p.blocks + block) * kWeightBlockBytes;
  for (int i = threadIdx.x; i < block_rows(4) * 32; i += kThreads) {
    int const k = i % 32;
    int const row = i / 32;
    WeightPlace const place = weight_place(p, 4, cls, block, row, k);
    float const value = place.live ? weight[place.offset] : 0.f;
    bad = bad || !can_split(__float_as_uint(value), exponent);
    float const scaled = value * factor;
    __half const hi = __float2half_rn(scaled);
    __half const lo = __float2half_rn((scaled - __half2float(hi)) * static_cast<float>(1 << kSplitShift));
    int const at = split_weight_offset(row, k);
    *reinterpret_cast<__half*>(image + at) = hi;
    *reinterpret_cast<__half*>(image + (at ^ kLowPart)) = lo;
  }
  int const any = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    s.weights_do_not_split[cls * p.blocks + block] = any;
    if (block == 0) s.weight_exponent[cls] = exponent;
  }
}

__device__ int64_t scan_offset(ScanParams const& p, uint64_t access) {
  uint64_t within = access;
  if (p.dims > 0) {
    uint64_t rest;
    p.size[0](rest, within, access);
    int64_t offset = 0;
    for (int i = 0; i < p.dims - 1; ++i) {
      uint64_t next, index;
      p.size[i + 1](next, index, rest);
      offset += static_cast<int64_t>(index) * p.stride[i];
      rest = next;
    }
    offset += static_cast<int64_t>(rest) * p.stride[p.dims - 1];
    return offset + static_cast<int64_t>(within) * (p.vectorized ? 4 : 1);
  }
  return static_cast<int64_t>(within) * (p.vectorized ? 4 : 1);
}

/// From the end to the start, so that what the main kernel reads first has been read last.
template <bool kVectorized>
__device__ void scan(ScanParams const& p, ScanResult& result, int cta, int ctas) {
  __shared__ int32_t bins[kExponentBins];
  if (threadIdx.x < kExponentBins) bins[threadIdx.x] = 0;
  __syncthreads();
  int64_t const step = static_cast<int64_t>(ctas) * kThreads;
  uint32_t largest = 0;
  unsigned round = threadIdx.x;
  for (int64_t i = p.accesses - 1 - (static_cast<int64_t>(cta) * kThreads + threadIdx.x); i >= 0;
       i -= step * kScanBatch, ++round) {
    uint4 v[kScanBatch];
#pragma unroll
    for (int b = 0; b < kScanBatch; ++b) {
      int64_t const at = i - b * step;
      v[b] = make_uint4(0, 0, 0, 0);
      if (at < 0) continue;
      float const* const from = p.x + scan_offset(p, static_cast<uint64_t>(at));
      if constexpr (kVectorized) {
        v[b] = __ldg(reinterpret_cast<uint4 const*>(from));
      } else {
        v[b].x = __float_as_uint(__ldg(from));
      }
    }
#pragma unroll
    for (int b = 0; b < kScanBatch; ++b) {
      largest = max(max(largest, max(finite_magnitude(v[b].x), finite_magnitude(v[b].y))),
                    max(finite_magnitude(v[b].z), finite_magnitude(v[b].w)));
    }
    // One value of the batch, of each component of a vector in turn.
    uint32_t sample = v[0].x;
    if (kVectorized) {
      sample = round % 4 == 1 ? v[0].y : round % 4 == 2 ? v[0].z : round % 4 == 3 ? v[0].w : sample;
    }
    sample &= 0x7fffffffu;
    if (sample != 0) atomicAdd(&bins[exponent_bin(sample)], 1);
  }
  largest = largest_of_cta(largest);
  if (threadIdx.x == 0) result.largest = largest;
  if (threadIdx.x < kExponentBins) result.bin[threadIdx.x] = bins[threadIdx.x];
}

__global__ void __launch_bounds__(kThreads, 2) prepare_kernel(__grid_constant__ SplitPrepareParams const p) {
  let_next_kernel_start();
  WeightParams const& w = p.weights;
  int64_t const index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int64_t const threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = index; i < w.classes; i += threads) w.counters[i] = 0;
  for (int64_t i = index; i < w.owner_count; i += threads) w.owners[i] = 0;
  int const cta = static_cast<int>(blockIdx.x);
  int const blocks = w.classes * w.blocks;
  if (cta < blocks) {
    write_block(w, p.split, cta / w.blocks, cta % w.blocks);
  } else if (p.scan.vectorized) {
    scan<true>(p.scan, p.split.scan[cta - blocks], cta - blocks, p.split.scans);
  } else {
    scan<false>(p.scan, p.split.scan[cta - blocks], cta - blocks, p.split.scans);
  }
}

}  // namespace

ScanParams scan_params(Problem const& p, void const* x) {
  Size5 const size = x_shape(p);
  struct Dim {
    int64_t size, stride;
  };
  Dim dims[6] = {{1, 1}};
  int count = 1;  // the innermost, dense one is dims[0]
  int order[5] = {0, 1, 2, 3, 4};
  std::sort(order, order + 5, [&](int a, int b) { return p.x_stride[a] < p.x_stride[b]; });
  for (int axis : order) {
    int64_t const stride = p.x_stride[axis];
    if (size[axis] == 1 || stride == 0) continue;  // an axis that repeats values brings no new ones
    Dim& inner = dims[count - 1];
    if (stride == inner.size * inner.stride) {
      inner.size *= size[axis];
    } else {
      dims[count++] = {size[axis], stride};
    }
  }
  ScanParams s{};
  s.x = static_cast<float const*>(x);
  s.dims = count - 1;
  bool vectorized = p.x_alignment == 16 && dims[0].size % 4 == 0;
  for (int i = 1; i < count; ++i) vectorized = vectorized && dims[i].stride % 4 == 0;
  s.vectorized = vectorized;
  s.accesses = dims[0].size / (vectorized ? 4 : 1);
  for (int i = 1; i < count; ++i) {
    int64_t const size_inside = i == 1 ? s.accesses : dims[i - 1].size;
    s.size[i - 1] = cutlass::FastDivmodU64(static_cast<uint64_t>(size_inside > 0 ? size_inside : 1));
    s.stride[i - 1] = dims[i].stride;
  }
  for (int i = 1; i < count; ++i) s.accesses *= dims[i].size;
  return s;
}

void fill_split_params(KernelParams& k, ScanParams& s, Problem const& p, Config const& c, convt3d_tensors const& t) {
  Workspace const layout = workspace_layout(p, c);
  auto* const workspace = static_cast<unsigned char*>(t.workspace);
  s = scan_params(p, t.x);
  SplitParams& split = k.split;
  split.scan = reinterpret_cast<ScanResult*>(workspace + layout.scans);
  split.scans = scan_ctas(p);
  split.weight_results = class_count(p) * class_blocks(p);
  split.weights_do_not_split = reinterpret_cast<int32_t*>(workspace + layout.weight_results);
  split.weight_exponent = reinterpret_cast<int32_t*>(workspace + layout.weight_exponents);
  split.declined = reinterpret_cast<int32_t*>(workspace + layout.declined);
  split.too_many = too_many_in_sample(s.accesses / kScanBatch);
}

cudaError_t prepare_split(SplitPrepareParams const& params, cudaStream_t stream) {
  int const ctas = params.weights.classes * params.weights.blocks + params.split.scans;
  prepare_kernel<<<ctas, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace convt3d::sm90
