// SPDX-License-Identifier: Apache-2.0
//
// The kernel's way through boxes (boxes.hpp): a tile is a box of positions by neighbouring output channels, of one
// residue class; its steps are those of each tap in turn.
#pragma once

#include "sm90/product/walk_rows.hpp"

namespace convt3d::sm90::product {

template <class T>
struct WalkBoxes {
  static constexpr int kBoxColumns = WalkRows<T>::kBoxColumns, kDepth = WalkRows<T>::kDepth;

  struct Tile {
    int cls, column;  // the first
    int n, at[3];     // the first position
  };
  CUTLASS_DEVICE static Tile tile(ProductParams const& p, int number) {
    BoxParams const& b = p.boxes;
    Tile t;
    int place;
    p.position_tiles(t.cls, place, number);
    b.divide_columns(t.cls, t.column, t.cls);
    t.column *= p.warpgroups * kColumns;
    for (int axis = 3; axis > 0; --axis) {
      b.divide_tiles[axis](place, t.at[axis - 1], place);
      t.at[axis - 1] *= b.box.size[axis];
    }
    t.n = place * b.box.size[0];
    return t;
  }
  CUTLASS_DEVICE static int steps(ProductParams const& p, Tile const& of) {
    BoxClass const& c = p.boxes.cls[of.cls];
    return c.taps[0] * c.taps[1] * c.taps[2] * p.steps;
  }
  CUTLASS_DEVICE static int columns(ProductParams const& p) { return p.columns; }
  CUTLASS_DEVICE static uint32_t x_bytes(ProductParams const& p) {
    return static_cast<uint32_t>(p.boxes.rows * kStepBytes);
  }
  /// By the first threads: zeros in the rows that no box writes. Their sums are no outputs, but nan among them would
  /// have a thread look for nan in every tile.
  CUTLASS_DEVICE static void clear_stages(ProductParams const& p, unsigned char* stages, int stage_bytes, int threads) {
    int const bytes = (kPositions - p.boxes.rows) * kStepBytes;
    if (bytes == 0) return;
    for (int slot = 0; slot < p.stages; ++slot) {
      unsigned char* const first = stages + slot * stage_bytes + p.boxes.rows * kStepBytes;
      for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += threads * 16) {
        *reinterpret_cast<uint4*>(first + at) = uint4{};
      }
    }
    cutlass::arch::fence_view_async_shared();
  }

  /// The step to bring in next: of tap `tap`, counted along each axis in the class.
  struct Ahead {
    Tile at;
    int tap[3], channel;
    int from[3], box;  // the tap's place in x, and in the weight
    CUTLASS_DEVICE void begin(ProductParams const& p, int number) {
      at = tile(p, number);
      tap[0] = tap[1] = tap[2] = channel = 0;
      find_tap(p);
    }
    /// From the tile's first step to number `steps`.
    CUTLASS_DEVICE void skip(ProductParams const& p, int steps) {
      BoxClass const& c = p.boxes.cls[at.cls];
      channel = steps % p.steps * kDepth;
      int rest = steps / p.steps;
      for (int axis = 2; axis > 0; --axis) {
        tap[axis] = rest % c.taps[axis];
        rest /= c.taps[axis];
      }
      tap[0] = rest;
      find_tap(p);
    }
    CUTLASS_DEVICE void find_tap(ProductParams const& p) {
      BoxClass const& c = p.boxes.cls[at.cls];
      int number = 0;
      for (int axis = 0; axis < 3; ++axis) {
        from[axis] = at.at[axis] + c.base[axis] - tap[axis];
        number = number * p.cold.kernel[axis] + c.first_tap[axis] + tap[axis] * p.cold.stride[axis];
      }
      box = (number * p.columns + at.column) / kBoxColumns;
    }
    CUTLASS_DEVICE void load_x(ProductParams const& p, uint64_t* barrier, unsigned char* to) const {
      cute::SM90_TMA_LOAD_5D::copy(&p.x_map, barrier, kLoadHint, to, channel, from[2], from[1], from[0], at.n);
    }
    CUTLASS_DEVICE void load_weight(ProductParams const& p, uint64_t* barrier, unsigned char* to) const {
      cute::SM90_TMA_LOAD_3D::copy(&p.weight_map, barrier, kLoadHint, to, 0, channel, box);
    }
    /// False behind the tile's last.
    CUTLASS_DEVICE bool next(ProductParams const& p) {
      channel += kDepth;
      if (channel < p.steps * kDepth) return true;
      channel = 0;
      BoxClass const& c = p.boxes.cls[at.cls];
      for (int axis = 2; axis >= 0; --axis) {
        if (++tap[axis] < c.taps[axis]) {
          find_tap(p);
          return true;
        }
        tap[axis] = 0;
      }
      return false;
    }
  };

  /// The output of a position of a tile; n is -1 where there is none.
  CUTLASS_DEVICE static Place find_output(ProductParams const& p, Tile const& of, int index, int = 0) {
    BoxParams const& b = p.boxes;
    BoxClass const& c = b.cls[of.cls];
    Place v;
    int rest = index;
    bool inside = index < b.rows;
    for (int axis = 2; axis >= 0; --axis) {
      int local;
      b.divide_box[axis + 1](rest, local, rest);
      int const at = of.at[axis] + local;
      inside = inside && at < c.outputs[axis];
      v.at[axis] = at * p.cold.stride[axis] + c.residue[axis];
    }
    v.n = of.n + rest;
    if (!inside || v.n >= p.positions) v.n = -1;
    return v;
  }
  /// Where the output lies in y, -1 where there is none, and in add.
  CUTLASS_DEVICE static int2 find_place(ProductParams const& p, Tile const& of, int index) {
    Place const v = find_output(p, of, index);
    return v.n < 0 ? int2{-1, 0} : int2{offset(p.y_step, v), offset(p.add_step, v)};
  }
  CUTLASS_DEVICE static bool is_whole(ProductParams const& p, Tile const& of) {
    BoxParams const& b = p.boxes;
    BoxClass const& c = b.cls[of.cls];
    bool whole = b.rows == kPositions && of.n + b.box.size[0] <= p.positions;
    for (int axis = 0; axis < 3; ++axis) whole = whole && of.at[axis] + b.box.size[axis + 1] <= c.outputs[axis];
    return whole;
  }
  CUTLASS_DEVICE static Column find_column(ProductParams const&, int column) { return {column, column, column}; }
};

}  // namespace convt3d::sm90::product
