// SPDX-License-Identifier: Apache-2.0
//
// fp32 accuracy from fp16 products: the number format, as host mathematics that the tests check on the CPU.
//
// A value v is scaled by a power of two, t = 2^k v, and split into fp16 parts, t = hi + 2^-11 lo. Three products
// make one: hi hi in one accumulator, and hi lo + lo hi, which are 2^-11 of it, in another. With the largest magnitude
// just below fp16's end, the parts hold t to 2^-22 of itself down to fp16's smallest normal value, 2^-29 of the
// largest. A tiny value, below that, loses digits: as denormal numbers its parts hold it to 2^-36, whatever it is.
//
// Tiny values are multiplied: what they lack can matter only to an output that is small itself (kTinyFloor below), and
// only where one was met. Such outputs alone become nan and are computed again by the definition (cold_path.hpp), so
// that each output is right by itself. The resident kernel's loaders count tiny values slab by slab, the streaming
// kernel's pre-kernel plane by plane. Tensors with more such values or outputs than a few are left to the sm80 family
// (split_route.hpp).
#pragma once

#include <cstdint>

#include "sm90/geometry.hpp"

namespace convt3d::sm90 {

/// The element type of fp32 tensors in ieee mode: stored as float, multiplied in two parts.
struct SplitFloat {
  float value;
};

/// Whether a problem's products are of parts.
constexpr bool uses_split(Problem const& p) { return uses_ieee(p); }

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr int kSplitShift = 11;               // lo is scaled by 2^11
constexpr int kLargestExponent = 126;         // of the scale, so that it and its inverse are normal numbers
constexpr int kSplitTop = 15;                 // the largest magnitude comes to lie in [2^14, 65504]
constexpr int kSmallestSplit = -14;           // exponent of fp16's smallest normal value
constexpr uint32_t kTopMantissa = 0x7fe000u;  // of 65504, which has all of fp16's bits set

/// Bits of a magnitude; none of infinity and nan.
CONVT3D_HOST_DEVICE constexpr uint32_t finite_magnitude(uint32_t bits) {
  uint32_t const magnitude = bits & 0x7fffffffu;
  return magnitude < kInfinityBits ? magnitude : 0;
}

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

/// Before the swizzle, from the start of a slab.
CONVT3D_HOST_DEVICE constexpr int split_slab_address(int row, int group) { return row * kSlabRowBytes + group * 8; }

CONVT3D_HOST_DEVICE constexpr int split_slab_offset(int row, int group) {
  return static_cast<int>(swizzled_slab(static_cast<uint32_t>(split_slab_address(row, group))));
}

/// Of a weight block: the same rows.
CONVT3D_HOST_DEVICE constexpr int split_weight_offset(int row, int k) {
  return weight_offset(4, row, k / 8 * 4) + k % 8 * 2;
}

// Outputs that tiny values may spoil. The parts hold a tiny operand to 2^-36, and what the dropped product of the low
// parts takes is half of that at most; the other operand is below 2^16. So `n` such products are wrong by at most
// n 1.5 2^-20, and |sum| is a lower bound of sum |x||w|: where it is 8 n or more, that is at most 0.75 units of 2^-22
// of sum |x||w|, of the 4 that are allowed (docs/numerics.md). Sums are at both operands' scale.
constexpr float kTinyFloor = 8.0f;  // for each product that may have a tiny operand
constexpr int kManyTiny = 255;      // so many and more of a slab are counted as this, and may be all

/// Products of an output at most.
constexpr int64_t most_products(Problem const& p) { return p.in_channels * most_taps(p); }

/// More tiny weights than this send the problem to the sm80 family: they count in every tile.
constexpr int kFewTinyWeights = 64;

// The scale comes from a sample of x: regions of neighbouring values, so many that all of a GPU's threads look at them
// at once. What the sample has missed may be larger by 2^kHeadRoom. A value beyond that overflows in its high part, and
// the outputs that it reaches are nan and computed again. The head room is taken from what is below: values are tiny
// below 2^-24 of the sample's largest, one of many millions in normal data.
constexpr int kHeadRoom = 5;
constexpr int kLargestSampleStep = 64;

/// One of so many regions is looked at, where a scan has room for `at_once`.
constexpr int sample_step(int64_t regions, int64_t at_once) {
  int64_t const step = (regions + at_once - 1) / at_once;
  return step < 1 ? 1 : step < kLargestSampleStep ? static_cast<int>(step) : kLargestSampleStep;
}

/// The region that stands for a group of `step` of them: any, but not in step with rows of x.
CONVT3D_HOST_DEVICE constexpr int64_t sampled_region(int64_t group, int step) {
  uint32_t const mixed = static_cast<uint32_t>(group) * 2654435761u >> 16;
  return group * step + (mixed * static_cast<uint32_t>(step) >> 16);
}

// Whether many outputs will be that small is estimated from the same sample: the regions' largest magnitudes, counted
// by exponent in bins of four. A wrong estimate costs time, never digits.
constexpr int kExponentBins = 64;
constexpr int kSmallRegion = -2;  // exponent of the magnitude, at x's scale, below which a region is small

CONVT3D_HOST_DEVICE constexpr int exponent_bin(uint32_t magnitude) {
  return magnitude < kInfinityBits ? static_cast<int>(magnitude >> 25) : 0;  // bin 0 always counts
}

/// What a CTA of the pre-kernel finds in its share of x.
struct ScanResult {
  static constexpr uint32_t kMost = 0xffff;
  uint32_t largest;                  // bits of the largest finite magnitude
  uint32_t bins[kExponentBins / 2];  // regions that are not zero by exponent, kMost at most, two counts in a word
};

/// Whether a bin counts as small at scale 2^k: it may hold small regions.
CONVT3D_HOST_DEVICE constexpr bool bin_counts(int bin, int k) {
  return static_cast<uint32_t>(bin) << 25 < power_of_two_bits(kSmallRegion - k);
}

/// More of them in a sample of `regions` send the problem to the sm80 family.
CONVT3D_HOST_DEVICE constexpr int64_t too_many_in_sample(int64_t regions) { return 4 + regions / 4096; }

}  // namespace convt3d::sm90
