// SPDX-License-Identifier: Apache-2.0
//
// Groups of few input channels, all in one launch, without a workspace. A depthwise sum (one channel) has one product
// for each tap, and nothing that a tensor core could share: gathers with plain fp32 multiply-adds. Groups of several
// channels in 16-bit types have a kernel on tensor cores (mma.hpp).
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"
#include "groups.hpp"
#include "message.hpp"
#include "sm80/grouped/mma.hpp"
#include "sm80/limits.hpp"

namespace convt3d::sm80::grouped {

constexpr int kThreads = 256;
constexpr int kLaneChannels = 32;  // channels last: a lane for each of 32 output channels
constexpr int kSteps = 8;      // a block has so many times the positions of its threads, for one load of the weights
constexpr int kPositions = 4;  // of a thread of the general kernel at a time
constexpr int64_t kMaxWeights = 11264;    // in shared memory: 44 KB
constexpr int64_t kMaxInputs = 4;         // of a group, where a launch for each group is the alternative
constexpr int64_t kMaxInputsOfMany = 16;  // and where there are too many groups for that
constexpr int64_t kMaxStride = 8;         // along one dimension

/// Products that may go into one fp32 number, one after the other: the roundings of as many of one sign stay within the
/// bound of docs/numerics.md.
constexpr int64_t kMaxPlainSum = 128;

/// Of a longer sum: about as many products as there are parts, but for whole rows of taps.
constexpr int64_t products_of_part(Problem const& p) {
  int64_t const products = p.in_channels / p.groups * most_taps(p);
  return products <= kMaxPlainSum ? kMaxPlainSum + 1 : products <= 64 * 16 ? 16 : products / 64;
}

/// Whether lanes are channels, and not neighbours along W.
constexpr bool lanes_are_channels(Problem const& p) { return p.out_channels > 1 && p.y_stride[1] == 1; }

constexpr int64_t lane_channels(Problem const& p) { return lanes_are_channels(p) ? kLaneChannels : 1; }

constexpr int64_t channel_blocks(Problem const& p) {
  return (p.out_channels + lane_channels(p) - 1) / lane_channels(p);
}

/// Weights of a thread block. Wants a problem with `tap_count` and inputs of a group within kMaxExtent.
constexpr int64_t block_weights(Problem const& p) {
  return tap_count(p) * (p.in_channels / p.groups) * lane_channels(p);
}

// ---- the kernel for odd cubes ---------------------------------------------------------------------------------------

/// A depthwise kernel of K x K in (H, W) at stride 2, with K known when it is compiled. A position is a column of
/// kCells cells, a square of 2 x 2 outputs each, along H; it reads kCells + kWindow - 1 rows of kWindow values.
///
/// Output 2 j + r takes tap k from input i = (2 j + r + padding - k) / 2. Where padding = K / 2 + 2 t, that is
/// j + t + (r + K / 2 - k) / 2, so which taps meet at an offset does not depend on the padding.
template <int K>
struct Cell {
  static_assert(K % 2 == 1);
  static constexpr int kCells = K == 3 ? 4 : 2;
  static constexpr int kFirst = -(K / 2 / 2);  // the lowest offset
  static constexpr int kWindow = (1 + K / 2) / 2 - kFirst + 1;

