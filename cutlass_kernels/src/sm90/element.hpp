// SPDX-License-Identifier: Apache-2.0
//
// The element types in 16-byte vectors: conversion from and to fp32, and which values may spoil a sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "convt3d/numerics.hpp"
#include "cutlass/cutlass.h"
#include "sm90/split.hpp"

namespace convt3d::sm90 {

/// Whether the positions are wgmma's A (geometry.hpp: weights_first).
template <class T, bool kChannelsLast>
constexpr bool kPositionsFirst = kChannelsLast && !std::is_same_v<T, SplitFloat>;

/// Magnitudes from these bits on may make a sum non-finite, or are: a CTA that meets one takes the cold path. For
/// fp32 and bf16, 2^60; products of fp16 values never come near the end of fp32's range, only inf and nan count.
template <class T>
struct Element;

template <>
struct Element<float> {
  static constexpr int kVector = 4;
  static constexpr uint32_t kSuspectBits = (127u + 60u) << 23;

  CUTLASS_DEVICE static float to_float(float v) { return v; }
  CUTLASS_DEVICE static float from_float(float v) { return v; }
  /// What the tensor cores multiply.
  CUTLASS_DEVICE static float operand(float v) { return round_to_tf32(v); }
  CUTLASS_DEVICE static uint32_t bits(float v) { return __float_as_uint(v); }
  CUTLASS_DEVICE static bool suspect(float v) { return (bits(v) & 0x7fffffffu) >= kSuspectBits; }

  CUTLASS_DEVICE static void unpack(uint4 const& v, float (&f)[4]) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }
  CUTLASS_DEVICE static uint4 pack(float const (&f)[4]) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
};

/// fp32 in ieee mode: the same in memory. The kernel learns from its sums which values it could not multiply.
template <>
struct Element<SplitFloat> : Element<float> {
  CUTLASS_DEVICE static float to_float(SplitFloat v) { return v.value; }
  CUTLASS_DEVICE static SplitFloat from_float(float v) { return {v}; }
  CUTLASS_DEVICE static float operand(SplitFloat v) { return v.value; }
  CUTLASS_DEVICE static uint32_t bits(SplitFloat v) { return __float_as_uint(v.value); }
};

/// Common to the 16-bit types, which differ in the conversion instructions alone.
template <class T, uint32_t kSuspect>
struct Element16 {
  static constexpr int kVector = 8;
  static constexpr uint32_t kSuspectBits = kSuspect;

  CUTLASS_DEVICE static float to_float(T v) { return static_cast<float>(v); }
  CUTLASS_DEVICE static float operand(T v) { return static_cast<float>(v); }
  CUTLASS_DEVICE static uint32_t bits(T v) { return *reinterpret_cast<uint16_t const*>(&v); }
  CUTLASS_DEVICE static bool suspect(T v) { return (bits(v) & 0x7fffu) >= kSuspectBits; }
};

template <>
struct Element<__half> : Element16<__half, 0x7c00u> {
  CUTLASS_DEVICE static __half from_float(float v) { return __float2half_rn(v); }
  CUTLASS_DEVICE static float from_bits(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  CUTLASS_DEVICE static void unpack(uint4 const& v, float (&f)[8]) {
    __half2 const* pairs = reinterpret_cast<__half2 const*>(&v);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float2 const two = __half22float2(pairs[i]);
      f[2 * i] = two.x;
      f[2 * i + 1] = two.y;
    }
  }
  CUTLASS_DEVICE static uint4 pack(float const (&f)[8]) {
    uint4 v;
    __half2* pairs = reinterpret_cast<__half2*>(&v);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Element<__nv_bfloat16> : Element16<__nv_bfloat16, (127u + 60u) << 7> {
  CUTLASS_DEVICE static __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
  CUTLASS_DEVICE static float from_bits(uint32_t bits) { return __uint_as_float(bits << 16); }  // of the lower half
  CUTLASS_DEVICE static void unpack(uint4 const& v, float (&f)[8]) {
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(words[i] << 16);
      f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  CUTLASS_DEVICE static uint4 pack(float const (&f)[8]) {
    uint4 v;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&v);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

/// Through the read-only cache.
template <class T>
CUTLASS_DEVICE T load_constant(T const* at) {
  return __ldg(at);
}
CUTLASS_DEVICE SplitFloat load_constant(SplitFloat const* at) { return {__ldg(&at->value)}; }

/// Not from a cache of this multiprocessor.
template <class T>
CUTLASS_DEVICE T load_written(T const* at) {
  return __ldcv(at);
}
CUTLASS_DEVICE SplitFloat load_written(SplitFloat const* at) { return {__ldcv(&at->value)}; }

// 16-byte accesses of shared memory, by 32-bit address. Written out, because the compiler splits stores of vectors that
// it would have to move together into neighbouring registers, and four-byte stores of rows conflict.
CUTLASS_DEVICE uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

CUTLASS_DEVICE uint2 load_shared_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

CUTLASS_DEVICE void store_shared(uint32_t address, uint4 const& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

CUTLASS_DEVICE void store_shared(uint32_t address, uint2 const& v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

/// What turns elements into operands besides their own value. In shared memory; read where it is used, since registers
/// are scarce.
template <class T>
struct OperandScale {
  CUTLASS_DEVICE OperandScale read() const { return {}; }
};

/// The extremes of what a loader thread has read: the largest magnitude, nan above all.
template <class T>
struct Extremes {
  uint32_t bits = 0;  // of both halves of a word at once; sign bits are cleared, so an integer maximum serves

  CUTLASS_DEVICE void see(uint4 const& v) {
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) bits = __vmaxu2(bits, words[i] & 0x7fff7fffu);
  }
  CUTLASS_DEVICE void see(Extremes const& other) { bits = __vmaxu2(bits, other.bits); }
  CUTLASS_DEVICE bool suspect() const {
    return (bits & 0xffffu) >= Element<T>::kSuspectBits || (bits >> 16) >= Element<T>::kSuspectBits;
  }
  /// Whether everything seen may take the fast form of the conversion to operands.
  CUTLASS_DEVICE bool tame(OperandScale<T>) const { return true; }
};

template <>
struct Extremes<float> {
  float value = 0.f;

  CUTLASS_DEVICE void see(uint4 const& v) {
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(fabsf(__uint_as_float(words[i]))));
    }
  }
  CUTLASS_DEVICE void see(Extremes const& other) { asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(other.value)); }
  CUTLASS_DEVICE bool suspect() const { return !(value < 1152921504606846976.f); }
  CUTLASS_DEVICE bool tame(OperandScale<float>) const {
    return value < 3.4e38f;
  }  // magnitudes for which cvt.rn.tf32 is right
};

/// From vectors of elements to operands in shared memory. `kAnyValue`: with values near the end of the range or nans,
/// which the rounding instruction turns into others.
template <class T>
struct Operands {
  CUTLASS_DEVICE static int slab_offset(int row, int group) { return sm90::slab_offset(row, group); }

  template <bool kAnyValue>
  CUTLASS_DEVICE static uint32_t word(uint32_t bits) {
    if constexpr (sizeof(T) == 2) {
      return bits;
    } else if constexpr (kAnyValue) {
      return round_bits_to_tf32(bits);
    } else {
      uint32_t r;
      asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(bits)));
      return r;
    }
  }

