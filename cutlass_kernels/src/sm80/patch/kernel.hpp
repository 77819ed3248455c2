// SPDX-License-Identifier: Apache-2.0
//
// The patch-expansion kernel. A block keeps the weights of its units in shared memory, as instructions read them. A
// warp takes a tile of positions at a time, keeps their input channels in registers, and goes through the units:
// products, then bias, add and activation, straight to global memory, since a thread has 16 neighbouring bytes of y.
// Nothing is shared between warps after the start, and so nobody waits for another.
//
// There are few products for each byte: what matters is that enough of add is under way. Every lane copies what it will
// need, asynchronously, a group ahead into places of its own in shared memory, which cost no registers.
#pragma once

#include <type_traits>

#include "convt3d/numerics.hpp"
#include "sm80/activate.hpp"
#include "sm80/instructions.hpp"
#include "sm80/patch/memory.hpp"
#include "sm80/patch/params.hpp"
#include "sm80/patch/units.hpp"
#include "sm80/scalar.hpp"
#include "sm80/split.hpp"

namespace convt3d::sm80::patch {

struct Tf32 {
  using Element = float;
  using Operand = cutlass::tfloat32_t;
  static constexpr int kParts = 1;
};
struct Ieee {
  using Element = float;
  using Operand = cutlass::tfloat32_t;
  static constexpr int kParts = 2;  // of an operand: high and low
};
struct Half {
  using Element = __half;
  using Operand = cutlass::half_t;
  static constexpr int kParts = 1;
};
struct Bfloat {
  using Element = __nv_bfloat16;
  using Operand = cutlass::bfloat16_t;
  static constexpr int kParts = 1;
};

/// kSteps: of input channels, at most. kQuick: add and y are accessed in vectors, and the activation is one of few
/// instructions (is_quick()).
template <class Arithmetic_, int kUnit, int kSteps_, bool kQuick_>
struct Kernel {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  using F = Form<sizeof(Element), kUnit>;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kQuick = kQuick_;
  static constexpr int kParts = Arithmetic::kParts;

  // Registers for the operands of x in a tile of so many runs.
  static constexpr int operand_registers(int runs) { return 2 * kSteps * runs * F::kColumnBlocks * kParts; }
  static constexpr int choose_runs() {
    int runs = kStageVectors / F::kVectors;  // accesses of a thread at a time
    while (runs > 1 && operand_registers(runs) > 96) runs /= 2;
    return runs;
  }
  static constexpr int kRuns = choose_runs();
  static constexpr int kColumns = kRuns * F::kColumnBlocks;  // instructions for a tile
  static constexpr int kTile = kRuns * F::kRunPositions;     // positions
  // What a thread must hold decides how many there may be: nothing is to be spilled. bfloat16 needs a few more
  // registers.
  static constexpr int kHeld = operand_registers(kRuns);
  static constexpr int kMostHeld = std::is_same_v<Element, __nv_bfloat16> ? 16 : 32;
  static constexpr int kThreads = !kQuick ? 256 : kHeld <= kMostHeld ? 512 : kHeld <= 64 ? 384 : 256;

  // Sums of as many products are added up with a rounding: a tensor core cuts its sums.
  static constexpr int kChunk = 64 / F::kStepChannels < kSteps ? 64 / F::kStepChannels : kSteps;
  static constexpr bool kChunks = kChunk < kSteps;

