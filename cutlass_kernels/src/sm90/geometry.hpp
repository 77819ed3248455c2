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

// Tile of one accumulator: 16 x 8 input positions (W x H). One 8-row core matrix runs along H, so that a thread
// holds whole output rows, and a row of shared memory is one row of 32 outputs along W.
constexpr int kTileW = 16;
constexpr int kTileH = 8;
constexpr int kBlockM = 64;     // rows of one wgmma: 16 output channels times H and W parities
constexpr int kMaxWindow = 3;   // deltas per axis: 1 for k = 2, p = 0; 2 for k = 3; up to 3 for k = 4
constexpr int kMaxBlocks = 24;  // weight blocks of one accumulator group that can be resident

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

constexpr int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Work split. A CTA keeps the weights of one class, 16 output channels, and computes all eight parities of them:
// consumer group g the D parity g, and the 64 rows of its accumulator the H and W parities of the channels. All CTAs
// are alike, so they stay in step and share x in L2 (classes of one D parity each multiply fewer zeros, but drift
// apart; measured no faster).
constexpr int kClassChannels = 16;
constexpr int kGroups = 2;        // consumer warpgroups
constexpr int kUnitChannels = 4;  // of one warp

constexpr int class_count(int64_t out_channels) { return ceil_div(out_channels, kClassChannels); }

/// What row `row` of a weight block multiplies in class `cls` and group `group`. Rows r and r + 8 of a warp's 16 meet
/// in one thread, so they are the two W parities: four neighbouring outputs per thread.
struct BlockRow {
  int channel;
  int parity[3];
};

CONVT3D_HOST_DEVICE constexpr BlockRow block_row(int cls, int group, int row) {
  int const warp = row / 16;
  int const r = row % 8;
  return {cls * kClassChannels + warp * kUnitChannels + r % 4, {group, r / 4, (row / 8) % 2}};
}

/// One 64 x 32 weight block: the input offset it applies to. Blocks of a slice (one D delta) are neighbours.
struct Block {
  int delta[3];
  int channel_block;  // 32 input channels
};

/// The weight blocks of one group in order, slice by slice.
struct GroupProgram {
  int count;
  int slice_end[kMaxWindow];  // blocks of slice s: [slice_end[s - 1], slice_end[s])
  Block block[kMaxBlocks];
};

/// The blocks of group `group`: every window offset that is live for its D parity and for some H parity; a block
/// multiplies zeros in the rows of other parities. `count` is the true number even where it exceeds kMaxBlocks (then
/// the list is cut).
constexpr GroupProgram group_program(Problem const& p, int group) {
  GroupProgram program{};
  Window const wd = window(p.kernel[0], p.padding[0]);
  Window const wh = window(p.kernel[1], p.padding[1]);
  Window const ww = window(p.kernel[2], p.padding[2]);
  int const channel_blocks = ceil_div(p.in_channels, 32);
  for (int d = 0; d < wd.count && d < kMaxWindow; ++d) {
    for (int h = 0; h < wh.count && is_live(group, wd.lo + d, p.kernel[0], p.padding[0]); ++h) {
      for (int w = 0; w < ww.count; ++w) {
        for (int c = 0; c < channel_blocks; ++c) {
          if (program.count < kMaxBlocks) program.block[program.count] = {{d, h, w}, c};
          ++program.count;
        }
      }
    }
    program.slice_end[d] = program.count;
  }
  return program;
}

/// Weight blocks of a class, of both groups.
constexpr int class_blocks(Problem const& p) { return group_program(p, 0).count + group_program(p, 1).count; }

/// Shared-memory image of x for one D plane: rows of 128 bytes (32 channels), H fastest, `pitch` rows per W.
struct Slab {
  int pitch;    // rows: kTileH + halo
  int columns;  // W positions: kTileW + halo
  int bytes;    // of one 32-channel slab and a row to dump into, a multiple of 1024: a slab starts a swizzle atom
};

constexpr Slab slab(Problem const& p) {
  int const pitch = kTileH + window(p.kernel[1], p.padding[1]).count - 1;
  int const columns = kTileW + window(p.kernel[2], p.padding[2]).count - 1;
  return {pitch, columns, ceil_div((pitch * columns + 1) * 128, 1024) * 1024};
}

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
