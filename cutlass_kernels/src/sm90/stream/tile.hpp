// SPDX-License-Identifier: Apache-2.0
//
// From an item's number to its tile.
#pragma once

#include "sm90/stream/params.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90::stream {

/// Classes fastest, the one with the most taps first: they share x, and together they fill the lines of y.
CUTLASS_DEVICE Item decode(StreamParams const& p, int number) {
  Item it;
  int rest, tile;
  p.divide_classes(rest, it.cls, number);
  it.cls = p.classes - 1 - it.cls;
  p.divide_channels(rest, tile, rest);
  it.channel = tile * kTileChannels;
  p.divide_tiles_h(rest, it.h, rest);
  p.divide_tiles_w(rest, it.w, rest);
  p.divide_tiles_d(it.n, it.d, rest);
  it.d *= kGroups;
  return it;
}

/// The residues of a class: along D and H, and the pair of residues along W.
struct Residues {
  int d, h, pair;
};

CUTLASS_DEVICE Residues residues(StreamParams const& p, int cls) {
  Residues r;
  int rest;
  p.divide_pairs(rest, r.pair, cls);
  p.divide_stride_h(r.d, r.h, rest);
  return r;
}

}  // namespace convt3d::sm90::stream
