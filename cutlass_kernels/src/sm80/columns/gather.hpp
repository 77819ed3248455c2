// SPDX-License-Identifier: Apache-2.0
//
// From columns to y: every output adds up the taps that reach it, of all parts and in order, and the tail follows.
#pragma once

#include "convt3d/numerics.hpp"
#include "dependent_launch.hpp"
#include "sm80/columns/params.hpp"
#include "sm80/tail.hpp"

namespace convt3d::sm80::columns {

constexpr int kGatherThreads = 128;
constexpr int kGroup = 4;  // output channels of a thread, all of one voxel

struct Voxel {
  int n, c, at[3];  // c: the first channel
};

/// The taps of a voxel along an axis as offsets into the sums; one that is not there, or reads outside x, has none.
struct Taps {
  int32_t offset[kMostTaps];
  bool live[kMostTaps];

  CUTLASS_DEVICE Taps(GatherParams const& p, Axis const& axis, int output) {
    int j, residue;
    axis.stride(j, residue, output);
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kMostTaps; ++t) {
      int const input = j + axis.base[residue] - t * axis.input_step;
      live[t] = t < axis.taps[residue] && input >= 0 && input < axis.in_size;
      offset[t] = input * axis.input_floats * p.position_floats +
                  (axis.first_tap[residue] + t * axis.tap_distance) * axis.tap_columns * p.column_floats;
    }
  }
};

/// `kOverlap`: an output may have two taps along an axis. `kChannelsLast`: lanes run along groups of channels, whose
/// channels are neighbours in memory, and not along voxels.
template <class Element, bool kTf32, bool kChannelsLast, bool kOverlap>
struct Gather {
  static constexpr int kTaps = kOverlap ? 8 : 1;
  static constexpr int kPartsAtOnce = kOverlap ? 1 : 4;  // whose loads are all on their way together
  using Vector = cutlass::AlignedArray<Element, kGroup>;

  CUTLASS_DEVICE static Voxel voxel(GatherParams const& p, int number) {
    Voxel v;
    int rest = number;
    if constexpr (kChannelsLast) p.divide_groups(rest, v.c, rest);
    p.divide_w(rest, v.at[2], rest);
    p.divide_h(rest, v.at[1], rest);
    p.divide_d(rest, v.at[0], rest);
    v.n = rest;
    if constexpr (!kChannelsLast) p.divide_groups(v.n, v.c, rest);
    v.c *= kGroup;
    return v;
  }

  CUTLASS_DEVICE static int64_t offset(int64_t const (&stride)[5], Voxel const& v) {
    return v.n * stride[0] + v.c * stride[1] + v.at[0] * stride[2] + v.at[1] * stride[3] + v.at[2] * stride[4];
  }

  CUTLASS_DEVICE static void run(GatherParams const& p) {
    int const number = int(blockIdx.x) * kGatherThreads + int(threadIdx.x);
    bool const inside = number < p.outputs;
    Voxel const at = voxel(p, inside ? number : 0);
    int const count = inside ? min(kGroup, p.tail.channels - at.c) : 0;
    int const column = p.channel_step * p.column_floats;
    Taps const d(p, p.axis[0], at.at[0]), h(p, p.axis[1], at.at[1]), w(p, p.axis[2], at.at[2]);
    int const base = at.n * p.volume * p.position_floats + at.c * column;
    int from[kTaps];
    bool live[kTaps];
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTaps; ++t) {
      from[t] = base + d.offset[t / 4] + h.offset[t / 2 % 2] + w.offset[t % 2];
      live[t] = inside && d.live[t / 4] && h.live[t / 2 % 2] && w.live[t % 2];
    }
    float bias[kGroup], add[kGroup];
    load_tail<kGroup>(p, at, count, bias, add);
    cutlass::Array<float, kGroup> value;
    value.clear();
    wait_for_previous_kernel();
#pragma unroll kPartsAtOnce
    for (int part = 0; part < p.parts; ++part) {
      float const* const sums = p.sums + int64_t(part) * p.part_floats;
      CUTLASS_PRAGMA_UNROLL
      for (int t = 0; t < kTaps; ++t) {
        if (live[t]) add_columns(p, sums + from[t], column, count, value);
      }
    }
    apply_tail<kGroup>(p.tail, value, bias, add);
    float look = 0.f;
    Vector rounded;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kGroup; ++c) {
      look = fmaf(value[c], 0.f, look);
      rounded[c] = Element(value[c]);
    }
    auto* const to = static_cast<Element*>(p.tail.y) + offset(p.y_stride, at);
    if (kChannelsLast && p.vector_y) {
      if (count > 0) *reinterpret_cast<Vector*>(to) = rounded;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kGroup; ++c) {
        if (c < count) to[c * p.y_stride[1]] = rounded[c];
      }
    }
    if (look == look) return;
    // A thread rereads only what it wrote itself.
