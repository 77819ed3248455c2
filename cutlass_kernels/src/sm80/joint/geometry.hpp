// SPDX-License-Identifier: Apache-2.0
//
// The joint kernel's mathematics on the host: which problems it takes, its tiles, and where operands lie in shared
// memory. constexpr throughout, tested on the CPU.
//
// A thread block computes all eight residue classes of 128 positions (voxels of x, in order) and 16 output channels. So
// x comes in once for all classes, every product is of a live tap, and the outputs of a block are whole runs of memory:
// pairs along W in NCDHW. The other kernels of the family give each class a block of its own, whose outputs are every
// second voxel.
#pragma once

#include <atomic>

#include "sm80/limits.hpp"

namespace convt3d::sm80::joint {

constexpr int kPositions = 128;
constexpr int kChannels = 16;  // output channels
constexpr int kClasses = 8;
constexpr int kThreads = 128;
constexpr int kStages = 4;
constexpr int kStepBytes = 32;      // of input channels: one instruction's depth
constexpr int kTapStepBytes = 512;  // of the filter: one tap, those input channels, 16 output channels
constexpr int kMaxTaps = 27;
constexpr int kSharedLimit = 99 * 1024;  // what a block may have on SM86, SM89 and SM120; two fit on SM90

/// A kernel size and padding at stride 2, the same in each dimension: output 2 j + r takes tap r + padding - 2 delta
/// from input j + delta, where there is such a tap.
template <int kKernel_, int kPadding_>
struct Kind {
  static constexpr int kKernel = kKernel_, kPadding = kPadding_;
  static constexpr int kTaps = kKernel * kKernel * kKernel;
  static constexpr int kDeltas = (1 + kPadding) / 2 + 1;  // along a dimension, from 0 on
  static constexpr int kSteps = kTaps > 8 ? 1 : 2;        // of a stage

  static constexpr bool live(int residue, int delta) {
    int const tap = residue + kPadding - 2 * delta;
    return tap >= 0 && tap < kKernel;
  }
};

using Kernel3 = Kind<3, 1>;

/// A product: the class that it belongs to, the neighbour of the position that it reads, and the tap. (D, H, W), W
/// fastest.
struct Tap {
  int cls, delta[3], tap[3];
};

template <class Kind>
struct TapList {
  Tap v[Kind::kTaps];
};

/// All taps in the order in which they are multiplied: by the neighbour, so that an operand is fetched once.
template <class Kind>
constexpr TapList<Kind> list_taps() {
  TapList<Kind> list{};
  int n = 0;
  constexpr int kD = Kind::kDeltas;
  for (int delta = 0; delta < kD * kD * kD; ++delta) {
    int const at[3] = {delta / kD / kD, delta / kD % kD, delta % kD};
    for (int cls = 0; cls < kClasses; ++cls) {
      int const residue[3] = {cls / 4, cls / 2 % 2, cls % 2};
      bool live = true;
      Tap tap{cls, {}, {}};
      for (int axis = 0; axis < 3; ++axis) {
        live = live && Kind::live(residue[axis], at[axis]);
        tap.delta[axis] = at[axis];
        tap.tap[axis] = residue[axis] + Kind::kPadding - 2 * at[axis];
      }
      if (live) list.v[n++] = tap;
    }
  }
  return list;
}

/// Rows of x that a tile keeps: its positions and the neighbours that its taps read. A row is a position's step of
/// input channels. `near` rows are consecutive voxels from the first position on; the rest, where the next plane is too
/// far away for one run, are as many voxels `skip` rows later.
struct XRows {
  int rows, near, skip;
  int depth;  // rows from a position to its neighbour along D
};

template <class Kind>
constexpr XRows x_rows(int64_t const* in_size) {
  int64_t const width = in_size[2], plane = in_size[1] * in_size[2], volume = in_size[0] * plane;
  if (Kind::kDeltas == 1) return {kPositions, kPositions, 0, 0};
  if (kPositions % volume == 0) return {kPositions, kPositions, 0, static_cast<int>(plane)};  // whole samples
  int64_t const run = kPositions + width + 1;
  if (plane <= run) {
    int const rows = static_cast<int>(run + plane);
    return {rows, rows, 0, static_cast<int>(plane)};
  }
  return {static_cast<int>(2 * run), static_cast<int>(run), static_cast<int>(plane - run), static_cast<int>(run)};
}

/// Behind the rows of x, zeros for neighbours outside x: eight rows, so that one can stand for a row without a bank
/// conflict with the seven others that are fetched with it.
constexpr int kZeroRows = 8;
constexpr int first_zero_row(int rows) { return (rows + kZeroRows - 1) / kZeroRows * kZeroRows; }

template <class Kind>
constexpr int stage_bytes(int rows) {
  return Kind::kSteps * (Kind::kTaps * kTapStepBytes + (first_zero_row(rows) + kZeroRows) * kStepBytes);
}

// Sums on their way to the epilogue: [class][channel][position]. The paddings keep both sides free of bank conflicts:
// writers hold 8 positions by 4 pairs of channels, readers 16 positions by two classes or by two accesses of channels.
constexpr int kPitch = kPositions + 4;
constexpr int kChannelGroupPadding = 16;
constexpr int kClassPitch = kChannels * kPitch + kChannelGroupPadding + 8;

CONVT3D_HOST_DEVICE constexpr int sum_index(int cls, int channel, int position) {
  return cls * kClassPitch + channel * kPitch + channel / 8 * kChannelGroupPadding + position;
}

constexpr int kSumBytes = kClasses * kClassPitch * 4;

/// Of a position: element offsets of its first output and add, and what is inside.
struct Place {
  int64_t y, add;
  uint32_t flags;
};

// Flags of a place. Bit `axis`: the neighbour along the axis is inside x. Bit 3 + axis: so is the odd output along it.
constexpr uint32_t kInside = 1u << 6;

constexpr int kTapTable = kMaxTaps + 4;  // entries: a round of warps more than there are taps

constexpr int table_bytes(int rows) {
  return (kPositions * static_cast<int>(sizeof(Place)) + kChannels * 4 + kTapTable * 8 + rows * 8 + 127) / 128 * 128;
}

template <class Kind>
constexpr int shared_bytes(int rows) {
  int const stages = kStages * stage_bytes<Kind>(rows);
  return table_bytes(rows) + (stages > kSumBytes ? stages : kSumBytes);
}

template <class Kind>
constexpr bool takes_kind(Problem const& p) {
  for (int axis = 0; axis < 3; ++axis) {
    if (p.kernel[axis] != Kind::kKernel || p.padding[axis] != Kind::kPadding) return false;
  }
  return shared_bytes<Kind>(x_rows<Kind>(p.in_size).rows) <= kSharedLimit;
}

constexpr int64_t positions(Problem const& p) { return p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2]; }
constexpr int64_t position_tiles(Problem const& p) { return (positions(p) + kPositions - 1) / kPositions; }
constexpr int64_t channel_tiles(Problem const& p) { return (p.out_channels + kChannels - 1) / kChannels; }

