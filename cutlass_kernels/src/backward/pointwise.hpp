// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the pointwise half of a backward pass: grad_pre = grad_output * act'(t), and each channel's sum of
// it in fp32, all in one pass over the memory. Walks, after the way that neighbours lie in memory:
//
//   rows      a warp takes a segment of one (sample, channel) row; lanes are neighbouring positions
//   columns   a block takes some voxels; lanes are neighbouring channels, each thread keeps its own
//   turned    reads rows and writes NDHWC, see turned.hpp
//
// Sums go to fixed places of a workspace, one per segment or block and channel, and `sum_partials` adds them in a
// fixed order: no atomics, so the bits are the same in every run.
#pragma once

#include <cuda_runtime_api.h>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include <algorithm>
#include <cstdint>

#include "backward/launch.hpp"
#include "convt3d/activation_gradient.hpp"

namespace convt3d::backward {

template <class T, int kVector>
using Packet = cutlass::AlignedArray<T, kVector>;

constexpr int kUnroll = 2;  // accesses of a thread to each tensor under way at once

/// Offset of position `i` of a sample. 32-bit divisions wherever the sizes allow, none where (D, H, W) are one run.
__device__ inline int64_t position_offset(Params const& p, Operand const& o, int64_t i) {
  if (o.flat >= 0) return i * o.flat;
  if (p.positions <= UINT32_MAX) {
    uint32_t const width = static_cast<uint32_t>(p.width), height = static_cast<uint32_t>(p.height);
    uint32_t const w = static_cast<uint32_t>(i) % width, dh = static_cast<uint32_t>(i) / width;
    return w * o.stride[4] + (dh % height) * o.stride[3] + (dh / height) * o.stride[2];
  }
  int64_t const w = i % p.width, dh = i / p.width;
  return w * o.stride[4] + (dh % p.height) * o.stride[3] + (dh / p.height) * o.stride[2];
}

/// Offset of voxel `v` of all samples.
__device__ inline int64_t voxel_offset(Params const& p, Operand const& o, int64_t v) {
  if (o.voxels >= 0) return v * o.voxels;
  int64_t const sample = v / p.positions;
  return sample * o.stride[0] + position_offset(p, o, v - sample * p.positions);
}

/// The arithmetic between the loads and the stores: `grad` becomes grad * act'(t), and `add(u, e, value)` has it.
/// The choice of the activation stands here and not around the loops: it costs a branch per batch, and keeps the
/// eleven copies of what follows it short.
template <class T, int kVector, int kCount>
struct Batch {
  Packet<T, kVector> grad[kCount];
  Packet<T, kVector> t[kCount];

  template <class Add>
  __device__ void apply(Params const& p, Add&& add) {
    with_activation(p.activation, [&](auto act) {
      activation::Gradient<decltype(act)> const gradient;
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          float const result = gradient(static_cast<float>(grad[u][e]), static_cast<float>(t[u][e]), p.negative_slope);
          add(u, e, result);
          grad[u][e] = static_cast<T>(result);
        }
      }
    });
  }
};

// ---- rows -----------------------------------------------------------------------------------------------------------

/// A segment of one (sample, channel) row. Its accesses are aligned: the first one of a row may begin in front of it,
/// the last one end behind it. Places inside a segment are 32-bit, counted from the first access.
template <class T, int kVector>
struct Segment {
  using Packet_ = Packet<T, kVector>;

  Params const& p;
  T const* grad_output;  // of place 0; of the row where kVector is 1
  T const* t;
  T* grad_pre;
  int64_t start;  // position of place 0
  int low;        // places in [low, high) are in the row
  int high;
  float sum = 0.0f;

