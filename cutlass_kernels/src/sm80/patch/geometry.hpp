// SPDX-License-Identifier: Apache-2.0
//
// The patch-expansion kernel's mathematics on the host: which problems it takes, how they become a matrix product, and
// where operands and results lie. constexpr throughout, tested on the CPU.
//
// Where the kernel is the stride and there is no padding, each output has one tap: a product of positions (voxels of x,
// in order) by columns (taps times output channels), whose result is stored as patches. A column is an element of a
// unit, whose elements lie next to each other in y: the taps along W of one channel in NCDHW, 16 bytes of neighbouring
// channels in NDHWC. Weights are the first operand (rows of an instruction: two elements of eight units), x the second
// (columns: eight positions), so a thread ends with all elements of one unit at positions that it can choose, and these
// are 16 bytes of y, or some.
#pragma once

#include <initializer_list>

#include "sm80/limits.hpp"

namespace convt3d::sm80::patch {

constexpr int kGroupUnits = 8;  // one for each of the rows that a lane has two of
constexpr int kLanes = 32;
constexpr int kBlockPositions = 8;  // columns of an instruction
constexpr int kPrepareThreads = 128;
constexpr int kStages = 2;        // of add, on its way to a warp: this group's and the next one's
constexpr int kStageVectors = 4;  // of a lane in a stage
constexpr int kMostThreads = 512;

/// What a thread does, by the bytes of an element and the elements of a unit.
template <int kBytes, int kUnit_>
struct Form {
  static constexpr int kUnit = kUnit_;
  static constexpr int kVector = kAccessBytes / kBytes;  // elements of an access
  static_assert(kUnit <= kVector && kVector % kUnit == 0 && kUnit % 2 == 0);
  static constexpr int kRowBlocks = kUnit / 2;  // instructions for a group's rows
  // A thread has two positions of each instruction. They are accesses of their own, or parts of one.
  static constexpr int kVectorPositions = kVector / kUnit;
  static constexpr int kVectors = kVectorPositions == 1 ? 2 : 1;       // of a thread in a run of positions
  static constexpr int kColumnBlocks = kVectorPositions == 4 ? 2 : 1;  // instructions for a run
  static constexpr int kRunPositions = kColumnBlocks * kBlockPositions;
  static constexpr int kStepChannels = 32 / kBytes;  // input channels of an instruction
  static constexpr int kSlots = kStepChannels / 4;   // of them a lane's, in each operand

  /// The position in a run of column `n` of instruction `j`.
  CONVT3D_HOST_DEVICE static constexpr int position(int j, int n) {
    return kVectors == 2 ? n / 2 + 4 * (n % 2) : kVectorPositions * (n / 2) + 2 * j + n % 2;
  }
  /// The first position of vector 0 of the lanes with columns 2 quad and 2 quad + 1; the other is kVectorStep behind.
  CONVT3D_HOST_DEVICE static constexpr int first_position(int quad) {
    return kVectors == 2 ? quad : kVectorPositions * quad;
  }
  static constexpr int kVectorStep = 4;

  /// A result register of a thread: instructions of the rows and the columns, and which of four.
  struct Register {
    int row_block, column_block, index;
  };
  /// The one with element `i` of vector `v`: element i % kUnit of the unit at position i / kUnit of the vector.
  CONVT3D_HOST_DEVICE static constexpr Register result(int v, int i) {
    int const position = kVectors == 2 ? v : i / kUnit, element = i % kUnit;
    return {element / 2, kVectors == 2 ? 0 : position / 2, element % 2 * 2 + position % 2};
  }

  /// The input channel of a lane's slot in a step. Over two steps a lane has 16 bytes of neighbours.
  CONVT3D_HOST_DEVICE static constexpr int channel(int step, int quad, int slot) {
    return step / 2 * 2 * kStepChannels + quad * 2 * kSlots + step % 2 * kSlots + slot;
  }