/// Whether the kernel takes a problem that the family supports.
constexpr bool takes(Problem const& p) {
  if (p.groups != 1 || uses_ieee(p)) return false;
  for (int axis = 0; axis < 3; ++axis) {
    // As many positions as voxels of x.
    if (p.stride[axis] != 2 || p.dilation[axis] != 1 || (output_size(p, axis) + 1) / 2 != p.in_size[axis]) return false;
  }
  int64_t plane = p.in_size[1] * p.in_size[2];  // sizes are at most 2^20 each
  if (p.batch > kMaxInt || p.in_size[0] * plane > kMaxInt || positions(p) > kMaxInt / kPositions) return false;
  if (position_tiles(p) * channel_tiles(p) > kMaxInt) return false;
  return takes_kind<Kernel3>(p);
}

/// For tests: the kernel computes all that it takes, not only where it is the fastest of the family.
inline std::atomic<bool> wherever_possible{false};

constexpr int64_t kLeastChannels = 256;  // input channels
constexpr int64_t kMostTiles = 264;      // two on each multiprocessor of an H200: all at once

/// Whether the kernel computes a problem that the family supports. Measured on an H200 (docs/performance-log-sm80.md):
/// with more tiles, or fewer input channels in which to make up for its longer start and end, the other kernels are as
/// fast or faster.
inline bool chosen(Problem const& p) {
  if (!takes(p)) return false;
  bool const faster = p.in_channels >= kLeastChannels && position_tiles(p) * channel_tiles(p) <= kMostTiles;
  return faster || wherever_possible.load(std::memory_order_relaxed);
}

/// Whether the kernel reads the weights where they lie, but for their address: neighbouring output channels, and
/// everything else in steps of 16 bytes. TF32 rounds them first.
constexpr bool reads_weight_in_place(Problem const& p) {
  if (p.dtype == CONVT3D_F32 || p.weight_stride[1] != 1) return false;
  Size5 const shape = weight_shape(p);
  int64_t reach = 0;
  for (int axis = 0; axis < 5; ++axis) {
    if (shape[axis] == 1) continue;
    if (axis != 1 && (p.weight_stride[axis] < 0 || p.weight_stride[axis] % 8 != 0)) return false;
    if (p.weight_stride[axis] > kMaxInt / shape[axis]) return false;
    reach += (shape[axis] - 1) * p.weight_stride[axis];
  }
  return reach < kMaxInt && p.out_channels % 8 == 0;
}

/// Parts of the input channels that blocks of their own sum up, where there are too few tiles to fill a device. The
/// sums of the parts are added in order. By the problem alone, so that devices agree in every bit.
constexpr int splits(Problem const& p) {
  int64_t const tiles = position_tiles(p) * channel_tiles(p);
  int64_t const step = kStepBytes / element_bytes(p) * Kernel3::kSteps;
  int64_t const stages = (p.in_channels + step - 1) / step;
  int64_t const wanted = 128 / (tiles < 1 ? 1 : tiles), possible = stages / 2;
  int64_t const parts = wanted < possible ? wanted : possible;
  return parts < 2 ? 1 : static_cast<int>(parts);
}

/// Of the sums of parts: [tile][part][class][channel][position].
constexpr int64_t kPartFloats = int64_t{kClasses} * kChannels * kPositions;

constexpr int64_t partial_bytes(Problem const& p) {
  int const parts = splits(p);
  return parts == 1 ? 0 : position_tiles(p) * channel_tiles(p) * parts * kPartFloats * 4;
}

}  // namespace convt3d::sm80::joint
