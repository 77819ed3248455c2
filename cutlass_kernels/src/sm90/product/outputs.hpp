// SPDX-License-Identifier: Apache-2.0
//
// The product kernel's outputs: a thread's sums are of two neighbouring channels after it has exchanged some with
// another lane, and go to y with bias, add and activation, a pair of channels at a time, or one after the other where
// channels are apart.
#pragma once

#include <type_traits>

#include "convt3d/activation.hpp"
#include "sm90/cold_path.hpp"
#include "sm90/collective_mainloop.hpp"
#include "sm90/product/walk_boxes.hpp"
#include "sm90/tails.hpp"

namespace convt3d::sm90::product {

/// Where a position's first output lies, -1 past the end, and the add of it.
struct alignas(8) Places {
  int32_t y[kPositions], add[kPositions];
};

template <class T, bool kApart>
struct Outlet {
  static constexpr bool kWide = sizeof(T) == 4;

  /// Two neighbouring channels in memory.
  using Pair = std::conditional_t<kWide, float2, uint32_t>;

  CUTLASS_DEVICE static float2 unpack(Pair v) {
    if constexpr (kWide) {
      return v;
    } else {
      return make_float2(Element<T>::from_bits(v & 0xffffu), Element<T>::from_bits(v >> 16));
    }
  }
  CUTLASS_DEVICE static Pair pack(float a, float b) {
    if constexpr (kWide) {
      return make_float2(a, b);
    } else {
      return Element<T>::bits(Element<T>::from_float(a)) | Element<T>::bits(Element<T>::from_float(b)) << 16;
    }
  }

  /// Of two channels, the second one `step` elements from the first, of which there may be one alone.
  CUTLASS_DEVICE static Pair load_pair(T const* from, int step, int there) {
    if constexpr (!kApart) {
      return *reinterpret_cast<Pair const*>(from);
    } else if constexpr (kWide) {
      return make_float2(from[0], there > 1 ? from[step] : 0.f);
    } else {
      auto const* const bits = reinterpret_cast<uint16_t const*>(from);
      return bits[0] | (there > 1 ? static_cast<uint32_t>(bits[step]) << 16 : 0);
    }
  }
  CUTLASS_DEVICE static void store_pair(T* to, int step, Pair v, int there) {
    if constexpr (!kApart) {
      *reinterpret_cast<Pair*>(to) = v;
    } else if constexpr (kWide) {
      to[0] = v.x;
      if (there > 1) to[step] = v.y;
    } else {
      auto* const bits = reinterpret_cast<uint16_t*>(to);
      bits[0] = static_cast<uint16_t>(v);
      if (there > 1) bits[step] = static_cast<uint16_t>(v >> 16);
    }
  }

  /// Where a thread's outputs are: of its column pair, at positions 8 i + 2 (lane mod 4) and the one behind it, of
  /// eights of positions from number `begin` on.
  struct Outputs {
    ProductParams const& p;
    Places const& places;
    Column const& column;
    int there, lane, begin;  // there: how many of the two channels
    float bias[2];