  /// The place among a lane's 16 bytes of weights of one instruction: its registers are (first of two elements, first
  /// half of the slots), (second, first), (first, second), (second, second).
  CONVT3D_HOST_DEVICE static constexpr int weight_slot(int element, int slot) {
    constexpr int kOfRegister = kSlots / 2;
    return (slot / kOfRegister * 2 + element) * kOfRegister + slot % kOfRegister;
  }
};

/// Whether neighbouring channels of y lie together, and are a unit.
constexpr bool channels_last(Problem const& p) { return p.out_channels > 1 && p.y_stride[1] == 1; }

constexpr int unit_elements(Problem const& p) {
  if (channels_last(p)) return kAccessBytes / element_bytes(p);
  return p.stride[2] > 2 ? 4 : 2;
}

/// How a thread reads add, or writes y.
enum class Access : int {
  kNone,
  kVectors,   // 16 bytes
  kUnits,     // the unit at one position
  kElements,  // one by one
};

/// In NDHWC, whether the run of all taps along W and their channels is one, since voxels start anywhere.
constexpr bool is_joined(Problem const& p, Size5 const& stride, int alignment) {
  int const bytes = element_bytes(p);
  int64_t const run = p.out_channels * p.stride[2];
  Size5 const shape = y_shape(p);
  if (alignment < kAccessBytes || stride[1] != 1 || run * bytes % kAccessBytes != 0) return false;
  if (shape[4] > 1 && stride[4] != p.out_channels) return false;
  for (int axis : {0, 2, 3}) {
    if (shape[axis] > 1 && stride[axis] * bytes % kAccessBytes != 0) return false;
  }
  return true;
}

constexpr bool is_joined(Problem const& p) {
  return channels_last(p) && p.out_channels * element_bytes(p) % kAccessBytes != 0 &&
         is_joined(p, effective_stride(y_shape(p), p.y_stride), p.y_alignment) &&
         (!p.has_add || is_joined(p, effective_add_stride(p), p.add_alignment));
}

/// Of y, or of add with its effective strides.
constexpr Access access(Problem const& p, Size5 const& stride, int alignment) {
  int const bytes = element_bytes(p);
  Size5 const shape = y_shape(p);
  if (is_joined(p)) return Access::kVectors;
  if (channels_last(p)) {
    return stride[1] == 1 && access_bytes(shape, stride.v, 1, alignment, bytes) == kAccessBytes ? Access::kVectors
                                                                                                : Access::kElements;
  }
  int const unit = unit_elements(p);
  if (stride[4] != 1 || p.stride[2] != unit) return Access::kElements;
  int const widest = access_bytes(shape, stride.v, 4, alignment, bytes);
  return widest == kAccessBytes ? Access::kVectors : widest >= unit * bytes ? Access::kUnits : Access::kElements;
}

/// Whether add and y are accessed 16 bytes at a time.
constexpr bool in_vectors(Problem const& p) {
  return access(p, effective_stride(y_shape(p), p.y_stride), p.y_alignment) == Access::kVectors &&
         (!p.has_add || access(p, effective_add_stride(p), p.add_alignment) == Access::kVectors);
}

/// Whether the kernel for these accesses takes a problem, and an activation of few instructions; the other one takes
/// all.
constexpr bool is_quick(Problem const& p) {
  bool found = false;
  for (int32_t activation :
       {CONVT3D_ACT_NONE, CONVT3D_ACT_RELU, CONVT3D_ACT_LEAKY_RELU, CONVT3D_ACT_HARDSWISH, CONVT3D_ACT_X_HARDSWISH}) {
    found = found || p.activation == activation;
  }
  return found && in_vectors(p);
}

/// The units of one (tap along D, tap along H): their number, and elements of the last dimension that they cut up.
struct Units {
  int64_t taps_w;  // counted as units, NDHWC
  int64_t run;     // elements of a run of units, NDHWC
  int64_t of_run;  // units of a run: channels in NCDHW
  int64_t count;   // of all taps
};

constexpr Units units(Problem const& p) {
  Units u{1, 1, p.out_channels, 0};
  if (channels_last(p)) {
    u.taps_w = is_joined(p) ? 1 : p.stride[2];
    u.run = is_joined(p) ? p.stride[2] * p.out_channels : p.out_channels;
    u.of_run = (u.run + unit_elements(p) - 1) / unit_elements(p);
  }
  u.count = p.stride[0] * p.stride[1] * u.taps_w * u.of_run;
  return u;
}

constexpr int64_t kMaxUnits = int64_t{1} << 16;
constexpr int64_t kMaxPositions = int64_t{1} << 30;
constexpr int64_t kMaxWeights = int64_t{1} << 24;
constexpr int64_t kMaxTapExtent = 256;
constexpr int kMostSplits = 8;  // of the columns: each reads all of x

/// Input channels at most: a thread keeps those of its positions.
constexpr int64_t most_channels(Problem const& p) { return uses_ieee(p) ? 64 : 192; }

/// Two steps are 16 bytes of a lane's.
constexpr int steps(Problem const& p) {
  int64_t const channels = 64 / element_bytes(p);
  return static_cast<int>(2 * ((p.in_channels + channels - 1) / channels));
}

/// Shared memory that a block may have.
constexpr int64_t shared_limit(int compute_capability) {
  int64_t const kilobytes = compute_capability == 80 || compute_capability == 87   ? 163
                            : compute_capability >= 90 && compute_capability < 120 ? 227
                                                                                   : 99;
  return kilobytes * 1024;
}

/// A unit's offsets in y and add, its bias and its number of elements in shared memory.
constexpr int64_t table_bytes(Problem const& p) { return round_up(2 * 8 + 4 * unit_elements(p) + 4, 16); }

/// Of a group's weights, in all parts of the operand.
constexpr int64_t weight_bytes(Problem const& p) {
  int const parts = uses_ieee(p) ? 2 : 1;
  return int64_t{unit_elements(p) / 2} * steps(p) * kLanes * 16 * parts;
}

constexpr int64_t group_bytes(Problem const& p) { return weight_bytes(p) + kGroupUnits * table_bytes(p); }

/// Of a stage, of all warps.
constexpr int64_t stage_bytes(int threads) { return int64_t{kStageVectors} * 16 * threads; }

constexpr int64_t group_count(Problem const& p) { return (units(p).count + kGroupUnits - 1) / kGroupUnits; }

constexpr int64_t positions(Problem const& p) { return p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2]; }

