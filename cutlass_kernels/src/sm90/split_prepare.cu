// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda_fp16.h"
#include "dependent_launch.hpp"
#include "sm90/launch.hpp"
#include "sm90/sample.hpp"

namespace convt3d::sm90 {
namespace {

constexpr int kThreads = kSplitPrepareThreads;

// The code of this kernel comes from memory, a line after the other, each time that the main kernel has run: loops that
// run once are not unrolled, and what is rarely needed stands apart.

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

/// The largest finite magnitude among the weights of `channels` output channels from `first` on, as this thread sees
/// it. Many loads at a time: this must not outlast the look at x.
__device__ uint32_t largest_dense(WeightParams const& p, int first, int channels, int taps) {
  constexpr int kBatch = 16;
  float const* const weight = static_cast<float const*>(p.weight) + first * taps;
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < channels * taps; i += kThreads) {
#pragma unroll 1
    for (int k = 0; k < p.in_channels; k += kBatch) {
      float v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        v[b] = k + b < p.in_channels ? __ldg(weight + i + (k + b) * p.weight_stride[0]) : 0.f;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) largest = max(largest, finite_magnitude(__float_as_uint(v[b])));
    }
  }
  return largest;
}

/// The same for weights of any strides.
__device__ __noinline__ uint32_t largest_strided(WeightParams const& p, int first, int channels, int taps) {
  constexpr int kBatch = 8;  // input channels; divides their number
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < channels * taps; i += kThreads) {
    int const tap = i % taps;
    float const* from = static_cast<float const*>(p.weight) + (first + i / taps) * p.weight_stride[1] +
                        tap / (p.kernel[1] * p.kernel[2]) * p.weight_stride[2] +
                        tap / p.kernel[2] % p.kernel[1] * p.weight_stride[3] + tap % p.kernel[2] * p.weight_stride[4];
#pragma unroll 2
    for (int k = 0; k < p.in_channels; k += kBatch) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        largest = max(largest, finite_magnitude(__float_as_uint(__ldg(from + (k + b) * p.weight_stride[0]))));
      }
    }
  }
  return largest;
}

/// The part of the class's weights that block `block` multiplies, as an image; the scale is that of the whole class.
__device__ void write_block(WeightParams const& p, SplitParams const& s, int cls, int block) {
  auto const* weight = static_cast<float const*>(p.weight);
  constexpr int kValues = block_rows(4) * 32 / kThreads;  // of a thread
  float value[kValues];
  BlockPlace const of_block = block_place(p, block);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    int const i = v * kThreads + static_cast<int>(threadIdx.x);
    WeightPlace const place = weight_place(p, 4, cls, of_block, i / 32, i % 32);
    value[v] = place.live ? __ldg(weight + place.offset) : 0.f;
  }
  int const first_channel = cls * class_channels(4);
  int const channels = min(class_channels(4), p.out_channels - first_channel);
  int const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  int const exponent = split_exponent(largest_of_cta(p.taps_dense ? largest_dense(p, first_channel, channels, taps)
                                                                  : largest_strided(p, first_channel, channels, taps)));
  float const factor = __uint_as_float(power_of_two_bits(exponent));

  int tiny = 0;
  // Rows that blocks share are zeros in both.
  unsigned char* const image =
      p.image + static_cast<int64_t>(cls) * p.class_bytes + image_offset(p.places, p.offsets, block);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    int const i = v * kThreads + static_cast<int>(threadIdx.x);
    uint32_t const bits = __float_as_uint(value[v]);
    if (!can_split(bits, exponent)) tiny += (bits & 0x7fffffffu) < kInfinityBits ? 1 : kFewTinyWeights + 1;
    float const scaled = value[v] * factor;
    __half const hi = __float2half_rn(scaled);
    __half const lo = __float2half_rn((scaled - __half2float(hi)) * static_cast<float>(1 << kSplitShift));
    int const at = split_weight_offset(i / 32, i % 32);
    *reinterpret_cast<__half*>(image + at) = hi;
    *reinterpret_cast<__half*>(image + (at ^ kLowPart)) = lo;
  }
  __shared__ int32_t all_tiny;
  if (threadIdx.x == 0) all_tiny = 0;
  __syncthreads();
  if (tiny != 0) atomicAdd(&all_tiny, tiny);
  __syncthreads();
  if (threadIdx.x == 0) {
    s.tiny_weights[cls * p.blocks + block] = all_tiny;
    if (block == 0) s.weight_exponent[cls] = exponent;
  }
}

