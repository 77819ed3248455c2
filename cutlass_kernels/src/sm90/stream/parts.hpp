// SPDX-License-Identifier: Apache-2.0
//
// Where the two parts of fp32 operands lie in ieee mode: 64 bytes of hi, then 64 of lo, for 32 channels, in a row of a
// weight piece as in a voxel of the copy of x.
#pragma once

#include "sm90/split.hpp"
#include "sm90/stream/geometry.hpp"

namespace convt3d::sm90::stream {

/// Where channels 4 `group` and on begin among the hi parts; kLowPart further they begin among the lo parts.
CONVT3D_HOST_DEVICE constexpr int parts_offset(int group) { return group * 8; }

/// As kHeadRoom (split.hpp), but values below what the scale takes cost more here: each is nan, and a thousand outputs
/// are computed again. What one value in 64 tells about all others is true within a factor of two: a value beyond
/// that, which becomes nan likewise, is one that has no more than about 64 like it.
constexpr int kPartsHeadRoom = 1;

/// Bits of the smallest magnitude that rounds to infinity in its hi part at scale 2^k: 65520.
CONVT3D_HOST_DEVICE constexpr uint32_t overflow_bits(int k) {
  int const exponent = kSplitTop - k;
  return exponent > 127 ? kInfinityBits : power_of_two_bits(exponent) | 0x7ff000u;
}

}  // namespace convt3d::sm90::stream
