// SPDX-License-Identifier: Apache-2.0
//
// Which output each access of a plain load or store moves (stream/plain.hpp), and where it is in memory: host and
// device code, tested on the CPU.
#pragma once

#include <type_traits>

#include "sm90/stream/geometry.hpp"

namespace convt3d::sm90::stream {

/// One output column of a tile.
struct Column {
  int ow;
  bool inside;  // of y
};

/// Where a tile's outputs along W lie in y.
struct Columns {
  int32_t out_width, output_step;

  /// Of output `index` along W, which counts two for each position and 32 for each tile.
  CONVT3D_HOST_DEVICE constexpr Column at(int index, int pair) const {
    int const residue = 2 * pair + index % 2;
    int const ow = output_step * (index / 2) + residue;
    return {ow, residue < output_step && ow < out_width};
  }
};

constexpr Columns columns(Problem const& p) { return {static_cast<int32_t>(output_size(p)[2]), output_step(p)}; }

/// What plain accesses need to know of y, and of an add of its shape.
struct PlainExtent {
  int32_t out_height, out_channels, stride_h;
  Columns columns;
  int32_t heights[kMaxStride];  // H positions of each residue
};

constexpr PlainExtent plain_extent(Problem const& p) {
  PlainExtent e{static_cast<int32_t>(output_size(p)[1]),
                static_cast<int32_t>(p.out_channels),
                static_cast<int32_t>(p.stride[1]),
                columns(p),
                {}};
  for (int r = 0; r < e.stride_h; ++r) e.heights[r] = (e.out_height - r + e.stride_h - 1) / e.stride_h;
  return e;
}

/// Where a unit lies: its first channel, its first output along W (Columns), H position, plane and sample.
struct UnitPlace {
  int c, column, h, d, n, residue_h, pair;
};

/// A warp's accesses of a unit. A line is what 8 H positions of one channel (NCDHW) or of one output along W (NDHWC)
/// are in the unit; an access is some rows of a line, by all lanes.
template <int kElementBytes, bool kChannelsLast, int kBytes>
struct PlainMap {
  static constexpr int kElements = kBytes / kElementBytes;  // that a lane moves at one time
  static constexpr int kRowBytes = (kChannelsLast ? 16 : 2 * kTileW) * kElementBytes;
  static constexpr int kRowLanes = kRowBytes / kBytes;
  static constexpr int kRows = 32 / kRowLanes;  // of an access
  static constexpr int kAccesses = 8 / kRows;   // of a line
  static constexpr int kLines = kUnitBytes / 8 / kRowBytes;

  /// The lane's first element in a row.
  CONVT3D_HOST_DEVICE static constexpr int element(int lane) { return lane % kRowLanes * kElements; }

  /// H position of a lane's row in access 0. Rows of an access are neighbours in shared memory: for NCDHW every second
  /// position.
  CONVT3D_HOST_DEVICE static constexpr int first_row(int lane) { return lane / kRowLanes * (kChannelsLast ? 1 : 2); }

  /// H position of access `i`, relative to that.
  CONVT3D_HOST_DEVICE static constexpr int row(int i) { return kChannelsLast ? kRows * i : i / 2 * 2 * kRows + i % 2; }

  // Bytes from the start of a unit to access `i` of line `number`, swizzled as the copy engine does: a lane's part,
  // some of its bits inverted, and what all lanes have in common.

  CONVT3D_HOST_DEVICE static constexpr int lane_bytes(int lane) {
    return lane / kRowLanes * kRowBytes + lane % kRowLanes * kBytes;
  }

  /// The bits; `number` matters modulo 2.
  CONVT3D_HOST_DEVICE static constexpr int inverted(int number, int i) {
    int const r = kChannelsLast ? row(i) : number % 2 * 4 + row(i) / 2;
    return r * kRowBytes / 128 % (kRowBytes / 16) << 4;
  }

  CONVT3D_HOST_DEVICE static constexpr int common_bytes(int number, int i) {
    return (kChannelsLast ? number * 8 + row(i) : i % 2 * (kLines * 4) + number * 4 + row(i) / 2) * kRowBytes;
  }

