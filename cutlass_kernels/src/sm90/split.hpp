// SPDX-License-Identifier: Apache-2.0
//
// fp32 accuracy from fp16 products: the number format, as host mathematics that the tests check on the CPU.
//
// A value v is scaled by a power of two, t = 2^k v, and split into fp16 parts, t = hi + 2^-11 lo. Three products
// make one: hi hi in one accumulator, and hi lo + lo hi, which are 2^-11 of it, in another. With the largest magnitude
// just below fp16's end, the parts hold t to 2^-23 of itself down to fp16's smallest normal value, 2^-29 of the
// largest; below that they would lose digits. Such a value, zero apart, is replaced by nan: every output that it
// reaches comes out nan and is computed again by the definition (cold_path.hpp), so the format is exact for each output
// by itself. Tensors with more than a few such values are left to the sm80 family (split_route.hpp).
#pragma once

#include <cstdint>

#include "sm90/geometry.hpp"

namespace convt3d::sm90 {

/// The element type of fp32 tensors in ieee mode: stored as float, multiplied in two parts.
struct SplitFloat {
  float value;
};

/// Whether a problem's products are of parts.
constexpr bool uses_split(Problem const& p) { return p.dtype == CONVT3D_F32 && !uses_tf32(p); }

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr int kSplitShift = 11;               // lo is scaled by 2^11
constexpr int kLargestExponent = 126;         // of the scale, so that it and its inverse are normal numbers
constexpr int kSplitTop = 15;                 // the largest magnitude comes to lie in [2^14, 65504]
constexpr int kSmallestSplit = -14;           // exponent of fp16's smallest normal value
constexpr uint32_t kTopMantissa = 0x7fe000u;  // of 65504, which has all of fp16's bits set

/// k, of a tensor whose largest finite magnitude has these bits.
CONVT3D_HOST_DEVICE constexpr int split_exponent(uint32_t largest) {
  if (largest == 0) return 0;
  int const exponent = static_cast<int>(largest >> 23) - 127;
  int const k = kSplitTop - exponent - ((largest & 0x7fffffu) > kTopMantissa ? 1 : 0);
  return k < kLargestExponent ? k : kLargestExponent;
}

/// Bits of 2^exponent; of a denormal number too.
CONVT3D_HOST_DEVICE constexpr uint32_t power_of_two_bits(int exponent) {
  return exponent >= -126 ? static_cast<uint32_t>(exponent + 127) << 23 : 1u << (exponent + 149);
}

/// Bits of the smallest magnitude that splits exactly enough at scale 2^k.
CONVT3D_HOST_DEVICE constexpr uint32_t smallest_split(int k) { return power_of_two_bits(kSmallestSplit - k); }

/// Whether a value of a tensor with scale 2^k can be multiplied in parts.
CONVT3D_HOST_DEVICE constexpr bool can_split(uint32_t bits, int k) {
  uint32_t const magnitude = bits & 0x7fffffffu;
  return magnitude == 0 || (magnitude >= smallest_split(k) && magnitude < kInfinityBits);
}

// Shared memory: where fp32 has a row of 32 channels in 128 bytes, the parts have 64 bytes of hi and 64 of lo. A vector
// of four channels is half of a 16-byte chunk of each.
constexpr int kLowPart = 64;  // XOR from the address of a hi part to that of its lo part, swizzled or not

CONVT3D_HOST_DEVICE constexpr int split_slab_offset(int row, int group) {
  return slab_offset(row, group / 2) + group % 2 * 8;
}

/// The group at an address that split_slab_offset gave.
CONVT3D_HOST_DEVICE constexpr int split_slab_group(int offset) { return slab_group(offset) * 2 + (offset >> 3 & 1); }

/// Of a weight block: the same rows.
CONVT3D_HOST_DEVICE constexpr int split_weight_offset(int row, int k) {
  return weight_offset(4, row, k / 8 * 4) + k % 8 * 2;
}

// Whether a tensor has more than a few values that do not split is estimated from a sample of x, counted by exponent in
// bins of eight. A wrong estimate costs time, never digits.
constexpr int kExponentBins = 32;

CONVT3D_HOST_DEVICE constexpr int exponent_bin(uint32_t magnitude) {
  return magnitude < kInfinityBits ? static_cast<int>(magnitude >> 26) : 0;  // bin 0 always counts
}

/// What a CTA of the pre-kernel finds in its share of x.
struct ScanResult {
  uint32_t largest;            // bits of the largest finite magnitude
  int32_t bin[kExponentBins];  // sampled values that are not zero, by exponent
};

/// Whether a bin counts as too small at scale 2^k: it may hold such values.
CONVT3D_HOST_DEVICE constexpr bool bin_counts(int bin, int k) {
  return static_cast<uint32_t>(bin) << 26 < smallest_split(k);
}

/// More of them in a sample of `samples` values send the problem to the sm80 family. One costs the cold path about a
/// thousand outputs: a few hundred in the reference workload's x are as dear as that family's kernel.
CONVT3D_HOST_DEVICE constexpr int64_t too_many_in_sample(int64_t samples) { return 4 + samples / 32768; }

}  // namespace convt3d::sm90
