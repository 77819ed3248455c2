// SPDX-License-Identifier: Apache-2.0
//
// Groups of several channels in 16-bit types on tensor cores: host arithmetic, without CUDA.
//
// A warp has a unit: eight output channels of a group, so n = 8 of mma.m16n8k16 wastes nothing of a neighbour's. A step
// of k = 16 is two taps (or two eighths of the input channels) of eight channels each; m = 16 is two rows of eight
// positions along W. A block brings the inputs under its tile once and computes the outputs of every residue class from
// them, with the weights of its four units in shared memory as fragments.
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"
#include "sm80/limits.hpp"

namespace convt3d::sm80::grouped::mma {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kChannels = 8;                    // of a unit, and of half a step
constexpr int kTile[3] = {2, 4, 8};             // positions of every class, (D, H, W)
constexpr int64_t kMaxInputs = 32;              // of a group: above, a launch for each group keeps more of x in use
constexpr int64_t kMaxSharedBytes = 96 * 1024;  // a thread block has that on every GPU from SM80 on
constexpr int64_t kStepBytes = 32 * 8;          // of one unit's weights: two registers a lane
constexpr int64_t kSumsBytes = kWarps * kTile[0] * kTile[1] * kTile[2] * kChannels * 2 * 4;  // fp32, of two classes
constexpr int64_t kHalfBytes = 16;  // what a half step needs to know
constexpr int64_t kMaxSteps = 4096;
constexpr int kSumSteps = 8;  // a tensor core adds up 128 products: docs/numerics.md

constexpr int64_t eighths(int64_t channels) { return (channels + kChannels - 1) / kChannels; }

/// Units of a group.
constexpr int64_t units_of_group(Problem const& p) { return eighths(p.out_channels / p.groups); }

constexpr int64_t unit_blocks(Problem const& p) { return (p.groups * units_of_group(p) + kWarps - 1) / kWarps; }

/// Groups that the units of a block belong to, at most.
constexpr int64_t groups_of_block(Problem const& p) {
  int64_t const units = units_of_group(p);
  return units == 1 ? kWarps : units % kWarps == 0 ? 1 : 2;
}

/// The inputs that a tile reads along an axis: positions + [low, low + extent).
struct Reach {
  int64_t low, extent;
};

constexpr Reach reach(Problem const& p, int axis) {
  int64_t low = 0, high = 0;
  bool any = false;
  for (int64_t r = 0; r < p.stride[axis]; ++r) {
    ResidueClass1d const c =
        residue_class_1d(r, output_size(p, axis), p.kernel[axis], p.stride[axis], p.padding[axis], p.dilation[axis]);
    if (c.taps == 0) continue;
    int64_t const last = c.base - (c.taps - 1) * c.input_step;
    low = !any || last < low ? last : low;
    high = !any || c.base > high ? c.base : high;
    any = true;
  }
  return {low, kTile[axis] + high - low};
}

/// Steps of all classes; more than kMaxSteps where it has stopped counting.
constexpr int64_t steps(Problem const& p) {
  int64_t const parts = eighths(p.in_channels / p.groups);
  int64_t count = 0;
  for (int64_t i = 0; i < residue_class_count(p.stride) && count <= kMaxSteps; ++i) {
    int64_t const taps = residue_class(p, i).taps();
    if (taps > 2 * kMaxSteps) return taps;
    count += (taps * parts + 1) / 2;
  }
  return count;
}

constexpr int64_t row_count(Problem const& p) { return reach(p, 0).extent * reach(p, 1).extent * reach(p, 2).extent; }

/// Of x (16-byte rows: position, group, eighth), the sums, the weights, and of where each half of a step finds its
/// inputs.
constexpr int64_t shared_bytes(Problem const& p, int64_t step_count) {
  int64_t const rows = row_count(p) * groups_of_block(p) * eighths(p.in_channels / p.groups);
  return 16 * rows + kSumsBytes + step_count * (kWarps * kStepBytes + 2 * kHalfBytes);
}

constexpr int64_t tiles(Problem const& p, int axis) {
  int64_t const positions = (output_size(p, axis) + p.stride[axis] - 1) / p.stride[axis];
  return (positions + kTile[axis] - 1) / kTile[axis];
}

constexpr int64_t tiles(Problem const& p) { return tiles(p, 0) * tiles(p, 1) * tiles(p, 2); }

/// Tiles that a block goes through with one load of the weights.
constexpr int64_t tiles_of_block(Problem const& p) {
  int64_t const all = tiles(p) * unit_blocks(p) * p.batch;
  return all < 1024 ? 1 : all < 4096 ? 2 : all < 16384 ? 4 : 8;
}

constexpr int64_t grid(Problem const& p) {
  return (tiles(p) + tiles_of_block(p) - 1) / tiles_of_block(p) * unit_blocks(p) * p.batch;
}

/// Whether the kernel takes a problem of several groups. Wants strides up to grouped::kMaxStride.
constexpr bool takes(Problem const& p) {
  int64_t const inputs = p.in_channels / p.groups;
  if (p.dtype == CONVT3D_F32 || inputs < 2 || inputs > kMaxInputs) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (p.kernel[axis] > kMaxSteps) return false;
    for (int64_t v : {p.in_size[axis], output_size(p, axis), p.padding[axis], p.dilation[axis]}) {
      if (v > kMaxExtent) return false;
    }
  }
  // No less than half of them, and before all classes are looked at.
  if (p.kernel[0] * p.kernel[1] > kMaxSteps || tap_count(p) * kWarps * kStepBytes > 2 * kMaxSharedBytes) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (reach(p, axis).extent > kMaxSharedBytes / 16) return false;
  }
  if (p.in_channels > kMaxInt || p.out_channels > kMaxExtent || row_count(p) > kMaxSharedBytes / 16) return false;
  int64_t const step_count = steps(p);
  if (step_count > kMaxSteps || shared_bytes(p, step_count) > kMaxSharedBytes) return false;
  int64_t const blocks = tiles(p) * unit_blocks(p);  // below 2^63: 2^54 tiles at most are refused here
  return tiles(p) <= kMaxInt && (blocks == 0 || p.batch <= kMaxInt / blocks);
}

}  // namespace convt3d::sm80::grouped::mma
