// SPDX-License-Identifier: Apache-2.0
//
// Host mathematics of the streaming kernel: its split of the work, its weight pieces and its units. constexpr
// throughout, tested on the CPU. Windows, slabs and swizzles are those of the resident kernel (sm90/geometry.hpp).
//
// A tile is 64 output channels of one (D, H) residue and a pair of neighbouring outputs along W, at 16 x 8 positions
// (W x H; 12 x 8 where that leaves fewer of them empty, tile_width.hpp) of two neighbouring D positions, one for each
// consumer group. Every product is of a live tap, and each weight
// piece that comes in serves 256 positions, which is what the L2 cache can feed (the resident kernel's split would need
// twice that).
#pragma once

#include "sm90/geometry.hpp"

namespace convt3d::sm90::stream {

constexpr int kTileChannels = 64;
constexpr int kNarrowTileW = 12;
constexpr int kMaxStride = 4;
constexpr int kMaxClasses = 16;  // class = (stride along H * D residue + H residue) * pairs along W + pair
constexpr int kPieceBytes = 8192;
constexpr int kMaxKernel = 5;
constexpr int kMaxPieces = 2 * kMaxKernel * kMaxKernel;  // of a class, for one D delta and slab

constexpr int floor_div(int64_t a, int64_t b) { return static_cast<int>(a >= 0 ? a / b : -((b - 1 - a) / b)); }

/// One dimension. Output o = stride * j + residue takes tap k from input i = j + delta, where k = residue + padding -
/// stride * delta is a valid tap. `live` is the range of deltas of a residue.
struct Axis {
  int64_t kernel, padding;
  int stride;

  constexpr int tap(int residue, int delta) const { return static_cast<int>(residue + padding - stride * delta); }

  constexpr Window live(int residue) const {
    int const lo = -floor_div(kernel - 1 - padding - residue, stride);
    int const hi = floor_div(residue + padding, stride);
    return {lo, hi >= lo ? hi - lo + 1 : 0};
  }
};

constexpr Axis axis(Problem const& p, int axis) {
  return {p.kernel[axis], p.padding[axis], static_cast<int>(p.stride[axis])};
}

// Along W a position is a pair of outputs, step * j + 2 * pair + parity. From stride 2 on the step is the stride, and
// residues 2 * pair + parity read columns j + delta of x; at stride 1 it is 2, and both read columns 2 j + parity +
// delta, so that neighbouring positions are two columns apart.

/// Pairs of residues along W; of an odd stride, the last parity of the last pair is computed like the one before it
/// and not stored.
constexpr int pairs_w(Problem const& p) { return ceil_div(p.stride[2], 2); }

/// Outputs along W from one position to the next.
constexpr int output_step(Problem const& p) { return p.stride[2] == 1 ? 2 : static_cast<int>(p.stride[2]); }

constexpr int class_total(Problem const& p) { return static_cast<int>(p.stride[0] * p.stride[1]) * pairs_w(p); }

/// Columns of x from one position to the next.
constexpr int column_step(Problem const& p) { return p.stride[2] == 1 ? 2 : 1; }

constexpr int residue_w(Problem const& p, int pair, int parity) {
  int const residue = 2 * pair + parity;
  return residue < p.stride[2] ? residue : static_cast<int>(p.stride[2]) - 1;
}

/// Columns of x that a parity of a pair reads, relative to a position's first.
constexpr Window live_columns(Problem const& p, int pair, int parity) {
  Axis const a = axis(p, 2);
  if (a.stride != 1) return a.live(residue_w(p, pair, parity));
  Window const w = a.live(0);
  return {w.lo + parity, w.count};
}

constexpr int tap_of_column(Problem const& p, int pair, int parity, int column) {
  Axis const a = axis(p, 2);
  return a.stride != 1 ? a.tap(residue_w(p, pair, parity), column) : a.tap(0, column - parity);
}

/// What a tile reads around its positions: the union over residues.
constexpr Window reach(Window const& a, Window const& b) {
  int const lo = a.lo < b.lo ? a.lo : b.lo;
  int const end = a.lo + a.count > b.lo + b.count ? a.lo + a.count : b.lo + b.count;
  return {lo, end - lo};
}
constexpr Window rows_window(Problem const& p) {
  Axis const a = axis(p, 1);
  return reach(a.live(0), a.live(a.stride - 1));
}
constexpr Window columns_window(Problem const& p) {
  return reach(live_columns(p, 0, 0), live_columns(p, pairs_w(p) - 1, 1));
}

constexpr int channel_tiles(Problem const& p) { return ceil_div(p.out_channels, kTileChannels); }

/// One weight piece: 64 output channels by the input channels of a slab, for one tap.
struct Piece {
  int delta[3];  // along W, the column
  int parity_w;
  int tap[3];
  int slab;
};

/// The pieces of one class, in the order in which they are multiplied: plane by plane, where a plane is that of a slab
/// and D delta. Those of a plane come with those of a W parity together, since sums are of pieces in a row, and in turn
/// the second parity or the first one begins, so that it goes on from plane to plane; in ieee mode, whose sums are
/// shorter, row by row.
struct Program {
  Window depth, height, width[2];
  // tap = first - step * delta along D and H, and along W for each parity.
  int first[2], step[2], first_w[2], step_w;
  bool parities_apart;  // but in ieee mode