  __device__ Segment(Params const& params, int64_t row, int64_t segment) : p(params) {
    int64_t const sample = row / p.channels, channel = row - sample * p.channels;
    auto const at = [&](Operand const& o) {
      return static_cast<T*>(o.data) + (sample * o.stride[0] + channel * o.stride[1]);
    };
    grad_output = at(p.grad_output);
    t = p.t.data ? at(p.t) : nullptr;
    grad_pre = p.grad_pre.data ? at(p.grad_pre) : nullptr;
    T const* const lead = grad_pre ? grad_pre : t ? t : grad_output;
    int const shift = static_cast<int>(reinterpret_cast<uintptr_t>(lead) / sizeof(T) % kVector);
    int64_t const length = p.steps * kWarp * kVector;
    start = segment * length - shift;
    low = start < 0 ? shift : 0;
    high = static_cast<int>(max(int64_t(0), min(length, p.positions - start)));
    if constexpr (kVector > 1) {
      grad_output += start * p.grad_output.flat;
      if (t) t += start;
      if (grad_pre) grad_pre += start;
    }
  }

  __device__ int64_t offset(Operand const& o, int place) const {
    return kVector == 1 ? position_offset(p, o, start + place) : place;
  }

  /// Accesses at place, place + 32 accesses, ..., all of them in the row. Everything is loaded before a value is used.
  __device__ void whole(int place) {
    constexpr int kStep = kWarp * kVector;
    Batch<T, kVector, kUnroll> batch;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (kVector > 1 && p.grad_output.flat == 0) {
        batch.grad[u].fill(*grad_output);
      } else {
        batch.grad[u] = *reinterpret_cast<Packet_ const*>(grad_output + offset(p.grad_output, place + u * kStep));
      }
      batch.t[u].clear();
      if (t) batch.t[u] = *reinterpret_cast<Packet_ const*>(t + offset(p.t, place + u * kStep));
    }
    batch.apply(p, [&](int, int, float value) { sum += value; });
    if (!grad_pre) return;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      *reinterpret_cast<Packet_*>(grad_pre + offset(p.grad_pre, place + u * kStep)) = batch.grad[u];
    }
  }

  /// One access, of which only the elements in the row are there. The others count as 0.
  __device__ void edge(int place) {
    Batch<T, kVector, 1> batch;
    batch.grad[0].clear();
    batch.t[0].clear();
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (place + e < low || place + e >= high) continue;
      bool const constant = kVector > 1 && p.grad_output.flat == 0;
      batch.grad[0][e] = grad_output[constant ? 0 : offset(p.grad_output, place + e)];
      if (t) batch.t[0][e] = t[offset(p.t, place + e)];
    }
    batch.apply(p, [&](int, int, float value) { sum += value; });
    if (!grad_pre) return;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (place + e < low || place + e >= high) continue;
      grad_pre[offset(p.grad_pre, place + e)] = batch.grad[0][e];
    }
  }
};

template <class T, int kVector>
__device__ void walk_rows(Params const& p) {
  constexpr int kStep = kWarp * kVector;
  int const lane = threadIdx.x % kWarp;
  int64_t const units = p.batch * p.channels * p.rows_split;
  int64_t const stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp; unit < units;
       unit += stride) {
    int64_t const row = unit / p.rows_split, split = unit - row * p.rows_split;
    Segment<T, kVector> segment(p, row, split);
    int place = 0;
    if (segment.low > 0) {
      segment.edge(lane * kVector);
      place = kStep;
    }
    for (; place + kUnroll * kStep <= segment.high; place += kUnroll * kStep) segment.whole(place + lane * kVector);
    for (; place < segment.high; place += kStep) segment.edge(place + lane * kVector);
    if (p.partial) {
      float sum = segment.sum;
#pragma unroll
      for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      // Partial sums of a channel lie together: sample by sample, segment by segment.
      int64_t const sample = row / p.channels, channel = row - sample * p.channels;
      if (lane == 0) p.partial[channel * p.partials + sample * p.rows_split + split] = sum;
    }
  }
}

// ---- columns --------------------------------------------------------------------------------------------------------

/// The channels of one thread, at the voxels of its block, which are counted from the block's first one.
template <class T, int kVector>
struct Column {
  using Packet_ = Packet<T, kVector>;

  Params const& p;
  T const* grad_output;  // at the block's first voxel; of the channel where kVector is 1
  T const* t;
  T* grad_pre;
  int64_t start;  // the block's first voxel
  cutlass::Array<float, kVector> sums;