/// Parts of the groups whose weights fit into shared memory beside add; 0 where not even one group's do.
constexpr int64_t splits(Problem const& p, int compute_capability) {
  int64_t const fit = (shared_limit(compute_capability) - kStages * stage_bytes(kMostThreads)) / group_bytes(p);
  return fit == 0 ? 0 : (group_count(p) + fit - 1) / fit;
}

constexpr int64_t split_groups(Problem const& p, int compute_capability) {
  int64_t const parts = splits(p, compute_capability);
  return (group_count(p) + parts - 1) / parts;
}

/// Prepared weights, of all splits.
constexpr int64_t workspace_bytes(Problem const& p, int compute_capability) {
  return splits(p, compute_capability) * split_groups(p, compute_capability) * weight_bytes(p);
}

/// For a problem that the family takes, with outputs.
constexpr bool takes(Problem const& p, int compute_capability) {
  if (p.groups != 1 || p.in_channels < 1 || p.in_channels > most_channels(p)) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (p.kernel[axis] != p.stride[axis] || p.padding[axis] != 0 || p.output_padding[axis] != 0) return false;
    if (p.kernel[axis] > kMaxTapExtent || (p.dilation[axis] != 1 && p.kernel[axis] != 1)) return false;
  }
  if (!channels_last(p) && p.stride[2] > 4) return false;
  int64_t positions = 1;
  for (int64_t extent : {p.batch, p.in_size[0], p.in_size[1], p.in_size[2]}) {
    if (extent > kMaxPositions / positions) return false;
    positions *= extent;
    if (positions == 0) return false;
  }
  // kMaxTapExtent and the family's limit of channels keep the products in 64 bits.
  if (units(p).count > kMaxUnits || p.in_channels * p.out_channels * tap_count(p) > kMaxWeights) return false;
  int64_t const parts = splits(p, compute_capability);
  return parts >= 1 && parts <= kMostSplits;
}

}  // namespace convt3d::sm80::patch