  /// Of a plane.
  CONVT3D_HOST_DEVICE constexpr int pieces() const { return height.count * (width[0].count + width[1].count); }

  /// The W parity that a plane begins with.
  CONVT3D_HOST_DEVICE static constexpr int first_parity(int plane) { return 1 - plane % 2; }

  /// Piece `index` of a plane that begins with the first parity.
  constexpr Piece place(int index) const { return piece(index + (parities_apart ? pieces() : 0)); }

  /// Piece `index` of the class.
  CONVT3D_HOST_DEVICE constexpr Piece piece(int index) const {
    int const plane = index / pieces();
    int const rows_at_once = parities_apart ? height.count : 1;
    int const per_part = rows_at_once * (width[0].count + width[1].count);
    int const in_part = index % pieces() % per_part;
    int const begins = parities_apart ? first_parity(plane) : 0;
    int const of_first = rows_at_once * width[begins].count;
    int const parity = in_part < of_first ? begins : 1 - begins;
    int const of_parity = in_part < of_first ? in_part : in_part - of_first;
    int const w = width[parity].lo + of_parity % width[parity].count;
    int const d = depth.lo + plane % depth.count;
    int const h = height.lo + index % pieces() / per_part + of_parity / width[parity].count;
    return {{d, h, w},
            parity,
            {first[0] - step[0] * d, first[1] - step[1] * h, first_w[parity] - step_w * w},
            plane / depth.count};
  }
};

constexpr Program program(Problem const& p, int cls) {
  Axis const d = axis(p, 0), h = axis(p, 1);
  int const pair = cls % pairs_w(p);
  int const residue[2] = {cls / pairs_w(p) / h.stride, cls / pairs_w(p) % h.stride};
  return {d.live(residue[0]),
          h.live(residue[1]),
          {live_columns(p, pair, 0), live_columns(p, pair, 1)},
          {d.tap(residue[0], 0), h.tap(residue[1], 0)},
          {d.stride, h.stride},
          {tap_of_column(p, pair, 0, 0), tap_of_column(p, pair, 1, 0)},
          static_cast<int>(p.stride[2]),
          !uses_split(p)};
}

/// Pieces of a class, for all slabs. In memory they follow each other as they are multiplied.
constexpr int class_pieces(Problem const& p, int cls) {
  Program const g = program(p, cls);
  return slab_count(p) * g.depth.count * g.pieces();
}

/// Classes by the number of their products, the longest first.
struct ClassOrder {
  int cls[kMaxClasses];
};

constexpr ClassOrder class_order(Problem const& p) {
  ClassOrder order{};
  int count = 0;
  for (int cls = class_total(p) - 1; cls >= 0; --cls) {
    int at = count++;
    for (; at > 0 && class_pieces(p, order.cls[at - 1]) < class_pieces(p, cls); --at) order.cls[at] = order.cls[at - 1];
    order.cls[at] = cls;
  }
  return order;
}

/// Pieces whose products may gather in one accumulator (docs/numerics.md): 128 products in tf32 mode, 256 of fp16, 512
/// of bf16. Parts (ieee mode) have a way of their own.
constexpr int pieces_of_sum(bool is_bf16) { return is_bf16 ? 8 : 4; }

/// How many pieces of a tile are multiplied into its sums, the first ones, before the others gather in sums of their
/// own: until one of the W parities has as many as it may.
constexpr int direct_pieces(Problem const& p, int cls) {
  Program const g = program(p, cls);
  int const planes = slab_count(p) * g.depth.count;
  int const most = pieces_of_sum(p.dtype == CONVT3D_BF16);
  int taken[2] = {0, 0};
  for (int plane = 0; plane < planes; ++plane) {
    for (int side = 0; side < 2; ++side) {
      int const parity = Program::first_parity(plane + side);
      int const count = g.height.count * g.width[parity].count;
      int const room = most - taken[parity];
      taken[parity] += count < room ? count : room;
      if (count > room) return taken[0] + taken[1];
    }
  }
  return taken[0] + taken[1];
}

/// Pieces of a channel tile: its classes, one after the other.
constexpr int tile_pieces(Problem const& p) {
  int sum = 0;
  for (int cls = 0; cls < class_total(p); ++cls) sum += class_pieces(p, cls);
  return sum;
}

/// Whether a thread finishes pairs of neighbouring channels: in NDHWC, but of 16-bit types, which the instructions for
/// matrices move.
CONVT3D_HOST_DEVICE constexpr bool pairs_channels(bool channels_last, int element) {
  return channels_last && element == 4;
}

/// Output channel, within the tile, of a piece's row. Rows r and r + 8 of a warp's 16 meet in one thread.
CONVT3D_HOST_DEVICE constexpr int row_channel(bool pairs, int row) {
  int const warp = row / 16;
  int const half = row / 8 % 2;
  int const i = row % 8;
  return warp * 16 + (pairs ? 2 * i + half : 8 * half + i);
}

/// Bytes from the start of a piece to row `row`, byte `byte` of the slab's 128 bytes of channels.
CONVT3D_HOST_DEVICE constexpr int piece_offset(int row, int byte) {
  return row * 128 + ((byte / 16 ^ (row & 7)) << 4) + byte % 16;
}

/// For tiles of `width` positions along W. Slab rows run along H in both formats, so that an operand is as many groups
/// of eight positions, `pitch` apart.
constexpr Slab slab(Problem const& p, int width) {
  int const h = kTileH + rows_window(p).count - 1;
  int const w = (width - 1) * column_step(p) + columns_window(p).count;
  return {h, w, ceil_div(h * w * 128, 1024) * 1024};
}

/// 16-byte units from the start of a slab to the operand of row and column deltas counted from the window's start.
constexpr int operand_offset(int pitch, int h, int w) { return (w * pitch + h) * (128 / 16); }

// Units: 8 KB of what one warp computes, that is 16 channels of 8 output rows (those of the class's H residue) x 32
// outputs: two units of fp32, one of 16-bit types. Of a narrow tile they hold 24 outputs along W, in 6 KB of that.
CONVT3D_HOST_DEVICE constexpr int units_per_warp(int element) { return element / 2; }

/// NCDHW: rows along W of 32 outputs (24 in the same places), ordered (b, channel, H position / 2), where b is the H
/// position modulo 2: two boxes of 4 KB. Of fp32, a unit is the channels of one accumulator half.
CONVT3D_HOST_DEVICE constexpr int unit_row_ncdhw(int element, int lane, int half, int b) {
  return element == 4 ? b * 32 + lane : b * 64 + half * 32 + lane;
}

/// NDHWC: rows of 16 channels (64 bytes of fp32, 32 of 16-bit types), ordered (W, H position). Of fp32, a unit is half
/// of the tile along W. `ow` counts from the unit's first output.
CONVT3D_HOST_DEVICE constexpr int unit_row_ndhwc(int lane, int ow, int b) { return ow * 8 + lane % 4 * 2 + b; }

struct Tiling {
  int tiles[3];  // D (two pairs each), H, W
  int64_t items;
};

constexpr Tiling tiling(Problem const& p, int width) {
  Size3 const out = output_size(p);
  int const extent[3] = {kGroups * static_cast<int>(p.stride[0]), kTileH * static_cast<int>(p.stride[1]),
                         output_step(p) * width};
  Tiling t{};
  t.items = p.batch * channel_tiles(p) * class_total(p);
  for (int axis = 0; axis < 3; ++axis) {
    t.tiles[axis] = ceil_div(out[axis], extent[axis]);
    t.items *= t.tiles[axis];
  }
  return t;
}

}  // namespace convt3d::sm90::stream