  __device__ Column(Params const& params, int64_t channel, int64_t first_voxel) : p(params), start(first_voxel) {
    auto const at = [&](Operand const& o) {
      return static_cast<T*>(o.data) + channel * o.stride[1] + (kVector == 1 ? 0 : start * o.voxels);
    };
    grad_output = at(p.grad_output);
    t = p.t.data ? at(p.t) : nullptr;
    grad_pre = p.grad_pre.data ? at(p.grad_pre) : nullptr;
    sums.clear();
  }

  __device__ int64_t offset(Operand const& o, int voxel) const {
    return kVector == 1 ? voxel_offset(p, o, start + voxel) : voxel * o.voxels;
  }

  /// Voxels first, first + step, ...: everything is loaded before a value is used.
  template <int kCount>
  __device__ void voxels(int first, int step) {
    Batch<T, kVector, kCount> batch;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      T const* const from = grad_output + offset(p.grad_output, first + u * step);
      if (kVector > 1 && p.grad_output.stride[1] == 0) {
        batch.grad[u].fill(*from);
      } else {
        batch.grad[u] = *reinterpret_cast<Packet_ const*>(from);
      }
      batch.t[u].clear();
      if (t) batch.t[u] = *reinterpret_cast<Packet_ const*>(t + offset(p.t, first + u * step));
    }
    batch.apply(p, [&](int, int e, float value) { sums[e] += value; });
    if (!grad_pre) return;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      *reinterpret_cast<Packet_*>(grad_pre + offset(p.grad_pre, first + u * step)) = batch.grad[u];
    }
  }
};

/// Adds the threads' sums of each channel, in a fixed tree, into the first `groups` threads.
template <int kVector>
__device__ void add_over_voxels(cutlass::Array<float, kVector>& sums, int groups, int side_by_side) {
  __shared__ cutlass::AlignedArray<float, kVector> shared[kThreads];
  int const place = threadIdx.x / groups;
#pragma unroll
  for (int e = 0; e < kVector; ++e) shared[threadIdx.x][e] = sums[e];
  int half = 1;
  while (half < side_by_side) half *= 2;
  for (half /= 2; half > 0; half /= 2) {
    __syncthreads();
    if (place < half && place + half < side_by_side) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) shared[threadIdx.x][e] += shared[threadIdx.x + half * groups][e];
    }
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) sums[e] = shared[threadIdx.x][e];
  __syncthreads();  // before the next use
}

template <class T, int kVector>
__device__ void walk_columns(Params const& p) {
  int const groups = static_cast<int>(column_groups(p.channels, kVector));
  int const side_by_side = static_cast<int>(voxels_per_step(p.channels, kVector));
  int const group = threadIdx.x % groups, place = threadIdx.x / groups;
  int64_t const per_block = side_by_side * p.steps;
  int64_t const all_voxels = p.batch * p.positions;
  for (int64_t tile = blockIdx.y; tile * groups * kVector < p.channels; tile += gridDim.y) {
    int64_t const channel = (tile * groups + group) * kVector;
    // The threads that do not fit a whole number of times, and those beyond the channels, only wait.
    bool const works = place < side_by_side && channel < p.channels;
    for (int64_t block = blockIdx.x; block * per_block < all_voxels; block += gridDim.x) {
      int64_t const start = block * per_block;
      Column<T, kVector> column(p, works ? channel : 0, start);
      if (works) {
        int const end = static_cast<int>(min(per_block, all_voxels - start));
        int v = place;
        for (; v + (kUnroll - 1) * side_by_side < end; v += kUnroll * side_by_side) {
          column.template voxels<kUnroll>(v, side_by_side);
        }
        for (; v < end; v += side_by_side) column.template voxels<1>(v, side_by_side);
      }
      if (p.partial) {
        add_over_voxels<kVector>(column.sums, groups, side_by_side);
        if (place == 0 && works) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) p.partial[(channel + e) * p.partials + block] = column.sums[e];
        }
      }
    }
  }
}

}  // namespace convt3d::backward