  using Sums = float[F::kRowBlocks][kColumns][4];
  using Operands = uint32_t[kParts][kColumns][kSteps][2];
};

// ---- operands -------------------------------------------------------------------------------------------------------

/// The input channels of the lane's column in every instruction, as they lie in memory. Past the last position they are
/// that one's.
template <class K>
__device__ void fetch_x(Params const& p, int first, uint32_t (&to)[K::kColumns][K::kSteps][2]) {
  using Element = typename K::Element;
  using F = typename K::F;
  int const lane = threadIdx.x % kLanes, column = lane / 4, quad = lane % 4;
  auto const of_column = [&](int c) {
    int const run = c / F::kColumnBlocks, j = c % F::kColumnBlocks;
    int const position = min(first + run * F::kRunPositions + F::position(j, column), p.positions - 1);
    return static_cast<Element const*>(p.x) + find_position(p, position).offset(p.x_position);
  };
  if (p.x_in_vectors) {
#pragma unroll
    for (int c = 0; c < K::kColumns; ++c) {
      Element const* const x = of_column(c);
#pragma unroll
      for (int step = 0; step < K::kSteps; step += 2) {
        if (step >= p.steps) break;
        int const channel = F::channel(step, quad, 0);
        uint4 v{};
        if (channel < p.in_channels) v = __ldg(reinterpret_cast<uint4 const*>(x + channel));
        to[c][step][0] = v.x;
        to[c][step][1] = v.y;
        to[c][step + 1][0] = v.z;
        to[c][step + 1][1] = v.w;
      }
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < K::kColumns; ++c) {
    Element const* const x = of_column(c);
#pragma unroll
    for (int step = 0; step < K::kSteps; ++step) {
      if (step % 2 == 0 && step >= p.steps) break;
      Packet<Element, F::kSlots> v;
#pragma unroll
      for (int slot = 0; slot < F::kSlots; ++slot) {
        int const channel = F::channel(step, quad, slot);
        v.v[slot] = channel < p.in_channels ? load_element(x + channel * p.x_channel) : Element(0.f);
      }
      uint2 const words = reinterpret_cast<uint2 const&>(v);
      to[c][step][0] = words.x;
      to[c][step][1] = words.y;
    }
  }
}

template <class K>
__device__ void load_x(Params const& p, int first, typename K::Operands& to) {
  fetch_x<K>(p, first, to[0]);
  if constexpr (sizeof(typename K::Element) == 4) {
#pragma unroll
    for (int step = 0; step < K::kSteps; ++step) {
      if (step % 2 == 0 && step >= p.steps) break;
#pragma unroll
      for (int i = 0; i < 2 * K::kColumns; ++i) {
        uint32_t& word = to[0][i / 2][step][i % 2];
        if constexpr (K::kParts == 2) {
          Tf32Split const parts = split_for_tensor_core(bits_to_float(word));
          word = float_to_bits(parts.high);
          to[K::kParts - 1][i / 2][step][i % 2] = float_to_bits(parts.low);
        } else {
          word = round_bits_to_tf32(word);
        }
      }
    }
  }
}

// ---- products -------------------------------------------------------------------------------------------------------

/// sums += one part of the weights by one part of x, over the steps from `begin` on.
template <class K, int kBegin, int kEnd>
__device__ void multiply(typename K::Sums& sums, unsigned char const* fragments,
                         uint32_t const (&x)[K::kColumns][K::kSteps][2], int steps) {
  using F = typename K::F;
#pragma unroll
  for (int step = kBegin; step < kEnd; ++step) {
    if (step % 2 == 0 && step >= steps) break;
#pragma unroll
    for (int m = 0; m < F::kRowBlocks; ++m) {
      uint4 const a = *reinterpret_cast<uint4 const*>(fragments + (m * steps + step) * (kLanes * 16));
      uint32_t const words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int c = 0; c < K::kColumns; ++c) {
        sm80::multiply(typename K::Arithmetic::Operand{}, sums[m][c], words, x[c][step][0], x[c][step][1]);
      }
    }
  }
}

template <class K, int kBegin = 0>
__device__ void multiply_all(typename K::Sums& sums, unsigned char const* fragments, int part_bytes,
                             typename K::Operands const& x, int steps) {
  if constexpr (kBegin < K::kSteps) {
    constexpr int kEnd = kBegin + K::kChunk;
    if (kBegin >= steps) return;
    typename K::Sums part{};
    if constexpr (K::kParts == 2) {  // the small products first
      multiply<K, kBegin, kEnd>(part, fragments + part_bytes, x[0], steps);
      multiply<K, kBegin, kEnd>(part, fragments, x[1], steps);
    }
    multiply<K, kBegin, kEnd>(part, fragments, x[0], steps);
#pragma unroll
    for (int m = 0; m < K::F::kRowBlocks; ++m) {
#pragma unroll
      for (int c = 0; c < K::kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][c][i] = kBegin == 0 ? part[m][c][i] : sums[m][c][i] + part[m][c][i];
      }
    }
    multiply_all<K, kEnd>(sums, fragments, part_bytes, x, steps);
  }
}

