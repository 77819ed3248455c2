// SPDX-License-Identifier: Apache-2.0
//
// The product kernel's steps and stages, and where a thread finds its operands and results. Host and device code,
// tested on the CPU.
#pragma once

#include "sm90/geometry.hpp"

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

/// Columns of the weight in memory: pairs of a tap and an output channel.
constexpr int64_t weight_columns(Problem const& p) { return p.out_channels * tap_count(p); }
/// Of a tap.
constexpr int steps(Problem const& p) { return ceil_div(p.in_channels * element_bytes(p), kStepBytes); }

constexpr int stage_bytes(int warpgroups) { return kXBytes + warpgroups * kWeightBytes; }
constexpr int stages(int warpgroups) {
  int const fit = kSharedBytes / stage_bytes(warpgroups);
  return fit < kMostStages ? fit : kMostStages;
}

/// Of shared memory, behind the stages, for the sums that the other blocks of a cluster of so many send (cluster.hpp).
constexpr int cluster_bytes(int blocks) { return kColumns * kPositions * 4 / blocks * (blocks - 1); }
static_assert(stages(1) * stage_bytes(1) + cluster_bytes(4) <= kSharedBytes);

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

/// Elements from the first to the last.
constexpr int64_t reach(Size5 const& shape, int64_t const* stride) {
  int64_t sum = 0;
  for (int axis = 0; axis < 5; ++axis) {
    if (shape[axis] > 1) sum += (shape[axis] - 1) * stride[axis];
  }
  return sum;
}

/// What a problem must be for either way through x (rows.hpp, boxes.hpp).
constexpr bool has_fitting_tensors(Problem const& p) {
  if (uses_ieee(p) || element_count(y_shape(p)) == 0) return false;
  if (p.in_channels < 2) return false;
  if (reach(y_shape(p), p.y_stride) > kMostReach) return false;
  if (p.has_add && reach(y_shape(p), effective_add_stride(p).v) > kMostReach) return false;
  return is_ndhwc(weight_shape(p), p.weight_stride) && p.x_stride[1] == 1 && p.x_alignment >= 16;
}

/// Whether a thread's two columns, which are neighbouring channels, are neighbours in y and in add, too, which has to
/// have them all. Elsewhere it moves them one by one.
constexpr bool has_pairs(Problem const& p) {
  int const bytes = element_bytes(p);
  auto const pairs = [&](int64_t const* stride, int alignment) {
    return stride[1] == 1 && access_bytes(y_shape(p), stride, 1, alignment, bytes) >= 2 * bytes;
  };
  return pairs(p.y_stride, p.y_alignment) && (!p.has_add || pairs(p.add_stride, p.add_alignment));
}

}  // namespace convt3d::sm90::product
