// SPDX-License-Identifier: Apache-2.0
//
// Host mathematics of the sm90 family at stride 2: which input offsets reach an output pair, how the multiply
// is split into 64-row weight blocks, and how many tiles there are. constexpr throughout, tested on the CPU.
//
// Output coordinates come in pairs o = 2 j + r (r = parity). Output (j, r) takes tap k from input i = j + delta
// where k = r + padding - 2 delta is a valid tap. `Window` is the range of deltas that either parity needs.
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"

namespace convt3d::sm90 {

// Tile of x that a CTA multiplies at one time: 16 x 8 positions (W x H), and 32 x 16 outputs of each D parity.
constexpr int kTileW = 16;
constexpr int kTileH = 8;
constexpr int kMaxWindow = 3;  // deltas per axis: 1 for k = 2, p = 0; 2 for k = 3; up to 3 for k = 4
constexpr int kMaxOffsets = kMaxWindow * kMaxWindow;  // (H, W) deltas

/// What decides the split of the work besides the sizes: the memory format of the tensors, and bytes per element.
struct Form {
  bool channels_last;
  int element;

  /// Elements in 16 bytes, the unit of shared memory.
  constexpr int vector() const { return 16 / element; }
};

/// Channels-last where neighbouring channels of y are neighbours in memory. (With one output along W its stride may be
/// anything: then either is right.)
constexpr Form form(Problem const& p) {
  return {p.out_channels > 1 && p.y_stride[1] == 1 && p.y_stride[4] != 1, element_bytes(p)};
}

/// Whether wgmma's A is the weights and its B the positions. With 128 positions as B, an instruction reads its operands
/// at three quarters of shared memory's rate; 64 positions as A by 64 weight rows take all of it, which NDHWC affords
/// where products are few: not in ieee mode.
constexpr bool weights_first(Problem const& p) { return !form(p).channels_last || uses_ieee(p); }

struct Window {
  int lo;
  int count;
};

constexpr int floor_half(int64_t value) { return static_cast<int>(value >= 0 ? value / 2 : -((1 - value) / 2)); }

CONVT3D_HOST_DEVICE constexpr int tap_of(int parity, int delta, int64_t padding) {
  return static_cast<int>(parity + padding - 2 * delta);
}

constexpr bool is_live(int parity, int delta, int64_t kernel, int64_t padding) {
  int const tap = tap_of(parity, delta, padding);
  return tap >= 0 && tap < kernel;
}

constexpr Window window(int64_t kernel, int64_t padding) {
  // Smallest delta: tap <= kernel - 1 for parity 0; largest: tap >= 0 for parity 1.
  int const lo = -floor_half(kernel - 1 - padding);
  int const hi = floor_half(1 + padding);
  return {lo, hi - lo + 1};
}

/// Taps that reach a parity.
constexpr int live_taps(int parity, int64_t kernel, int64_t padding) {
  Window const w = window(kernel, padding);
  int count = 0;
  for (int delta = w.lo; delta < w.lo + w.count; ++delta) count += is_live(parity, delta, kernel, padding);
  return count;
}

constexpr int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

/// Whether the copy engine steps by so many bytes, from one element of a dimension but the fastest to the next.
constexpr bool is_copy_step(int64_t bytes) { return bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 39; }

// Work split. A CTA keeps the weights of one class, the output channels that fill 64 bytes, and computes all eight
// parities of them: consumer group g the D parity g, and its accumulators the H and W parities of the channels. All
// CTAs are alike, so they stay in step and share x in L2 (classes of one D parity each multiply fewer zeros, but
// drift apart; measured no faster). In bytes, a class, its weights and its outputs are the same for every type.
constexpr int kClassBytes = 64;
constexpr int kGroups = 2;  // consumer warpgroups

CONVT3D_HOST_DEVICE constexpr int class_channels(int element) { return kClassBytes / element; }

constexpr int class_count(Problem const& p) { return ceil_div(p.out_channels, class_channels(element_bytes(p))); }

/// Rows of a weight block: class channels times H and W parities; 64 for fp32, 128 for 16-bit types.
CONVT3D_HOST_DEVICE constexpr int block_rows(int element) { return 4 * class_channels(element); }

/// What row `row` of a weight block multiplies in class `cls` and group `group`.
struct BlockRow {
  int channel;
  int parity[3];
};

/// NCDHW: the weights are wgmma's A, 64 rows at a time. Rows r and r + 8 of a warp's 16 meet in one thread, so they
/// are the two W parities: neighbouring outputs along W. A warp has neighbouring channels.
CONVT3D_HOST_DEVICE constexpr BlockRow block_row_ncdhw(int element, int cls, int group, int row) {
  int const channels = class_channels(element);
  int const part = row / 64;
  int const warp = row % 64 / 16;
  int const r = row % 8;
  return {cls * channels + warp * (channels / 4) + part * 4 + r % 4, {group, r / 4, (row / 8) % 2}};
}

/// NDHWC: the weights are wgmma's B, and thread q of four holds columns 8 j + 2 q and 8 j + 2 q + 1. These are, for
/// each H and W parity in turn, the channels of 16 neighbouring bytes.
CONVT3D_HOST_DEVICE constexpr BlockRow block_row_ndhwc(int element, int cls, int group, int row) {
  int const channels = class_channels(element);
  int const j = row / 8;
  int const per_parity = channels / 8;
  int const parity = j / per_parity;
  return {cls * channels + row % 8 / 2 * (channels / 4) + j % per_parity * 2 + row % 2,
          {group, parity / 2, parity % 2}};
}

/// NDHWC with the weights as A, as in ieee mode: a warp has one (H, W) parity, (0, 1), (1, 1), (1, 0) and (0, 0) in
/// turn, and the rows that meet in a thread are neighbouring channels.
CONVT3D_HOST_DEVICE constexpr int warp_parity(int warp, bool along_w) {
  return (along_w ? warp < 2 : warp % 3 != 0) ? 1 : 0;
}

CONVT3D_HOST_DEVICE constexpr BlockRow block_row_pairs(int cls, int group, int row) {
  int const warp = row / 16;
  return {cls * class_channels(4) + row % 8 * 2 + row / 8 % 2,
          {group, warp_parity(warp, false), warp_parity(warp, true)}};
}

CONVT3D_HOST_DEVICE constexpr BlockRow block_row(bool channels_last, bool weights_first, int element, int cls,
                                                 int group, int row) {
  return !channels_last  ? block_row_ncdhw(element, cls, group, row)
         : weights_first ? block_row_pairs(cls, group, row)
                         : block_row_ndhwc(element, cls, group, row);
}

/// Bytes from the start of a weight block's image to row `row`, input channel `k` of 32: rows of 128 bytes with the
/// 128-byte swizzle for fp32, of 64 bytes with the 64-byte swizzle for 16-bit types. 8 KB either way.
constexpr int kWeightBlockBytes = 8192;

CONVT3D_HOST_DEVICE constexpr int weight_offset(int element, int row, int k) {
  int const chunk = k * element / 16;
  int const swizzled = element == 4 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  return row * 32 * element + swizzled * 16 + k * element % 16;
}

/// One weight block, for 32 input channels: the input offset it applies to, counted from the window's start.
struct Block {
  int delta[3];
  int channel_block;  // 32 input channels
};

/// Blocks of 32 input channels.
CONVT3D_HOST_DEVICE constexpr int channel_blocks(int64_t in_channels) {
  return static_cast<int>((in_channels + 31) / 32);
}

/// Whether consumer group `group` multiplies slice `slice` (a D delta, counted from the window's start).
constexpr bool slice_live(Problem const& p, int group, int slice) {
  return is_live(group, window(p.kernel[0], p.padding[0]).lo + slice, p.kernel[0], p.padding[0]);
}

/// The weight blocks of one group, in the order in which they are multiplied: the slices that are live for its D
/// parity, the channels, the H and W offsets. A block multiplies zeros in the rows of parities that its offset does
/// not reach.
struct GroupProgram {
  int slices;             // live ones
  int slice[kMaxWindow];  // their numbers
  int channels, height, width;

