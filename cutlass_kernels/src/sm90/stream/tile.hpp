// SPDX-License-Identifier: Apache-2.0
//
// From an item's number to its tile.
#pragma once

#include "sm90/stream/params.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90::stream {

/// Classes fastest, the one with the most products first: they share x. The last items come class by class instead, so
/// that those which end the kernel are short.
CUTLASS_DEVICE Item decode(StreamParams const& p, int number) {
  Item it;
  int rest, rank, tile;
  int const of_last = number - p.first_of_last;
  if (of_last < 0) {
    p.divide_classes(rest, rank, number);
  } else {
    p.divide_last(rank, rest, of_last);
    rest += p.places_before_last;
  }
  it.cls = p.class_order[rank];
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
