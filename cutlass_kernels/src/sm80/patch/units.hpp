// SPDX-License-Identifier: Apache-2.0
//
// Units: which tap and channels each is, where its outputs lie, and the pre-kernel that brings its weights into the
// order in which the instructions take them.
#pragma once

#include "convt3d/numerics.hpp"
#include "cutlass/arch/memory.h"
#include "dependent_launch.hpp"
#include "sm80/patch/memory.hpp"
#include "sm80/patch/params.hpp"
#include "sm80/scalar.hpp"
#include "sm80/split.hpp"

namespace convt3d::sm80::patch {

using scalar::convert;
using scalar::to_float;

/// A unit in shared memory.
template <int kUnit>
struct alignas(16) UnitPlace {
  int64_t y, add;
  float bias[kUnit];
  int elements;  // 0: there is no such unit
};

struct Unit {
  int tap_d, tap_h, tap_w;  // tap_w: of its first element
  int channel;              // of its first element
  int first;                // element of its run, channels last
};

__device__ inline Unit find_unit(Params const& p, int kUnit, int index) {
  Unit u{};
  int taps, in_run;
  p.divide_run(taps, in_run, index);
  int run;
  p.divide_runs(taps, run, taps);
  p.divide_kh(u.tap_d, u.tap_h, taps);
  if (p.last) {
    u.first = in_run * kUnit;
    u.tap_w = run;
    u.channel = u.first;  // of a run of several taps: see element_of
  } else {
    u.channel = in_run;
  }
  return u;
}

/// Tap along W and channel of an element of a unit.
__device__ inline void find_element(Params const& p, Unit const& u, int element, int& tap_w, int& channel) {
  if (!p.last) {
    tap_w = element;
    channel = u.channel;
    return;
  }
  int more;
  p.divide_channels(more, channel, u.first + element);
  tap_w = u.tap_w + more;
}

__device__ inline int element_count_of(Params const& p, Unit const& u, int kUnit) {
  return min(kUnit, p.last ? p.run - u.first : p.divide_kw.divisor);
}

template <class K>
__device__ void load_units(Params const& p, int first_unit, int units, UnitPlace<K::F::kUnit>* to) {
  using Element = typename K::Element;
  constexpr int kUnit = K::F::kUnit;
  for (int i = threadIdx.x; i < units; i += K::kThreads) {
    UnitPlace<kUnit> place{};
    int const index = first_unit + i;
    if (index < p.units) {
      Unit const u = find_unit(p, kUnit, index);
      auto const offset = [&](Side const& side) {
        return u.tap_d * side.tap[0] + u.tap_h * side.tap[1] + u.tap_w * side.tap[2] + u.channel * side.channel;
      };
      place.y = offset(p.y);
      place.add = offset(p.add);
      place.elements = element_count_of(p, u, kUnit);
      for (int e = 0; e < place.elements; ++e) {
        int tap_w, channel;
        find_element(p, u, e, tap_w, channel);
        place.bias[e] =
            p.bias == nullptr ? 0.f : to_float(static_cast<Element const*>(p.bias)[channel * p.bias_stride]);
      }
    }
    to[i] = place;
  }
}

/// The pre-kernel: a thread writes a lane's 16 bytes of one instruction's weights, or both parts of them.
template <class Arithmetic, int kUnit>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ Params const p) {
  using Element = typename Arithmetic::Element;
  using F = Form<sizeof(Element), kUnit>;
  let_next_kernel_start();
  int const index = static_cast<int>(blockIdx.x * kPrepareThreads + threadIdx.x);
  int const lane = index % kLanes;
  int const step = index / kLanes % p.steps;
  int const fragment = index / kLanes / p.steps;
  int const block = fragment % F::kRowBlocks, group = fragment / F::kRowBlocks;
  if (group >= p.splits * p.split_groups) return;
  int const unit = group * kGroupUnits + lane / 4;
  Packet<Element, F::kVector> high{}, low{};
  if (unit < p.units) {
    Unit const u = find_unit(p, kUnit, unit);
    int const elements = element_count_of(p, u, kUnit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const element = 2 * block + half;
      if (element >= elements) continue;
      int tap_w, out;
      find_element(p, u, element, tap_w, out);
      Element const* const weight = static_cast<Element const*>(p.weight) + out * p.weight_stride[1] +
                                    u.tap_d * p.weight_stride[2] + u.tap_h * p.weight_stride[3] +
                                    tap_w * p.weight_stride[4];
#pragma unroll
      for (int slot = 0; slot < F::kSlots; ++slot) {
        int const channel = F::channel(step, lane % 4, slot);
        if (channel >= p.in_channels) continue;
        Element const value = load_element(weight + channel * p.weight_stride[0]);
        int const at = F::weight_slot(half, slot);
        if constexpr (Arithmetic::kParts == 2) {
          Tf32Split const parts = split_for_tensor_core(value);
          high.v[at] = parts.high;
          low.v[at] = parts.low;
        } else if constexpr (sizeof(Element) == 4) {
          high.v[at] = round_to_tf32(value);
        } else {
          high.v[at] = value;
        }
      }
    }
  }
  int const part_bytes = p.split_groups * F::kRowBlocks * p.steps * (kLanes * 16);
  int const split = group / p.split_groups;
  auto* const to = static_cast<unsigned char*>(p.prepared) + int64_t(index) * 16 +
                   int64_t(split) * (Arithmetic::kParts - 1) * part_bytes;
  *reinterpret_cast<Packet<Element, F::kVector>*>(to) = high;
  if constexpr (Arithmetic::kParts == 2) *reinterpret_cast<Packet<Element, F::kVector>*>(to + part_bytes) = low;
}

/// A block's share of them into shared memory.
template <class K>
__device__ void copy_weights(Params const& p, int split, unsigned char* to, int bytes) {
  auto const* const from = static_cast<unsigned char const*>(p.prepared) + int64_t(split) * bytes;
  uint32_t const address = cutlass::arch::cutlass_get_smem_pointer(to);
  for (int i = threadIdx.x * 16; i < bytes; i += K::kThreads * 16) copy_or_zero(address + i, from + i, true);
  commit_copies();
  wait_for_copies<0>();
}

}  // namespace convt3d::sm80::patch
