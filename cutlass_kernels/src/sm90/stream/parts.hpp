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

/// As kHeadRoom (split.hpp). A value beyond it costs more here, as it becomes nan in all the outputs that it reaches,
/// but of a sample this large few values are four times the largest. More room makes more values tiny.
constexpr int kPartsHeadRoom = 2;

/// Bits of the smallest magnitude that rounds to infinity in its hi part at scale 2^k: 65520.
CONVT3D_HOST_DEVICE constexpr uint32_t overflow_bits(int k) {
  int const exponent = kSplitTop - k;
  return exponent > 127 ? kInfinityBits : power_of_two_bits(exponent) | 0x7ff000u;
}

}  // namespace convt3d::sm90::stream
