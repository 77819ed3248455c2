// SPDX-License-Identifier: Apache-2.0
//
// Where a thread's outputs lie, and its accesses to add and y: 16 bytes where every vector starts at a multiple of
// them, a unit or an element at a time elsewhere.
#pragma once

#include <cuda_runtime.h>

#include "sm80/instructions.hpp"
#include "sm80/patch/params.hpp"

namespace convt3d::sm80::patch {

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Packet {
  T v[kCount];
};

template <class K>
using Vector = Packet<typename K::Element, K::F::kVector>;

/// A voxel of x.
struct Position {
  int n, d, h, w;
  __device__ int64_t offset(int64_t const (&stride)[4]) const {
    return n * stride[0] + d * stride[1] + h * stride[2] + w * stride[3];
  }
};

__device__ inline Position find_position(Params const& p, int index) {
  Position at;
  int rest;
  p.divide_w(rest, at.w, index);
  p.divide_h(rest, at.h, rest);
  p.divide_d(at.n, at.d, rest);
  return at;
}

/// A vector's patch, of its first position. Where it is more than one access, the others are looked for then.
struct Spot {
  int64_t y, add;
};

__device__ inline Spot find_spot(Params const& p, int index) {
  Position const at = find_position(p, min(index, p.positions - 1));
  return {at.offset(p.y.position), at.offset(p.add.position)};
}

__device__ inline float load_element(float const* from) { return __ldg(from); }
__device__ inline __half load_element(__half const* from) { return __ldg(from); }
__device__ inline __nv_bfloat16 load_element(__nv_bfloat16 const* from) { return __ldg(from); }

__device__ inline uint4 load_words(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

/// 16 bytes, asynchronously: copied, or zeroed without a look at `from`. The rest of its 256 bytes comes into the L2
/// cache, since neighbouring lanes, or the warp's next group, ask for that.
__device__ inline void copy_or_zero(uint32_t to, void const* from, bool copy) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copy ? 16 : 0)
               : "memory");
}

/// `Access::kUnits` and `kElements`: calls `visit_unit(position, offset)` or `visit_element(index, offset)`. The first
/// position has the index `first` and its patch the offset `spot`.
template <class K, class VisitUnit, class VisitElement>
__device__ void visit(Params const& p, Side const& side, int first, int64_t spot, int64_t unit_offset, int elements,
                      VisitUnit const& visit_unit, VisitElement const& visit_element) {
  using F = typename K::F;
  int row, w;
  p.divide_w(row, w, first);
#pragma unroll
  for (int i = 0; i < F::kVectorPositions; ++i) {
    if (first + i >= p.positions || elements == 0) continue;
    int64_t const offset = unit_offset + (w + i < p.width ? spot + i * side.position[3]
                                                          : find_position(p, first + i).offset(side.position));
    if (side.access == Access::kUnits) {
      visit_unit(i, offset);
    } else {
#pragma unroll
      for (int e = 0; e < F::kUnit; ++e) {
        if (e < elements) visit_element(i * F::kUnit + e, offset + e * side.element);
      }
    }
  }
}

/// A unit's add at all positions of the thread, the first of which is `first`, in accesses of any kind. Zero where
/// there is none.
template <class K>
__device__ void load_add(Params const& p, int first, Spot const (&spots)[K::kRuns][K::F::kVectors], int64_t unit_offset,
                         int elements, Vector<K> (&to)[K::kRuns][K::F::kVectors]) {
  using F = typename K::F;
  using Element = typename K::Element;
  using UnitPacket = Packet<Element, F::kUnit>;
  Element const* const base = static_cast<Element const*>(p.add.base);
#pragma unroll
  for (int run = 0; run < K::kRuns; ++run) {
#pragma unroll
    for (int v = 0; v < F::kVectors; ++v) {
      reinterpret_cast<uint4&>(to[run][v]) = uint4{};
      if (p.add.access == Access::kNone) continue;
      int const index = first + run * F::kRunPositions + F::kVectorStep * v;
      int64_t const spot = spots[run][v].add;
      if (p.add.access == Access::kVectors) {
        if (index >= p.positions || elements == 0) continue;
        reinterpret_cast<uint4&>(to[run][v]) = __ldg(reinterpret_cast<uint4 const*>(base + spot + unit_offset));
        continue;
      }
      visit<K>(
          p, p.add, index, spot, unit_offset, elements,
          [&](int i, int64_t offset) {
            UnitPacket const packet = *reinterpret_cast<UnitPacket const*>(base + offset);
#pragma unroll
            for (int e = 0; e < F::kUnit; ++e) to[run][v].v[i * F::kUnit + e] = packet.v[e];
          },
          [&](int i, int64_t offset) { to[run][v].v[i] = load_element(base + offset); });
    }
  }
}

/// `index`: the vector's first position.
template <class K>
__device__ void store_vector(Params const& p, int index, int64_t spot, int64_t unit_offset, int elements,
                             Vector<K> const& vector) {
  using F = typename K::F;
  using Element = typename K::Element;
  using UnitPacket = Packet<Element, F::kUnit>;
  Element* const base = static_cast<Element*>(p.y.base);
  if (K::kQuick || p.y.access == Access::kVectors) {
    if (index < p.positions && elements > 0) {
      *reinterpret_cast<uint4*>(base + spot + unit_offset) = reinterpret_cast<uint4 const&>(vector);
    }
    return;
  }
  visit<K>(
      p, p.y, index, spot, unit_offset, elements,
      [&](int i, int64_t offset) {
        UnitPacket packet;
#pragma unroll
        for (int e = 0; e < F::kUnit; ++e) packet.v[e] = vector.v[i * F::kUnit + e];
        *reinterpret_cast<UnitPacket*>(base + offset) = packet;
      },
      [&](int i, int64_t offset) { base[offset] = vector.v[i]; });
}

}  // namespace convt3d::sm80::patch
