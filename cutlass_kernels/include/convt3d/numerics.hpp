// SPDX-License-Identifier: Apache-2.0
//
// TF32 as a number format on the bits of a float: sign, 8 exponent bits, and the upper 10 of the 23 mantissa
// bits. A tensor core ignores the lower 13 bits of its TF32 operands, that is, it truncates. cuDNN's TF32
// convolutions equal exact products of operands rounded to nearest, ties to even, so operands are rounded
// first and then pass through the tensor core unchanged.
#pragma once

#include <cstdint>
#include <cstring>

#include "convt3d/host_device.hpp"

namespace convt3d {

CONVT3D_HOST_DEVICE uint32_t float_to_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

CONVT3D_HOST_DEVICE float bits_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

/// Rounds the bits of a float to TF32: nearest, ties to even. The lower 13 bits of the result are zero.
/// Infinities stay. A nan stays a nan even if its payload lay in the lower bits alone (its quiet bit is set).
/// Finite values saturate at the largest finite TF32 instead of becoming infinite.
CONVT3D_HOST_DEVICE constexpr uint32_t round_bits_to_tf32(uint32_t bits) {
  constexpr uint32_t kExponent = 0x7f800000u;
  constexpr uint32_t kDropped = 0x00001fffu;
  constexpr uint32_t kLargest = 0x7f7fe000u;
  uint32_t const magnitude = bits & 0x7fffffffu;
  if (magnitude >= kExponent) return magnitude == kExponent ? bits : ((bits | 0x00400000u) & ~kDropped);
  // Adding just under half a unit, plus one where the kept part is odd, carries exactly where it must.
  uint32_t const rounded = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) & ~kDropped;
  return (bits & 0x80000000u) | (rounded < kLargest ? rounded : kLargest);
}

/// `round_bits_to_tf32` of a float.
CONVT3D_HOST_DEVICE float round_to_tf32(float value) { return bits_to_float(round_bits_to_tf32(float_to_bits(value))); }

/// high + low is `value` to about 2^-23 of its magnitude; both are TF32 values.
struct Tf32Split {
  float high;
  float low;
};

/// Splits a float for three-product (3xTF32) arithmetic. Rounding the high part to nearest leaves a low part of
/// at most 12 significant bits, of which TF32 holds 11. Where the value is not finite the low part is zero, so
/// that value * 1 stays value; a product with a zero or with the low part of the other operand may still be nan.
CONVT3D_HOST_DEVICE Tf32Split split_tf32(float value) {
  float const high = round_to_tf32(value);
  bool const finite = (float_to_bits(value) & 0x7f800000u) != 0x7f800000u;
  return {high, finite ? round_to_tf32(value - high) : 0.0f};
}

}  // namespace convt3d