/// One sum by its definition, where the parts of an operand that is not finite made it nan.
template <class K>
__device__ float exact_sum(Params const& p, int position, int unit, int element) {
  using Element = typename K::Element;
  if (position >= p.positions || unit >= p.units) return 0.f;
  Unit const u = find_unit(p, K::F::kUnit, unit);
  int tap_w, channel;
  find_element(p, u, element, tap_w, channel);
  if (tap_w >= p.divide_kw.divisor || channel >= p.out_channels) return 0.f;
  Element const* const x = static_cast<Element const*>(p.x) + find_position(p, position).offset(p.x_position);
  Element const* const weight = static_cast<Element const*>(p.weight) + channel * p.weight_stride[1] +
                                u.tap_d * p.weight_stride[2] + u.tap_h * p.weight_stride[3] +
                                tap_w * p.weight_stride[4];
  float sum = 0.f;
  for (int k = 0; k < p.in_channels; ++k) {
    sum = fmaf(to_float(x[k * p.x_channel]), to_float(weight[k * p.weight_stride[0]]), sum);
  }
  return sum;
}

// ---- the tail -------------------------------------------------------------------------------------------------------

/// A group's outputs of the tile.
template <class K, class AddOf>
__device__ void finish(Params const& p, int first, typename K::Sums const& sums, UnitPlace<K::F::kUnit> const& unit,
                       Spot const (&spots)[K::kRuns][K::F::kVectors], AddOf const& add_of) {
  using F = typename K::F;
#pragma unroll
  for (int run = 0; run < K::kRuns; ++run) {
#pragma unroll
    for (int v = 0; v < F::kVectors; ++v) {
      Vector<K> const add = add_of(run, v);
      float value[F::kVector];
#pragma unroll
      for (int i = 0; i < F::kVector; ++i) {
        typename F::Register const r = F::result(v, i);
        value[i] = sums[r.row_block][run * F::kColumnBlocks + r.column_block][r.index] + unit.bias[i % F::kUnit];
        if (!p.add_after) value[i] += to_float(add.v[i]);
      }
      activate<F::kVector, K::kQuick>(p.activation, p.negative_slope, value);
      Vector<K> out;
#pragma unroll
      for (int i = 0; i < F::kVector; ++i) {
        if (p.add_after) value[i] += to_float(add.v[i]);
        convert(out.v[i], value[i]);
      }
      store_vector<K>(p, first + run * F::kRunPositions + F::kVectorStep * v, spots[run][v].y, unit.y, unit.elements,
                      out);
    }
  }
}

/// Where the parts of an infinity made sums nan, these by their definition: one after the other, by one piece of code.
template <class K>
__device__ void mend(Params const& p, typename K::Sums& sums, int tile, int unit) {
  using F = typename K::F;
  constexpr int kCount = F::kRowBlocks * K::kColumns * 4;
  static_assert(kCount <= 32, "a bit for each sum");
  float* const flat = &sums[0][0][0];
  uint32_t bad = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bad |= flat[i] == flat[i] ? 0u : 1u << i;
  while (bad != 0) {
    int const at = __ffs(static_cast<int>(bad)) - 1;
    bad &= bad - 1;
    int const column = at / 4 % K::kColumns, run = column / F::kColumnBlocks;
    int const position = tile * K::kTile + run * F::kRunPositions +
                         F::position(column % F::kColumnBlocks, static_cast<int>(threadIdx.x) % 4 * 2 + at % 2);
    float const sum = exact_sum<K>(p, position, unit, 2 * (at / 4 / K::kColumns) + at / 2 % 2);
#pragma unroll
    for (int i = 0; i < kCount; ++i) flat[i] = i == at ? sum : flat[i];
  }
}

