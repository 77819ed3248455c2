// SPDX-License-Identifier: Apache-2.0
//
// A look at x before the kernels of fp32 in ieee mode: a warp reads 32 neighbouring accesses, a region, at a time, and
// of large tensors one region in several (split.hpp).
#pragma once

#include "sm90/split_prepare.hpp"

namespace convt3d::sm90 {

/// Fixes the sample, for so many warps.
inline void choose_sample(ScanParams& s, int warps) {
  int64_t const regions = (s.accesses + 31) / 32;
  s.step = sample_step(regions, int64_t{warps} * kScanBatch);
  s.groups = (regions + s.step - 1) / s.step;
}

/// Bits of the largest finite magnitude of a vector.
__device__ inline uint32_t largest_finite(uint4 const& v) {
  return max(max(finite_magnitude(v.x), finite_magnitude(v.y)), max(finite_magnitude(v.z), finite_magnitude(v.w)));
}

/// Elements from x to an access, where the tensor has gaps.
__device__ __noinline__ static int64_t scan_offset(ScanParams const& p, uint64_t access) {
  uint64_t rest, within;
  p.size[0](rest, within, access);
  int64_t offset = static_cast<int64_t>(within) * (p.vectorized ? 4 : 1);
#pragma unroll 1
  for (int i = 0; i < p.dims - 1; ++i) {
    uint64_t next, index;
    p.size[i + 1](next, index, rest);
    offset += static_cast<int64_t>(index) * p.stride[i];
    rest = next;
  }
  return offset + static_cast<int64_t>(rest) * p.stride[p.dims - 1];
}

/// Calls `see` with a lane's access to the regions of every `warps`-th group from `first` on; all lanes together, with
/// zeros past the end of x.
template <bool kVectorized, class See>
__device__ void see_regions(ScanParams const& p, int64_t first, int64_t warps, See&& see) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  for (; first < p.groups; first += warps * kScanBatch) {
    uint4 v[kScanBatch];
#pragma unroll
    for (int b = 0; b < kScanBatch; ++b) {
      int64_t const at = sampled_region(first + b * warps, p.step) * 32 + lane;
      v[b] = make_uint4(0, 0, 0, 0);
      if (at >= p.accesses) continue;
      float const* const from =
          p.x + (p.dims == 0 ? at * (kVectorized ? 4 : 1) : scan_offset(p, static_cast<uint64_t>(at)));
      if constexpr (kVectorized) {
        v[b] = __ldg(reinterpret_cast<uint4 const*>(from));
      } else {
        v[b].x = __float_as_uint(__ldg(from));
      }
    }
#pragma unroll
    for (int b = 0; b < kScanBatch; ++b) see(v[b]);
  }
}

}  // namespace convt3d::sm90
