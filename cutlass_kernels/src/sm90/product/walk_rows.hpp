// SPDX-License-Identifier: Apache-2.0
//
// The kernel's way through rows (rows.hpp): a tile is neighbouring positions of x by neighbouring columns of the
// weight.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "sm90/product/params.hpp"

namespace convt3d::sm90::product {

constexpr auto kLoadHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

/// A column's output channel, and where its outputs lie beside a position's first one.
struct Column {
  int channel;
  int32_t y, add;
};
/// An output position: sample, and coordinates.
struct Place {
  int n, at[3];
};
/// Elements from a tensor's first to a place, with these steps.
CUTLASS_DEVICE int offset(int32_t const (&step)[5], Place const& v) {
  return v.n * step[0] + v.at[0] * step[2] + v.at[1] * step[3] + v.at[2] * step[4];
}

template <class T>
struct WalkRows {
  static constexpr int kBoxColumns = 128 / static_cast<int>(sizeof(T));    // 128 bytes of the weight
  static constexpr int kDepth = kStepBytes / static_cast<int>(sizeof(T));  // input channels of a step

  struct Tile {
    int position, column;  // the first
  };
  CUTLASS_DEVICE static Tile tile(ProductParams const& p, int number) {
    int position, column;
    p.position_tiles(column, position, number);
    return {position * kPositions, column * p.warpgroups * kColumns};
  }
  CUTLASS_DEVICE static int steps(ProductParams const& p, Tile const&) { return p.steps; }
  CUTLASS_DEVICE static int columns(ProductParams const& p) { return p.columns; }
  CUTLASS_DEVICE static uint32_t x_bytes(ProductParams const&) { return kXBytes; }
  CUTLASS_DEVICE static void clear_stages(ProductParams const&, unsigned char*, int, int) {}

  /// The step to bring in next.
  struct Ahead {
    Tile at;
    int step;
    CUTLASS_DEVICE void begin(ProductParams const& p, int number) {
      at = tile(p, number);
      step = 0;
    }
    CUTLASS_DEVICE void load_x(ProductParams const& p, uint64_t* barrier, unsigned char* to) const {
      cute::SM90_TMA_LOAD_2D::copy(&p.x_map, barrier, kLoadHint, to, step * kDepth, at.position);
    }
    CUTLASS_DEVICE void load_weight(ProductParams const& p, uint64_t* barrier, unsigned char* to) const {
      cute::SM90_TMA_LOAD_3D::copy(&p.weight_map, barrier, kLoadHint, to, 0, step * kDepth, at.column / kBoxColumns);
    }
    /// False behind the tile's last.
    CUTLASS_DEVICE bool next(ProductParams const& p) { return ++step < p.steps; }
  };

  CUTLASS_DEVICE static Place find_position(ProductParams const& p, int position) {
    Place v;
    p.divide_w(v.n, v.at[2], position);
    p.divide_h(v.n, v.at[1], v.n);
    p.divide_d(v.n, v.at[0], v.n);
    return v;
  }
  /// Where the first output of position `index` of a tile lies in y, -1 where there is none, and in add.
  CUTLASS_DEVICE static int2 find_place(ProductParams const& p, Tile const& of, int index) {
    int const position = of.position + index;
    Place const v = find_position(p, min(position, p.positions - 1));
    return {position < p.positions ? offset(p.y_step, v) : -1, offset(p.add_step, v)};
  }
  CUTLASS_DEVICE static bool is_whole(ProductParams const& p, Tile const& of) {
    return of.position + kPositions <= p.positions;
  }

  /// A column's channel and its tap.
  CUTLASS_DEVICE static int find_tap(ProductParams const& p, int column, int (&tap)[3]) {
    int number, channel;
    p.divide_channels(number, channel, column);
    p.divide_kernel_w(number, tap[2], number);
    p.divide_kernel_h(tap[0], tap[1], number);
    return channel;
  }
  CUTLASS_DEVICE static Column find_column(ProductParams const& p, int column) {
    int tap[3];
    Column c;
    c.channel = find_tap(p, column, tap);
    c.y = c.add = c.channel;
    for (int axis = 0; axis < 3; ++axis) {
      c.y += tap[axis] * p.y_tap[axis];
      c.add += tap[axis] * p.add_tap[axis];
    }
    return c;
  }
  /// The output of a position of a tile in a column; n is -1 where there is none.
  CUTLASS_DEVICE static Place find_output(ProductParams const& p, Tile const& of, int index, int column) {
    int tap[3];
    find_tap(p, column, tap);
    if (of.position + index >= p.positions) return {-1, {}};
    Place v = find_position(p, of.position + index);
    for (int axis = 0; axis < 3; ++axis) v.at[axis] = v.at[axis] * p.cold.stride[axis] + tap[axis];
    return v;
  }
};

}  // namespace convt3d::sm90::product