/// A block's share: what its warps take of the tiles, for the units in its shared memory.
template <class K>
__device__ void run_tiles(Params const& p, unsigned char const* weights, UnitPlace<K::F::kUnit> const* units,
                          unsigned char* rings, int part_bytes, int first_group, int groups) {
  using F = typename K::F;
  constexpr int kWarps = K::kThreads / kLanes;
  int const lane = threadIdx.x % kLanes, row = lane / 4, quad = lane % 4;
  int const worker = static_cast<int>(blockIdx.x) / p.splits * kWarps + static_cast<int>(threadIdx.x) / kLanes;
  int const group_bytes = F::kRowBlocks * p.steps * (kLanes * 16);

  // Each lane's own: what it asks for, it reads.
  bool const has_add = p.add.access != Access::kNone;
  uint32_t const ring = cutlass::arch::cutlass_get_smem_pointer(rings) +
                        (static_cast<int>(threadIdx.x) / kLanes * kStages * kStageVectors * kLanes + lane) * 16;
  auto const ring_at = [&](int stage, int vector) { return ring + (stage * kStageVectors + vector) * (kLanes * 16); };
  auto const ask = [&](int group, Spot const(&spots)[K::kRuns][F::kVectors], int first, int end, int stage) {
    if (!has_add) return;
    if (group < end) {
      UnitPlace<F::kUnit> const& unit = units[group * kGroupUnits + row];
      auto const* const base = static_cast<typename K::Element const*>(p.add.base) + unit.add;
      bool const live = unit.elements > 0;
#pragma unroll
      for (int i = 0; i < K::kRuns * F::kVectors; ++i) {
        int const run = i / F::kVectors, v = i % F::kVectors;
        bool const inside = first + run * F::kRunPositions + F::kVectorStep * v < p.positions;
        copy_or_zero(ring_at(stage, i), base + spots[run][v].add, live && inside);
      }
    }
    commit_copies();
  };

  for (int item = worker; item < p.tiles * p.parts; item += p.workers) {
    int const tile = item / p.parts, part = item - tile * p.parts;
    int const begin = part * p.part_groups, end = min(begin + p.part_groups, groups);
    if (begin >= end) continue;
    int const first = tile * K::kTile + F::first_position(quad);
    Spot spots[K::kRuns][F::kVectors];
#pragma unroll
    for (int run = 0; run < K::kRuns; ++run) {
#pragma unroll
      for (int v = 0; v < F::kVectors; ++v) {
        spots[run][v] = find_spot(p, first + run * F::kRunPositions + F::kVectorStep * v);
      }
    }
    if constexpr (K::kQuick) ask(begin, spots, first, end, 0);
    typename K::Operands x;
    load_x<K>(p, tile * K::kTile, x);
    int stage = 0;
#pragma unroll 1
    for (int group = begin; group < end; ++group) {
      UnitPlace<F::kUnit> const& unit = units[group * kGroupUnits + row];
      Vector<K> add[K::kQuick ? 1 : K::kRuns][F::kVectors];
      if constexpr (K::kQuick) {
        ask(group + 1, spots, first, end, stage ^ 1);
      } else {
        load_add<K>(p, first, spots, unit.add, unit.elements, add);
      }
      typename K::Sums sums;
      multiply_all<K>(sums, weights + group * group_bytes + lane * 16, part_bytes, x, p.steps);
      if constexpr (K::kParts == 2) mend<K>(p, sums, tile, (first_group + group) * kGroupUnits + row);
      if constexpr (K::kQuick) {
        if (has_add) wait_for_copies<1>();
        finish<K>(p, first, sums, unit, spots, [&](int run, int v) {
          if (!has_add) return Vector<K>{};
          uint4 const words = load_words(ring_at(stage, run * F::kVectors + v));
          return reinterpret_cast<Vector<K> const&>(words);
        });
        stage ^= 1;
      } else {
        finish<K>(p, first, sums, unit, spots, [&](int run, int v) { return add[run][v]; });
      }
    }
    if constexpr (K::kQuick) wait_for_copies<0>();  // nothing is on its way into the next tile's places
  }
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1) patch_kernel(__grid_constant__ Params const p) {
  using F = typename K::F;
  extern __shared__ __align__(16) unsigned char shared[];
  int const split = static_cast<int>(blockIdx.x) % p.splits;
  int const first_group = split * p.split_groups;
  int const groups = min(p.split_groups, p.groups - first_group);
  int const part_bytes = p.split_groups * F::kRowBlocks * p.steps * (kLanes * 16);
  auto* const units = reinterpret_cast<UnitPlace<F::kUnit>*>(shared + part_bytes * K::kParts);
  auto* const rings = reinterpret_cast<unsigned char*>(units + p.split_groups * kGroupUnits);
  load_units<K>(p, first_group * kGroupUnits, groups * kGroupUnits, units);
  wait_for_previous_kernel();
  copy_weights<K>(p, split, shared, part_bytes * K::kParts);
  __syncthreads();
  run_tiles<K>(p, shared, units, rings, part_bytes, first_group, groups);
}

}  // namespace convt3d::sm80::patch