  CONVT3D_HOST_DEVICE static constexpr int place(int number, int i, int lane) {
    return (lane_bytes(lane) ^ inverted(number, i)) + common_bytes(number, i);
  }
};

/// Bytes that a lane's word holds of a row, where it takes the aligned words that a row of 16-bit elements lies in.
/// `left` elements are inside, counted from the lane's own; of an odd row, which starts in the upper half of a word,
/// the lane takes the element before and its own.
CONVT3D_HOST_DEVICE constexpr int row_word_bytes(int left, bool odd) {
  int const bytes = 2 * left + (odd ? 2 : 0);
  return bytes < 0 ? 0 : bytes > 4 ? 4 : bytes;
}

/// A lane's way through a unit of a tensor, two lines at a time: neighbouring channels (NCDHW) or outputs along W
/// (NDHWC).
struct PlainWalk {
  char* line;            // the lane's first access
  int64_t row;           // bytes from one H position to the next
  int64_t second, pair;  // from the first line of a pair to the second, and to the next pair's
  int rows;              // H positions inside, counted from the lane's first
  int rows_of_tile;      // the same, wherever the lane is along W
  int left;              // NCDHW: outputs of the row inside, from the lane's first on
  int pairs[2];          // whose first line is inside, and whose second one is
  bool both;             // both elements of an access are inside
};

template <int kElementBytes, bool kChannelsLast, int kBytes>
CONVT3D_HOST_DEVICE constexpr PlainWalk plain_walk(PlainExtent const& e, UnitPlace const& u, char* base,
                                                   int64_t const* stride, int lane) {
  using Map = PlainMap<kElementBytes, kChannelsLast, kBytes>;
  PlainWalk w{};
  int const at = Map::element(lane);
  int const h = (u.h + Map::first_row(lane)) * e.stride_h + u.residue_h;
  int64_t offset = u.n * stride[0] + u.d * stride[2] + h * stride[3];
  w.row = e.stride_h * stride[3] * kElementBytes;
  w.rows = w.rows_of_tile = e.heights[u.residue_h] - u.h - Map::first_row(lane);
  Column const first = e.columns.at(u.column + (kChannelsLast ? 0 : at), u.pair);
  offset += first.ow * stride[4] + (u.c + (kChannelsLast ? at : 0)) * stride[1];
  int left = 0, step = 2;  // lines, or the outputs along W that they are of, and from one pair to the next
  if (kChannelsLast) {
    step = e.columns.output_step;
    left = e.columns.out_width - first.ow;
    w.second = stride[4] * kElementBytes;
    if (u.c + at >= e.out_channels) w.rows = 0;
    w.both = u.c + at + 1 < e.out_channels;
  } else {
    left = e.out_channels - u.c;
    w.second = stride[1] * kElementBytes;
    if (!first.inside) w.rows = 0;
    w.left = e.columns.out_width - first.ow;
    w.both = e.columns.at(u.column + at + 1, u.pair).inside;
  }
  w.pair = step * w.second;
  w.pairs[0] = (left + step - 1) / step;
  w.pairs[1] = kChannelsLast && 2 * u.pair + 1 >= step ? 0 : (left + step - 2) / step;
  w.line = base + offset * kElementBytes;
  return w;
}

/// Calls move(which of its pair, address in memory, rows inside, address of the pair in shared memory) for every line
/// of the unit at `unit`.
template <class Map, class Move>
CONVT3D_HOST_DEVICE constexpr void for_each_line(PlainWalk w, uint32_t unit, int lane, Move&& move) {
  uint32_t shared = unit + Map::lane_bytes(lane);
#ifdef __CUDACC__
#pragma unroll 1
#endif
  for (int pair = 0; pair < Map::kLines / 2; ++pair) {
    move(std::integral_constant<int, 0>{}, w.line, pair < w.pairs[0] ? w.rows : 0, shared);
    move(std::integral_constant<int, 1>{}, w.line + w.second, pair < w.pairs[1] ? w.rows : 0, shared);
    w.line += w.pair;
    shared += Map::common_bytes(2, 0);
  }
}

}  // namespace convt3d::sm90::stream