#pragma unroll 1
    for (int c = 0; c < count; ++c) recompute(p, number, c);
  }

  /// An output that came out nan, by plain fp32 multiply-adds over the taps that reach it (sm80/tail.hpp says why).
  __device__ __noinline__ static void recompute(GatherParams const& p, int number, int channel) {
    Voxel v = voxel(p, number);
    v.c += channel;
    auto* const y = static_cast<Element*>(p.tail.y) + offset(p.y_stride, v);
    float const stored = to_float(*y);
    float bias[1], add[1];
    load_tail<1>(p, v, 1, bias, add);
    if (stored == stored || bias[0] != bias[0] || add[0] != add[0]) return;
    float sum = 0.f;
#pragma unroll 1
    for (int taps = 0; taps < kTaps; ++taps) {
      auto const* x = static_cast<Element const*>(p.x) + v.n * p.x_stride[0];
      auto const* weight = static_cast<Element const*>(p.weight) + v.c * p.weight_stride[1];
      bool live = true;
#pragma unroll 1
      for (int i = 0; i < 3; ++i) {
        Axis const& axis = p.axis[i];
        int const t = taps >> i & 1;
        int j, residue;
        axis.stride(j, residue, i == 0 ? v.at[0] : i == 1 ? v.at[1] : v.at[2]);
        int const input = j + axis.base[residue] - t * axis.input_step;
        live = live && t < axis.taps[residue] && input >= 0 && input < axis.in_size;
        x += input * p.x_stride[2 + i];
        weight += (axis.first_tap[residue] + t * axis.tap_distance) * p.weight_stride[2 + i];
      }
#pragma unroll 1
      for (int k = 0; live && k < p.in_channels; ++k) {
        sum = fmaf(operand(x[k * p.x_stride[1]]), operand(weight[k * p.weight_stride[0]]), sum);
      }
    }
    float value[1] = {sum};
    apply_tail<1>(p.tail, value, bias, add);
    *y = Element(value[0]);
  }

  CUTLASS_DEVICE static float operand(Element value) {
    return kTf32 ? round_to_tf32(to_float(value)) : to_float(value);
  }

  /// Of one tap, for the channels of a group.
  CUTLASS_DEVICE static void add_columns(GatherParams const& p, float const* from, int step, int count,
                                         cutlass::Array<float, kGroup>& sum) {
    if (kChannelsLast && p.vector_sums) {
      float4 const four = __ldcg(reinterpret_cast<float4 const*>(from));
      sum[0] += four.x;
      sum[1] += four.y;
      sum[2] += four.z;
      sum[3] += four.w;
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kGroup; ++c) {
      if (c < count) sum[c] += __ldcg(from + c * step);
    }
  }

  template <int kCount>
  CUTLASS_DEVICE static void load_tail(GatherParams const& p, Voxel const& v, int count, float* bias, float* add) {
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kCount; ++c) {
      bias[c] = add[c] = 0.f;
      if (p.tail.bias && c < count)
        bias[c] = to_float(static_cast<Element const*>(p.tail.bias)[(v.c + c) * p.tail.bias_stride]);
    }
    if (p.tail.add == nullptr || count == 0) return;
    auto const* const from = static_cast<Element const*>(p.tail.add) + offset(p.add_stride, v);
    if (kChannelsLast && kCount > 1 && p.vector_add) {
      Vector const all = *reinterpret_cast<Vector const*>(from);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kCount; ++c) add[c] = to_float(all[c]);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kCount; ++c) {
        if (c < count) add[c] = to_float(from[c * p.add_stride[1]]);
      }
    }
  }
};

template <class Gather>
__global__ void __launch_bounds__(kGatherThreads, 6) gather_kernel(__grid_constant__ GatherParams const params) {
  Gather::run(params);
}

}  // namespace convt3d::sm80::columns
