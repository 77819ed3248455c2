// SPDX-License-Identifier: Apache-2.0
//
// Where the kernel is the stride, an output has one tap, and the operator is a matrix product with its tail:
//
//     y[position, (tap, channel)] = act(sum over input channels of x[position, k] * weight[k, (tap, channel)] + ...),
//
// x and the weight as they lie, channels last. What the kernel for it takes, and how it divides the work: host code,
// tested on the CPU.
#pragma once

#include <atomic>

#include "convt3d/problem.hpp"

namespace convt3d::sm90::product {

constexpr int kPositions = 128;                      // of a thread block
constexpr int kColumns = 64;                         // of a warpgroup: pairs of a tap and an output channel
constexpr int kStepBytes = 128;                      // of input channels: a step of the product
constexpr int kXBytes = kPositions * kStepBytes;     // of a step
constexpr int kWeightBytes = kColumns * kStepBytes;  // of a step and warpgroup
constexpr int kMostWarpgroups = 3;                   // of a thread block; registers allow no more
constexpr int kMostStages = 8;
constexpr int kSharedBytes = 220 * 1024;          // of the stages
constexpr int64_t kMostReach = int64_t{1} << 30;  // elements from one of a tensor's to another

constexpr int64_t positions(Problem const& p) { return p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2]; }
constexpr int64_t column_count(Problem const& p) { return p.out_channels * tap_count(p); }
constexpr int64_t steps(Problem const& p) {
  int64_t const bytes = p.in_channels * element_bytes(p);
  return (bytes + kStepBytes - 1) / kStepBytes;
}

constexpr int64_t position_tiles(Problem const& p) { return (positions(p) + kPositions - 1) / kPositions; }
constexpr int64_t column_tiles(Problem const& p, int warpgroups) {
  int64_t const columns = int64_t{warpgroups} * kColumns;
  return (column_count(p) + columns - 1) / columns;
}

/// Warpgroups of a thread block. They share x, so three, or as few as leave no more tiles than multiprocessors.
constexpr int warpgroups(Problem const& p, int multiprocessors) {
  for (int count = 1; count < kMostWarpgroups; ++count) {
    if (position_tiles(p) * column_tiles(p, count) <= multiprocessors) return count;
  }
  return kMostWarpgroups;
}

constexpr int stage_bytes(int warpgroups) { return kXBytes + warpgroups * kWeightBytes; }
constexpr int stages(int warpgroups) {
  int const fit = kSharedBytes / stage_bytes(warpgroups);
  return fit < kMostStages ? fit : kMostStages;
}

/// The first of the two neighbouring columns, of a warpgroup's 64, that a thread ends with.
///
/// Of its rows of wgmma, lane / 4 and lane / 4 + 8, two lanes that are neighbours there exchange one each. In TF32 rows
/// are columns in an order whose words, of eight rows and four k, lie in 32 banks: four words of two accesses of 16
/// bytes that are four apart.
CONVT3D_HOST_DEVICE constexpr int first_column(int element, int warp, int lane) {
  int const row = lane / 4, odd = row % 2;
  return element == 4 ? warp / 2 * 32 + (warp % 2 * 2 + odd + row / 4 * 4) * 4 + (row & 2)
                      : warp * 16 + odd * 8 + (row & 6);
}

/// Where TF32's first word of A lies, from a step's weights on. Columns are in accesses of four, whose number within
/// 128 bytes the copy engine has XORed with k modulo 8.
CONVT3D_HOST_DEVICE constexpr uint32_t first_word(int warp, int lane) {
  int const row = lane / 4, access = warp % 2 * 2 + row / 4 * 4;
  return static_cast<uint32_t>(warp / 2 * (kStepBytes / 4 * 128) + lane % 4 * 128 + (access ^ lane % 4) * 16 +
                               row % 4 * 4);
}

/// Where word `word` of instruction `i` lies: the second row is the next access, the second four k are 512 bytes on.
CONVT3D_HOST_DEVICE constexpr uint32_t next_word(uint32_t first, int i, int word) {
  return (first ^ static_cast<uint32_t>(word % 2 * 16 + word / 2 * 64)) +
         static_cast<uint32_t>(i * 1024 + word / 2 * 512);
}

/// Whether the voxels of x, samples one after the other, are rows of one matrix.
constexpr bool rows_of_one_matrix(Problem const& p) {
  Size5 const shape = x_shape(p);
  int64_t step = 0, rows = 1;
  for (int axis : {4, 3, 2, 0}) {
    if (shape[axis] == 1) continue;
    if (step == 0) step = p.x_stride[axis];
    if (p.x_stride[axis] != step * rows) return false;
    rows *= shape[axis];
  }
  return true;
}

/// From a voxel of x to the next, in elements.
constexpr int64_t x_row(Problem const& p) {
  Size5 const shape = x_shape(p);
  for (int axis : {4, 3, 2, 0}) {
    if (shape[axis] > 1) return p.x_stride[axis];
  }
  return p.in_channels;
}

/// Elements from the first to the last.
constexpr int64_t reach(Size5 const& shape, int64_t const* stride) {
  int64_t sum = 0;
  for (int axis = 0; axis < 5; ++axis) {
    if (shape[axis] > 1) sum += (shape[axis] - 1) * stride[axis];
  }
  return sum;
}

/// Whether the kernel takes a problem that the family takes, with a weight that starts at a multiple of 16 bytes.
constexpr bool takes(Problem const& p) {
  if (uses_ieee(p) || element_count(y_shape(p)) == 0) return false;
  Size3 const out = output_size(p);
  for (int axis = 0; axis < 3; ++axis) {
    if (p.kernel[axis] != p.stride[axis] || p.padding[axis] != 0) return false;
    if (out[axis] != p.stride[axis] * p.in_size[axis]) return false;  // planes that no tap reaches
  }
  if (p.in_channels < 2 || p.out_channels < 2) return false;
  if (positions(p) > kMostReach || reach(y_shape(p), p.y_stride) > kMostReach) return false;
  if (p.has_add && reach(y_shape(p), effective_add_stride(p).v) > kMostReach) return false;
  int64_t const bytes = element_bytes(p);
  // The copy engine's steps.
  if (!is_ndhwc(weight_shape(p), p.weight_stride) || column_count(p) * bytes % 128 != 0) return false;
  if (p.x_stride[1] != 1 || p.x_alignment < 16 || !rows_of_one_matrix(p)) return false;
  if (x_row(p) * bytes % 16 != 0 || x_row(p) < p.in_channels || x_row(p) * bytes >= int64_t{1} << 39) return false;
  // A thread's columns are neighbouring channels: of y, and of add, which has to have them all.
  auto const pairs = [&](int64_t const* stride, int alignment) {
    int const element = static_cast<int>(bytes);
    return stride[1] == 1 && access_bytes(y_shape(p), stride, 1, alignment, element) >= 2 * element;
  };
  return pairs(p.y_stride, p.y_alignment) && (!p.has_add || pairs(p.add_stride, p.add_alignment));
}

/// For tests: the kernel computes all that it takes, not only where it is the fastest of the family; or nothing.
inline std::atomic<bool> wherever_possible{false}, nowhere{false};

}  // namespace convt3d::sm90::product
