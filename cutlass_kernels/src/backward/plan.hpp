// SPDX-License-Identifier: Apache-2.0
//
// How the pointwise half of a backward pass is laid over the GPU: which of two kernels, how wide its accesses are, and
// how many partial sums a channel has. Arithmetic alone, so that it is tested without a GPU; it depends on the
// description only, so that the sums have the same bits on every device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convt3d/convt3d_backward.h"
#include "convt3d/problem.hpp"

namespace convt3d::backward {

using Description = convt3d_activation_gradient;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = kThreads / kWarp;
constexpr int kAccessBytes = 16;

/// One tensor of (N, C, D, H, W).
struct Operand {
  void* data;  // null: not there
  int64_t stride[5];
  int64_t flat;    // spacing of a sample's (D, H, W) positions where they are one equally spaced run, else -1
  int64_t voxels;  // the same over (N, D, H, W)
};

/// What a kernel gets.
struct Params {
  Operand grad_output;
  Operand t;
  Operand grad_pre;
  void* grad_pre_ndhwc;  // packed; for the turned walk alone
  int64_t batch;
  int64_t channels;
  int64_t positions;  // D * H * W
  int64_t height;
  int64_t width;
  float* partial;      // (channels, partials), or null
  int64_t partials;    // per channel
  int64_t rows_split;  // rows: segments of a row; turned: blocks of a row
  int64_t steps;       // rows: accesses of a lane per segment; columns: voxels of a thread; turned: tiles of a block
  int32_t activation;
  float negative_slope;
};

/// Neighbouring lanes take neighbouring positions of one channel, or neighbouring channels of one position; or a block
/// reads the one way and writes the other, through shared memory.
enum class Walk { kRows, kColumns, kTurned };

constexpr int kTilePositions = 64;  // of the turned walk
constexpr int kTileChannels = 64;

struct Plan {
  Params params;  // without pointers
  Walk walk;
  int vector;  // elements of an access
  size_t workspace_bytes;
};

/// Lays out a valid description that has elements. With grad_pre_ndhwc it has to be `turnable`.
Plan make_plan(Description const& description);

/// Whether grad_pre can be written in NDHWC order too: everything else lies in rows of whole 16-byte accesses.
bool turnable(Description const& description);

/// Columns: threads of a block side by side over the channels, `vector` channels each, and voxels at a time.
CONVT3D_HOST_DEVICE int64_t column_groups(int64_t channels, int vector) {
  int64_t const groups = (channels + vector - 1) / vector;
  return groups < kThreads ? groups : kThreads;
}
CONVT3D_HOST_DEVICE int64_t voxels_per_step(int64_t channels, int vector) {
  return kThreads / column_groups(channels, vector);
}

}  // namespace convt3d::backward