  /// The tap that output `residue` of a cell takes from offset kFirst + m; outside [0, K) there is none.
  static constexpr int tap(int residue, int m) { return residue + K / 2 - 2 * (kFirst + m); }
};

/// t above.
constexpr int64_t cell_shift(int64_t kernel, int64_t padding) { return (padding - kernel / 2) / 2; }

/// Whether such a kernel exists: any D, and one of 3, 5 and 7 in H and W. It adds all products to one number.
constexpr bool takes_cells(Problem const& p) {
  int64_t const k = p.kernel[1];
  if (p.groups != p.in_channels || p.kernel[2] != k || (k != 3 && k != 5 && k != 7)) return false;
  for (int axis : {1, 2}) {
    if (p.stride[axis] != 2 || p.dilation[axis] != 1 || (p.padding[axis] - k / 2) % 2 != 0) return false;
  }
  return most_taps(p) <= kMaxPlainSum;
}

constexpr int64_t cells_of_position(Problem const& p) {
  return p.kernel[1] == 3 ? Cell<3>::kCells : p.kernel[1] == 5 ? Cell<5>::kCells : Cell<7>::kCells;
}

// ---- the grid -------------------------------------------------------------------------------------------------------

/// Whether a position of the general kernel is a pair of outputs along W, which lie next to each other in memory.
constexpr bool in_pairs(Problem const& p) { return p.stride[2] == 2; }

/// Classes of thread blocks: residues modulo the stride, except those that one thread computes together.
constexpr int64_t class_count(Problem const& p) {
  if (takes_cells(p)) return p.stride[0];
  return p.stride[0] * p.stride[1] * (in_pairs(p) ? 1 : p.stride[2]);
}

/// Positions of the largest class. Wants extents within kMaxExtent.
constexpr int64_t positions(Problem const& p) {
  int64_t count = 1;
  for (int axis = 0; axis < 3; ++axis) {
    int64_t extent = (output_size(p, axis) + p.stride[axis] - 1) / p.stride[axis];
    if (axis == 1 && takes_cells(p)) extent = (extent + cells_of_position(p) - 1) / cells_of_position(p);
    count *= extent;
  }
  return count;
}

constexpr int64_t positions_per_block(Problem const& p) {
  return kSteps * (takes_cells(p) ? 1 : kPositions) * (kThreads / lane_channels(p));
}

constexpr int64_t position_tiles(Problem const& p) {
  return (positions(p) + positions_per_block(p) - 1) / positions_per_block(p);
}

/// Whether values two apart along W start at multiples of two elements everywhere, so that pairs can be accessed whole.
constexpr bool pairs_are_aligned(Size5 const& shape, int64_t const* stride, int alignment, int element) {
  if (shape[4] > 1 && stride[4] != 1) return false;
  for (int axis = 0; axis < 4; ++axis) {
    if (shape[axis] > 1 && stride[axis] % 2 != 0) return false;
  }
  return alignment >= 2 * element;
}

/// Whether the kernel on tensor cores takes a problem of several groups, and takes it faster than what else there is: a
/// gather for up to kMaxInputs channels, a launch for each group. Measured on an H200 (docs/performance-log.md).
constexpr bool on_tensor_cores(Problem const& p) {
  for (int64_t stride : p.stride) {
    if (stride > kMaxStride) return false;
  }
  if (!mma::takes(p)) return false;
  int64_t const inputs = p.in_channels / p.groups;
  if (inputs <= kMaxInputs) return inputs > 2 && !lanes_are_channels(p);
  if (p.groups > kMaxGroupRuns) return true;
  double const classes = static_cast<double>(residue_class_count(p.stride));
  double const outputs = static_cast<double>(element_count(y_shape(p)));
  double const microseconds = 5 + outputs * 1e-6 * (8 + 0.85 * static_cast<double>(mma::steps(p)) / classes);
  return microseconds < 14.0 * static_cast<double>(p.groups);
}

/// OK, or NOT_SUPPORTED with the reason, for a problem of several groups.
inline Status supported(Problem const& p, Message& message) {
  auto const no = [&](char const* what, int64_t value, char const* limit) {
    return message.fail(CONVT3D_NOT_SUPPORTED, "sm80: with groups, %s is %lld, the kernel takes %s", what,
                        static_cast<long long>(value), limit);
  };
  int64_t const inputs = p.in_channels / p.groups;
  bool const by_mma = on_tensor_cores(p);
  if (!by_mma && inputs > kMaxInputs && p.groups <= kMaxGroupRuns)
    return no("the input channels of one", inputs, "at most 4");
  if (!by_mma && inputs > kMaxInputsOfMany)
    return no("the input channels of one", inputs, "at most 16 beyond 32 groups");
  if (p.in_channels > kMaxInt) return no("the input channel count", p.in_channels, "less than 2^31");
  if (p.out_channels > kMaxExtent) return no("the output channel count", p.out_channels, "at most 2^20");
  int64_t distance = 0;
  Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
  for (int axis = 0; axis < 3; ++axis) {
    if (p.stride[axis] > kMaxStride) return no("a stride", p.stride[axis], "at most 8");
    for (int64_t v : {p.in_size[axis], output_size(p, axis), p.padding[axis], p.dilation[axis], p.kernel[axis]}) {
      if (v > kMaxExtent) return no("a size, padding or dilation", v, "at most 2^20");
    }
    // Coordinates leave x by what taps reach, and by a thread's last cells.
    int64_t const stride = x_stride[2 + axis];
    int64_t const reach =
        p.in_size[axis] + ((p.kernel[axis] - 1) * p.dilation[axis] + p.padding[axis]) / p.stride[axis] + 8;
    if (stride > kMaxInt / reach) return no("a stride of x", stride, "less than 2^31 over all that taps reach");
    distance += reach * stride;
  }
  if (distance > kMaxInt) return no("the distance within a channel of x", distance, "less than 2^31 elements");
  if (by_mma) return CONVT3D_OK;
  if (tap_count(p) > kMaxWeights) return no("the number of taps", tap_count(p), "at most 11264");
  if (block_weights(p) > kMaxWeights) {
    return no("the weights of a thread block", block_weights(p), "at most 11264");
  }
  if (positions(p) > kMaxInt - positions_per_block(p)) {
    return no("the number of voxels", positions(p), "less than 2^31 in each residue class");
  }
  int64_t const tiles = position_tiles(p) * channel_blocks(p);  // below 2^51
  if (tiles > 0 && p.batch > kMaxInt / tiles) return no("the batch", p.batch, "less than 2^31 tiles of all samples");
  return CONVT3D_OK;
}

/// Enqueues a supported problem that has outputs; `stream` is a cudaStream_t.
Status run(Problem const& p, convt3d_tensors const& t, void* stream, Message& message);

}  // namespace convt3d::sm80::grouped
