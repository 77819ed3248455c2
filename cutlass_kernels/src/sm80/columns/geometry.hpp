// SPDX-License-Identifier: Apache-2.0
//
// The columns kernel's mathematics on the host: which problems it takes, and how it divides them. constexpr throughout,
// tested on the CPU.
//
// A transposed convolution is a matrix product and a gather (im2col's counterpart, col2im): with a column for every
// pair of an output channel and a tap,
//
//     columns[position, (channel, tap)] = sum over input channels of x[position, k] * weight[k, (channel, tap)],
//
// and an output is the sum of the columns of the taps that reach it. Both operands are matrices where they lie, so
// nothing is prepared; the sum over input channels is divided among thread blocks, whose parts meet in the gather. It
// writes and reads taps / stride^3 times y for each part, in fp32, which pays while y is small.
#pragma once

#include <atomic>
#include <initializer_list>

#include "sm80/limits.hpp"

namespace convt3d::sm80::columns {

constexpr int kTile = 64;         // positions, and columns, of a thread block
constexpr int kDepthBytes = 128;  // of input channels: a step of the product
constexpr int kStages = 4;
constexpr int kThreads = 128;
constexpr int64_t kMostTaps = 2;                  // of an output along one dimension
constexpr int64_t kMostStride = 4;                // along one dimension
constexpr int64_t kMostBytes = int64_t{1} << 26;  // of all columns

constexpr int64_t depth(Problem const& p) { return kDepthBytes / element_bytes(p); }
constexpr int64_t vector_elements(Problem const& p) { return kAccessBytes / element_bytes(p); }

constexpr int64_t positions(Problem const& p) { return p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2]; }
constexpr int64_t column_count(Problem const& p) { return p.out_channels * tap_count(p); }

/// The elements from a voxel to the next, counted as one dimension: 0 for a single one, -1 where they do not lie so.
constexpr int64_t voxel_step(Problem const& p) {
  int64_t step = 0, inner = 1;
  for (int axis = 2; axis >= 0; --axis) {
    int64_t const size = p.in_size[axis], stride = p.x_stride[2 + axis];
    if (size == 1) continue;
    if (inner == 1) step = stride;
    if (stride != step * inner) return -1;
    inner *= size;
  }
  return step;
}

/// Whether the input channels of x are neighbours in memory; otherwise its voxels have to be.
constexpr bool x_channels_last(Problem const& p) { return p.x_stride[1] == 1 && p.in_channels > 1; }

/// Where the columns lie within a row of the weight. A step of -1 for the channel: not in one run.
struct ColumnSteps {
  int64_t channel, tap[3];
};

constexpr ColumnSteps column_steps(Problem const& p) {
  int64_t const* const k = p.kernel;
  int64_t const inner[3] = {k[1] * k[2], k[2], 1};
  for (bool channels_last : {false, true}) {
    int64_t const channel = channels_last ? 1 : tap_count(p), tap = channels_last ? p.out_channels : 1;
    bool lies = p.out_channels == 1 || p.weight_stride[1] == channel;
    for (int axis = 0; axis < 3; ++axis)
      lies = lies && (k[axis] == 1 || p.weight_stride[2 + axis] == tap * inner[axis]);
    if (lies) return {channel, {tap * inner[0], tap * inner[1], tap * inner[2]}};
  }
  return {-1, {}};
}

// ---- the division of the work ---------------------------------------------------------------------------------------

constexpr int64_t tiles_of(int64_t extent) { return (extent + kTile - 1) / kTile; }
constexpr int64_t tiles(Problem const& p) { return tiles_of(positions(p)) * tiles_of(column_count(p)); }
constexpr int64_t steps(Problem const& p) { return (p.in_channels + depth(p) - 1) / depth(p); }

/// Columns in memory are a row of positions for each column where voxels are neighbours in x, and of columns for each
/// position where channels are: as the gather reads them. Floats from one row to the next, whole accesses.
constexpr int64_t pitch(Problem const& p) { return round_up(x_channels_last(p) ? column_count(p) : positions(p), 4); }
constexpr int64_t part_floats(Problem const& p) {
  return pitch(p) * (x_channels_last(p) ? positions(p) : column_count(p));
}

constexpr int64_t kWantedBlocks = 264;  // two on each multiprocessor of an H200
constexpr int64_t kLeastSteps = 2;      // of a part
constexpr int64_t kMostParts = 16;

/// Steps of a part of the sum. By the problem alone, so that devices agree in every bit.
constexpr int64_t steps_of_part(Problem const& p) {
  int64_t parts = kWantedBlocks / tiles(p);
  for (int64_t most : {kMostParts, steps(p) / kLeastSteps, kMostBytes / (4 * part_floats(p))}) {
    parts = parts < most ? parts : most;
  }
  return parts < 2 ? steps(p) : (steps(p) + parts - 1) / parts;
}

constexpr int64_t parts(Problem const& p) { return (steps(p) + steps_of_part(p) - 1) / steps_of_part(p); }
constexpr int64_t workspace_bytes(Problem const& p) { return 4 * part_floats(p) * parts(p); }

// ---- what it takes --------------------------------------------------------------------------------------------------

/// Whether the kernel takes a problem that the family supports, with a weight that starts at a multiple of 16 bytes.
constexpr bool takes(Problem const& p) {
  if (p.groups != 1 || element_count(y_shape(p)) == 0) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (most_taps(p, axis) > kMostTaps || p.stride[axis] > kMostStride) return false;
  }
  int64_t const vector = vector_elements(p), volume = p.in_size[0] * p.in_size[1] * p.in_size[2];
  // Before anything is multiplied: sizes are at most 2^20 each.
  if (p.batch > kMaxExtent || volume > kMaxExtent || positions(p) > kMaxExtent || tap_count(p) > kMaxExtent)
    return false;
  if (column_count(p) > kMaxExtent || 4 * part_floats(p) > kMostBytes) return false;
  if (element_count(y_shape(p)) > kMaxInt - 1024) return false;

  if (column_count(p) % vector != 0 || column_steps(p).channel < 0) return false;
  if (p.in_channels > 1 && p.weight_stride[0] % vector != 0) return false;

  int64_t const step = voxel_step(p);
  if (p.x_alignment < kAccessBytes || step < 0) return false;
  if (p.batch > 1 && p.x_stride[0] % vector != 0) return false;
  if (x_channels_last(p)) return p.in_channels % vector == 0 && step % vector == 0;
  // Rows of voxels, of which there are several here: not one voxel that stands for all (a step of 0).
  return volume % vector == 0 && step == 1 && (p.in_channels == 1 || p.x_stride[1] % vector == 0);
}

/// For tests: the kernel computes all that it takes, not only where it is the fastest of the family; or nothing, so
/// that the others are tested with small problems.
inline std::atomic<bool> wherever_possible{false}, nowhere{false};

}  // namespace convt3d::sm80::columns