/// Looks at the CTA's share of the sample: a warp reads a region at a time.
template <bool kVectorized>
__device__ void scan(ScanParams const& p, ScanResult& result, int cta, int ctas) {
  __shared__ int32_t bins[kExponentBins];
  if (threadIdx.x < kExponentBins) bins[threadIdx.x] = 0;
  __syncthreads();
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int64_t const warps = static_cast<int64_t>(ctas) * (kThreads / 32);
  uint32_t largest = 0;
  see_regions<kVectorized>(p, cta * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32, warps, [&](uint4 const& v) {
    constexpr uint32_t kMagnitude = 0x7fffffffu;
    uint32_t region = max(max(v.x & kMagnitude, v.y & kMagnitude), max(v.z & kMagnitude, v.w & kMagnitude));
    region = __reduce_max_sync(0xffffffffu, region);
    if (region != 0 && lane == 0) atomicAdd(&bins[exponent_bin(region)], 1);
    if (region >= kInfinityBits) region = largest_finite(v);
    largest = max(largest, region);
  });
  largest = largest_of_cta(largest);
  if (threadIdx.x == 0) result.largest = largest;
  if (threadIdx.x < kExponentBins / 2) {
    uint32_t const even = min(static_cast<uint32_t>(bins[2 * threadIdx.x]), ScanResult::kMost);
    uint32_t const odd = min(static_cast<uint32_t>(bins[2 * threadIdx.x + 1]), ScanResult::kMost);
    result.bins[threadIdx.x] = odd << 16 | even;
  }
}

__global__ void __launch_bounds__(kThreads, 2) prepare_kernel(__grid_constant__ SplitPrepareParams const p) {
  let_next_kernel_start();
  WeightParams const& w = p.weights;
  int const cta = static_cast<int>(blockIdx.x);
  if (cta == 0 && static_cast<int>(threadIdx.x) < w.classes) w.counters[threadIdx.x] = 0;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(cta) * kThreads + threadIdx.x; i < w.owner_count; i += gridDim.x * kThreads) {
    w.owners[i] = 0;
  }
  int const blocks = w.classes * w.blocks;
  if (cta < blocks) {
    write_block(w, p.split, cta / w.blocks, cta % w.blocks);
  } else if (p.scan.vectorized) {
    scan<true>(p.scan, p.split.scan[cta - blocks], cta - blocks, kScanCtas);
  } else {
    scan<false>(p.scan, p.split.scan[cta - blocks], cta - blocks, kScanCtas);
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
  choose_sample(s, kScanCtas * (kThreads / 32));
  SplitParams& split = k.split;
  split.scan = reinterpret_cast<ScanResult*>(workspace + layout.scans);
  split.weight_results = class_count(p) * class_blocks(p);
  split.tiny_weights = reinterpret_cast<int32_t*>(workspace + layout.weight_results);
  split.weight_exponent = reinterpret_cast<int32_t*>(workspace + layout.weight_exponents);
  split.declined = reinterpret_cast<int32_t*>(workspace + layout.declined);
  split.too_many = too_many_in_sample(s.groups);
  split.products = static_cast<uint32_t>(most_products(p));
  split.head_room = s.step > 1 ? kHeadRoom : 0;
}

cudaError_t prepare_split(SplitPrepareParams const& params, cudaStream_t stream) {
  int const ctas = params.weights.classes * params.weights.blocks + kScanCtas;
  prepare_kernel<<<ctas, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace convt3d::sm90
