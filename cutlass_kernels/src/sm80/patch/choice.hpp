// SPDX-License-Identifier: Apache-2.0
//
// Where the patch-expansion kernel computes a problem: by measurement on an H200 (docs/performance-log-patch.md).
#pragma once

#include <atomic>

#include "sm80/patch/geometry.hpp"

namespace convt3d::sm80::patch {

/// For tests: the kernel computes all that it takes, not only where it is the fastest of the family.
inline std::atomic<bool> wherever_possible{false};

constexpr int64_t kFewChannels = 8;        // of y: every other kernel leaves most of its tile empty
constexpr int64_t kFewPositions = 8192;    // too few for its start, but for patches of many outputs
constexpr int64_t kManyPositions = 16384;  // make up for weights that many blocks load

/// Whether the kernel computes a problem that the family supports, on a device of that compute capability: faster than
/// the family's others but where outputs are stored one by one. ms, others / this one, NCDHW unless said, batch 2: (2,
/// 4, 4), 32 -> 16 from 32^3: TF32 0.297 / 0.088, fp16 0.312 / 0.057; k2 64 -> 32 from 64^3: 0.805 / 0.366, 0.910 /
/// 0.296; 128 -> 64: 1.73 / 1.54, 2.12 / 0.79; 32 -> 3: NDHWC 0.47 / 0.13; but from 47^3 (odd rows) 64 -> 32: 0.347 /
/// 0.473, (1, 3, 3): 0.139 / 0.149; from 16^3, k2 64 -> 32: 0.022 / 0.022, 0.023 / 0.027, (2, 4, 4): 0.079 / 0.034.
inline bool chosen(Problem const& p, int compute_capability) {
  if (!takes(p, compute_capability)) return false;
  if (wherever_possible.load(std::memory_order_relaxed)) return true;
  if (!in_vectors(p) && !(channels_last(p) && p.out_channels <= kFewChannels)) return false;
  if (positions(p) <= kFewPositions && p.stride[2] <= 2) return false;
  return splits(p, compute_capability) <= 2 || positions(p) >= kManyPositions;
}

/// Whether it is faster than the sm90 family, too, where it is chosen. ms, sm90 / this one, batch 2:
/// (2, 4, 4), 32 -> 16 from 32^3: TF32 0.247 / 0.088, fp16 0.200 / 0.057; 192 -> 14, 7 x 181 x 360: 3.26 / 1.37, 1.93 /
/// 0.73; but 128 -> 64 in seven splits: 0.238 / 0.307. k2 32 -> 3: 0.415 / 0.159, 0.266 / 0.107; 64 -> 32 from 64^3:
/// NCDHW TF32 0.416 / 0.366, fp16 0.216 / 0.296, NDHWC TF32 0.358 / 0.402, fp16 0.175 / 0.223; 32 -> 16 from 48^3:
/// NCDHW 0.107 / 0.095, 0.077 / 0.088, NDHWC 0.107 / 0.096, 0.082 / 0.057, ieee 0.109 / 0.116; (1, 2, 2), 64 -> 32:
/// NCDHW 0.319 / 0.223, 0.175 / 0.202, NDHWC 0.237 / 0.224, 0.135 / 0.126, ieee 0.374 / 0.303. Not where the activation
/// is a function call (gelu and others): 64 -> 32 from 64^3, gelu, NCDHW TF32 0.50 / 1.38 with a call for each value;
/// with one for four, as now, not measured, but it would have to be 0.4 of that.
inline bool faster_than_sm90(Problem const& p) {
  constexpr int kHopper = 90;
  if (!chosen(p, kHopper) || splits(p, kHopper) > 2) return false;
  if (p.stride[2] > 2 || p.out_channels <= kFewChannels) return true;
  if (p.in_channels > 64 || p.out_channels > 32 || !is_quick(p)) return false;
  bool const few_taps = tap_count(p) <= 4;
  if (uses_ieee(p)) return few_taps;
  if (channels_last(p)) return few_taps || p.in_channels <= 32;
  return uses_tf32(p);
}

}  // namespace convt3d::sm80::patch