    CUTLASS_DEVICE Outputs(ProductParams const& p, Places const& places, Column const& column, int there, int lane,
                           int begin)
        : p(p), places(places), column(column), there(there), lane(lane), begin(begin), bias{} {
      EpilogueParams const& e = p.epilogue;
      if (e.has_bias) {
        T const* const from = static_cast<T const*>(e.bias) + column.channel * e.bias_stride;
        bias[0] = Element<T>::to_float(from[0]);
        bias[1] = Element<T>::to_float(from[!kApart || there > 1 ? e.bias_stride : 0]);
      }
    }
    /// Whether there is an output of this thread at a place.
    template <bool kAll>
    CUTLASS_DEVICE bool exists(int place) const {
      return (kAll || place >= 0) && (!kApart || there > 0);
    }
    CUTLASS_DEVICE int2 two(int const* of, int i) const {
      return *reinterpret_cast<int2 const*>(of + (begin + i) * 8 + lane % 4 * 2);
    }
    /// add of `kCount` eights of positions from number `first` on.
    template <bool kAll, int kCount>
    CUTLASS_DEVICE void load_add(int first, Pair (&v)[2 * kCount]) const {
      if (!p.cold.has_add) return;
      auto const* const add = static_cast<T const*>(p.epilogue.add);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        int2 const at = two(places.add, first + i), to = two(places.y, first + i);
        if (exists<kAll>(to.x)) v[2 * i] = Outlet::load_pair(add + (column.add + at.x), p.add_step[1], there);
        if (exists<kAll>(to.y)) v[2 * i + 1] = Outlet::load_pair(add + (column.add + at.y), p.add_step[1], there);
      }
    }
    /// Stores these, whose sums are `sums`; what is nan where a sum is not finite goes into `look`.
    template <bool kAll, int kCount, class Activation>
    CUTLASS_DEVICE void store(int first, float const* sums, Pair const (&v)[2 * kCount], Activation const& activation,
                              float& look) const {
      bool const odd = lane / 4 % 2 != 0;
      auto* const y = static_cast<T*>(p.cold.y);
      EpilogueParams const& e = p.epilogue;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kCount; ++i) {
        int2 const places_y = two(places.y, first + i / 2);
        int const to = i % 2 == 0 ? places_y.x : places_y.y;
        float const v0 = sums[i / 2 * 4 + i % 2], v1 = sums[i / 2 * 4 + 2 + i % 2];
        float const other = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 4);
        float a = odd ? other : v0, b = odd ? v1 : other;
        if (kWide) {  // an infinity becomes nan: what rounded to it on the way may have been finite
          a = fmaf(a, 0.f, a);
          b = fmaf(b, 0.f, b);
        }
        look = fmaf(a, 0.f, fmaf(b, 0.f, look));
        float2 const of_add = unpack(v[i]);
        Pair const both = pack(in_order(a + bias[0], of_add.x, e.add_after != 0, activation),
                               in_order(b + bias[1], of_add.y, e.add_after != 0, activation));
        if (exists<kAll>(to)) Outlet::store_pair(y + (column.y + to), p.y_step[1], both, there);
      }
    }
  };

  /// Of eights of positions from number `begin` on; `kAll`: all positions of the tile exist. Returns what is nan where
  /// a sum is not finite.
  template <bool kAll, int kRegisters>
  CUTLASS_DEVICE static float store(ProductParams const& p, Places const& places, Column const& c, int there, int lane,
                                    int begin, float (&sums)[kRegisters]) {
    EpilogueParams const& e = p.epilogue;
    Outputs const outputs(p, places, c, there, lane, begin);
    if (!is_linear(e.activation)) return store_any<kAll>(e, outputs, sums);
    // Eights of positions whose add is on its way together: as many as registers allow.
    constexpr int kBatch = kAll ? (kWide ? 2 : 4) : (kWide ? 1 : 2);
    auto const activation = [&](float t) { return LinearTail::apply(e, t); };
    float look = 0.f;
    Pair add[2][2 * kBatch] = {};  // of a batch, and of the next
    outputs.template load_add<kAll, kBatch>(0, add[0]);
    CUTLASS_PRAGMA_UNROLL
    for (int batch = 0; batch < kRegisters / 4; batch += kBatch) {
      asm volatile("" ::: "memory");  // no batch before its turn: registers are scarce
      if (batch + kBatch < kRegisters / 4) {
        outputs.template load_add<kAll, kBatch>(batch + kBatch, add[(batch / kBatch + 1) % 2]);
      }
      outputs.template store<kAll, kBatch>(batch, sums + batch * 4, add[batch / kBatch % 2], activation, look);
    }
    return look;
  }

  /// In a loop for each activation, for the cache of instructions: it is always the first sums' turn.
  template <bool kAll, int kRegisters>
  CUTLASS_DEVICE static float store_any(EpilogueParams const& e, Outputs const& outputs, float (&sums)[kRegisters]) {
    constexpr int kBatch = kWide ? 1 : 2;
    float look = 0.f;
    with_activation(e.activation, [&](auto function) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int batch = 0; batch < kRegisters / 4; batch += kBatch) {
        Pair add[2 * kBatch] = {};
        outputs.template load_add<kAll, kBatch>(batch, add);
        outputs.template store<kAll, kBatch>(
            batch, sums, add, [&](float t) { return function(t, e.negative_slope); }, look);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRegisters - 4 * kBatch; ++i) sums[i] = sums[i + 4 * kBatch];
      }
    });
    return look;
  }
};

}  // namespace convt3d::sm90::product