  CONVT3D_HOST_DEVICE constexpr int count() const { return slices * channels * height * width; }

  CONVT3D_HOST_DEVICE constexpr Block block(int index) const {
    int const w = index % width;
    int const h = index / width % height;
    int const c = index / width / height % channels;
    return {{slice[index / width / height / channels], h, w}, c};
  }
};

constexpr GroupProgram group_program(Problem const& p, int group) {
  GroupProgram program{};
  for (int s = 0; s < window(p.kernel[0], p.padding[0]).count && s < kMaxWindow; ++s) {
    if (slice_live(p, group, s)) program.slice[program.slices++] = s;
  }
  program.channels = channel_blocks(p.in_channels);
  program.height = window(p.kernel[1], p.padding[1]).count;
  program.width = window(p.kernel[2], p.padding[2]).count;
  return program;
}

/// Weight blocks of a class, of both groups.
constexpr int class_blocks(Problem const& p) { return group_program(p, 0).count() + group_program(p, 1).count(); }

/// Where the blocks of one slice and channel block lie. With the rows of a parity together (block_row_pairs), a block
/// begins in the zeros that the one before it ends with, as far as it begins with zeros itself: one warp's rows in 14
/// of 16 blocks' room for k = 3.
struct BlockPlaces {
  int at[kMaxOffsets];  // bytes, by (H, W) offset
  int bytes;
};

constexpr BlockPlaces block_places(Problem const& p) {
  constexpr int kWarpBytes = kWeightBlockBytes / 4;
  Window const h = window(p.kernel[1], p.padding[1]);
  Window const w = window(p.kernel[2], p.padding[2]);
  auto live = [&](int offset, int warp) {
    return is_live(warp_parity(warp, false), h.lo + offset / w.count, p.kernel[1], p.padding[1]) &&
           is_live(warp_parity(warp, true), w.lo + offset % w.count, p.kernel[2], p.padding[2]);
  };
  BlockPlaces places{};
  for (int i = 0; i < h.count * w.count && i < kMaxOffsets; ++i) {
    int shared = 0;  // warps
    bool zeros = i > 0 && form(p).channels_last && weights_first(p);
    for (int warps = 1; warps < 4 && zeros; ++warps) {
      zeros = !live(i, warps - 1);
      bool fits = zeros;
      for (int last = 1; last <= warps; ++last) fits = fits && !live(i - 1, 4 - last);
      if (fits) shared = warps;
    }
    places.at[i] = places.bytes - shared * kWarpBytes;
    places.bytes = places.at[i] + kWeightBlockBytes;
  }
  return places;
}

/// Bytes of a class's weights, and where its block `block` begins in them.
constexpr int class_weight_bytes(Problem const& p) {
  GroupProgram const program = group_program(p, 0);
  return class_blocks(p) / (program.height * program.width) * block_places(p).bytes;
}

CONVT3D_HOST_DEVICE constexpr int image_offset(BlockPlaces const& places, int offsets, int block) {
  return block / offsets * places.bytes + places.at[block % offsets];
}

/// Shared-memory image of x for one D plane and the channels that fill 128 bytes (32 of fp32, 64 of 16-bit types): rows
/// of 128 bytes with the 128-byte swizzle. A stage holds one slab; a plane with more channels is several in a row. The
/// eight rows of a core matrix are neighbours along H where the weights are A (for NCDHW a thread's accumulators are
/// then whole output rows), otherwise along W (then they are whole channel runs).
struct Slab {
  int pitch;    // positions along the fast axis, with halo
  int columns;  // positions along the other
  int bytes;    // with a row to dump into, a multiple of 1024: a slab starts a swizzle atom
};

constexpr Slab slab(Problem const& p) {
  int const h = kTileH + window(p.kernel[1], p.padding[1]).count - 1;
  int const w = kTileW + window(p.kernel[2], p.padding[2]).count - 1;
  bool const first = weights_first(p);
  return {first ? h : w, first ? w : h, ceil_div((h * w + 1) * 128, 1024) * 1024};
}

/// Slabs of one D plane.
constexpr int slab_count(Problem const& p) { return ceil_div(p.in_channels * element_bytes(p), 128); }

constexpr int kSlabRowBytes = 128;

/// The 128-byte swizzle.
CONVT3D_HOST_DEVICE constexpr uint32_t swizzled_slab(uint32_t address) { return address ^ (address >> 3 & 0x70u); }

/// Bytes from the start of a slab to where its row `row` has vector `group` of 8.
CONVT3D_HOST_DEVICE constexpr int slab_offset(int row, int group) { return row * 128 + (((group ^ row) & 7) << 4); }

/// The group at an address that slab_offset gave.
CONVT3D_HOST_DEVICE constexpr int slab_group(int offset) { return (offset >> 4 ^ offset >> 7) & 7; }

/// 16-byte units from the start of a slab to the operand of the (H, W) offset `h`, `w`: a shifted view of it. The
/// second 32 channels of a row of 16-bit types are 64 bytes further.
constexpr int operand_offset(Problem const& p, int h, int w) {
  int const pitch = slab(p).pitch;
  return (weights_first(p) ? w * pitch + h : h * pitch + w) * (128 / 16);
}

// Ring units: what one warp computes of a tile, 8 KB. In shared memory a unit is rows of 64 or 128 bytes, ordered so
// that neighbouring lanes have neighbouring rows; with the swizzle of that width, 16-byte accesses never conflict.
constexpr int kUnitBytes = 8192;

/// NCDHW: class channels / 4 channels x 16 whole output rows x 32 outputs, rows along W, ordered (oh mod 4, channel,
/// oh / 4). The row of a lane's accumulators of H position 2 (lane % 4) + b, weight rows 64 * part and on.
CONVT3D_HOST_DEVICE constexpr int unit_row_ncdhw(int element, int lane, int b, int part) {
  int const channels = class_channels(element) / 4;
  int const channel = part * 4 + lane / 4 % 4;
  return ((2 * b + lane / 16) * channels + channel) * 4 + lane % 4;
}

/// NDHWC: 4 output rows x 32 outputs x the class's channels, rows of channels, ordered (ow mod 2, oh, ow / 2). The row
/// of a lane's accumulators of W half `part`, H position 2 * warp + half and parities (ph, pw).
CONVT3D_HOST_DEVICE constexpr int unit_row_ndhwc(int lane, int part, int half, int ph, int pw) {
  return pw * 64 + (2 * half + ph) * 16 + part * 8 + lane / 4;
}

/// NDHWC with the weights as A: the class's channels of the positions' outputs of one parity, rows of channels, ordered
/// (ow / 2, oh / 2). The row of W position `w` and H position 2 (lane % 4) + b.
CONVT3D_HOST_DEVICE constexpr int unit_row_pairs(int lane, int w, int b) { return w * kTileH + lane % 4 * 2 + b; }

/// Tiles: `pairs` output pairs per axis, cut into (depth runs, H tiles, W tiles) per sample.
struct Tiling {
  int pairs[3];
  int run_length;  // consecutive D pairs that one CTA computes in a row, sharing x slices
  int runs_d, tiles_h, tiles_w;
  int64_t runs;  // of one class
};

constexpr Tiling tiling(Problem const& p, int run_length) {
  Size3 const out = output_size(p);
  Tiling t{};
  for (int axis = 0; axis < 3; ++axis) t.pairs[axis] = ceil_div(out[axis], 2);
  t.run_length = run_length;
  t.runs_d = ceil_div(t.pairs[0], run_length);
  t.tiles_h = ceil_div(t.pairs[1], kTileH);
  t.tiles_w = ceil_div(t.pairs[2], kTileW);
  t.runs = p.batch * t.runs_d * t.tiles_h * t.tiles_w;
  return t;
}

}  // namespace convt3d::sm90
