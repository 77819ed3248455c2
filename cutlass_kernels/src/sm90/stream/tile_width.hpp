// SPDX-License-Identifier: Apache-2.0
//
// How wide the streaming kernel's tiles are along W, and what follows from it. Host code, constexpr.
#pragma once

#include "convt3d/activation.hpp"
#include "sm90/stream/rows.hpp"

namespace convt3d::sm90::stream {

/// The activations of a kernel of their own, before which add is added (forms.hpp).
constexpr bool is_common(int32_t activation) { return is_linear(activation) || activation == CONVT3D_ACT_X_HARDSWISH; }

/// Whether there is a kernel with narrow tiles: of the commonest activations, with add and y moved by boxes.
constexpr bool takes_narrow_tiles(Problem const& p) {
  Paths const path = choose_paths(p);
  return is_common(p.activation) && p.add_order == CONVT3D_ADD_BEFORE && path.add == Path::kBoxes &&
         path.y == Path::kBoxes;
}

/// Positions of a tile along W. A narrow tile takes about six sevenths of a wide one's time.
constexpr int tile_width(Problem const& p) {
  int64_t const wide = tiling(p, kTileW).tiles[2];
  int64_t const narrow = tiling(p, kNarrowTileW).tiles[2];
  return narrow * 6 < wide * 7 && takes_narrow_tiles(p) ? kNarrowTileW : kTileW;
}

constexpr Slab slab(Problem const& p) { return slab(p, tile_width(p)); }
constexpr Tiling tiling(Problem const& p) { return tiling(p, tile_width(p)); }

}  // namespace convt3d::sm90::stream