  template <bool kAnyValue>
  CUTLASS_DEVICE static void store(OperandScale<T>, uint32_t address, uint4 const& v) {
    store_shared(address,
                 make_uint4(word<kAnyValue>(v.x), word<kAnyValue>(v.y), word<kAnyValue>(v.z), word<kAnyValue>(v.w)));
  }
};

// ---- fp32 in ieee mode: two fp16 parts (split.hpp) ---------------------------------------------------------------

template <>
struct OperandScale<SplitFloat> {
  float factor;    // 2^k
  uint32_t limit;  // twice the bits of the smallest magnitude that is not tiny

  CUTLASS_DEVICE OperandScale read() const {
    OperandScale const volatile* const from = this;
    return {from->factor, from->limit};
  }
  /// In other words than Extremes, lest the compiler keeps what that computes for the few who count.
  CUTLASS_DEVICE unsigned tiny(uint32_t bits) const {
    float const value = __uint_as_float(bits);
    return fabsf(value) < __uint_as_float(limit >> 1) && value != 0.f ? 1 : 0;
  }
  CUTLASS_DEVICE unsigned count_tiny(uint4 const& v) const { return tiny(v.x) + tiny(v.y) + tiny(v.z) + tiny(v.w); }
};

/// Only the smallest magnitude is watched: the scale keeps all others in range. Infinite high parts have low parts that
/// are nan or infinite with the other sign, so sums of their products are nan whatever the weights are.
template <>
struct Extremes<SplitFloat> {
  uint32_t smallest = 0xffffffffu;  // twice its bits less one, which puts zero above all

  CUTLASS_DEVICE void see(uint4 const& v) {
    smallest = __vimin3_u32(smallest, 2 * v.x - 1, 2 * v.y - 1);
    smallest = __vimin3_u32(smallest, 2 * v.z - 1, 2 * v.w - 1);
  }
  CUTLASS_DEVICE void see(Extremes const& other) { smallest = min(smallest, other.smallest); }
  CUTLASS_DEVICE bool suspect() const { return false; }  // the consumers see it
  CUTLASS_DEVICE bool tame(OperandScale<SplitFloat> const&) const { return true; }
  CUTLASS_DEVICE bool tiny(OperandScale<SplitFloat> const& scale) const { return smallest < scale.limit - 1; }
};

template <>
struct Operands<SplitFloat> {
  CUTLASS_DEVICE static int slab_offset(int row, int group) { return split_slab_offset(row, group); }

  /// Two neighbouring channels: hi parts, and lo parts.
  CUTLASS_DEVICE static uint2 pair(OperandScale<SplitFloat> const& scale, uint32_t a, uint32_t b) {
    float const ta = __uint_as_float(a) * scale.factor;
    float const tb = __uint_as_float(b) * scale.factor;
    __half2 hi = __floats2half2_rn(ta, tb);
    float2 const high = __half22float2(hi);
    constexpr float kShift = 1 << kSplitShift;
    __half2 lo = __floats2half2_rn((ta - high.x) * kShift, (tb - high.y) * kShift);
    return make_uint2(*reinterpret_cast<uint32_t*>(&hi), *reinterpret_cast<uint32_t*>(&lo));
  }

  /// Whatever the values: none is replaced.
  template <bool kAnyValue>
  CUTLASS_DEVICE static void store(OperandScale<SplitFloat> const& scale, uint32_t address, uint4 const& v) {
    uint2 const ab = pair(scale, v.x, v.y);
    uint2 const cd = pair(scale, v.z, v.w);
    store_shared(address, make_uint2(ab.x, cd.x));
    store_shared(address ^ kLowPart, make_uint2(ab.y, cd.y));
  }
};

}  // namespace convt3d::sm90
