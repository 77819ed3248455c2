// SPDX-License-Identifier: Apache-2.0
//
// Choice of the streaming kernel's tuning parameters, and its workspace. Host code.
#pragma once

#include "prepare/copies.hpp"
#include "sm90/stream/config.hpp"
#include "sm90/stream/tile_width.hpp"

namespace convt3d::sm90::stream {

constexpr size_t shared_bytes(Problem const& p, Config const& c) {
  return kAlignmentBytes + kBarrierBytes + static_cast<size_t>(c.slots) * kPieceBytes +
         static_cast<size_t>(c.stages) * slab(p).bytes + static_cast<size_t>(c.ring) * kUnitBytes;
}

/// Planes of x that a tile of a class needs: one more than its D deltas.
constexpr int most_planes(Problem const& p) {
  int most = 0;
  for (int residue = 0; residue < p.stride[0]; ++residue) {
    int const count = axis(p, 0).live(residue).count;
    most = count > most ? count : most;
  }
  return kGroups - 1 + most;
}

/// Measured on an H200 (docs/performance-log.md).
constexpr Config choose_config(Problem const& p) {
  int const planes = most_planes(p);
  bool const split = uses_split(p);
  bool const wide = element_bytes(p) == 4;
  Config c{planes + 1, 6, 0};  // a slab ahead; six pieces cover the latency of the L2 cache
  if (split) {
    // A slab of k2 has few products, so x must be on its way early: 256 -> 128, 32^3, (4, 6) / (5, 4) 0.328 / 0.320 ms.
    c = planes > kGroups ? Config{planes + 1, 6, 0} : Config{5, 4, 0};
  } else if (planes == kGroups) {
    // A slab has few products here, so x must be on its way early.
    c = wide ? Config{5, 4, 0} : Config{6, 6, 0};
  } else if (wide) {
    if (slab_count(p) <= 2) c.slots = 4;  // tiles of few products, which add and y take longer than
  } else if (slab_count(p) == 1 || tile_width(p) == kNarrowTileW) {
    ++c.stages;
  }
  auto fill_ring = [&] {
    while (c.ring < kLargestRing && shared_bytes(p, {c.stages, c.slots, c.ring + 1}) <= kSharedLimit) ++c.ring;
  };
  fill_ring();
  // The ring takes what is left, and eight units of it are worth more than a stage.
  while (c.ring < 8 && c.stages > planes + 1) {
    --c.stages;
    fill_ring();
  }
  // Otherwise units are worth more than a slab ahead: k3 64 -> 64, 64^3, 0.982 / 0.956 ms.
  if (split && planes > kGroups && column_step(p) == 1 && c.ring < kLargestRing) {
    --c.stages;
    fill_ring();
  }
  bool const tf32 = wide && !split && planes > kGroups;
  if (tf32 && c.ring < kLargestRing && c.slots > 5) {
    c.slots = 5;  // VQVAE's k4, NDHWC, six / five: 0.321 / 0.316 ms
    fill_ring();
  }
  // In ieee mode products take longer, and ten of them are worth more than the last stage and two pieces.
  if (split && c.ring < 8) {
    --c.stages;
    fill_ring();
  }
  if (c.ring < (split ? 10 : kSmallestRing)) {
    c.slots = 4;
    fill_ring();
  }
  // Where slabs are large, a slab ahead is worth less than ten units: k (3, 3, 1), 96 -> 48, stride 1 along W, NDHWC,
  // 0.209 / 0.199 ms.
  if (tf32 && c.ring >= kSmallestRing && c.ring < 8) {
    c.slots = 4;
    --c.stages;
    fill_ring();
  }
  return c;
}

/// Input channels of the prepared copy of x: the copy engine steps by 16 bytes; parts come in whole slabs.
constexpr int64_t padded_channels(Problem const& p) {
  if (uses_split(p)) return int64_t{slab_count(p)} * 32;
  return prepare::padded_channels(p.in_channels, element_bytes(p));
}

/// Whether x is read where it lies: the copy engine wants neighbouring channels and everything else in steps of 16
/// bytes. It rounds fp32 to TF32 on the way, to nearest, ties to even; parts must be prepared.
constexpr bool reads_x_in_place(Problem const& p) {
  if (uses_split(p) || p.x_alignment < 16 || p.x_stride[1] != 1) return false;
  Size5 const shape = x_shape(p);
  for (int axis : {0, 2, 3, 4}) {
    if (shape[axis] > 1 && !is_copy_step(p.x_stride[axis] * element_bytes(p))) return false;
  }
  return true;
}

/// More values of x than this that parts cannot hold send the problem to the sm80 family: each costs the cold path
/// about a thousand outputs.
constexpr unsigned long long too_many_bad(int64_t values) {
  return 8 + static_cast<unsigned long long>(values) / 131072;
}

/// Likewise tiny values. Only outputs that are small themselves are computed again, but where many values are tiny,
/// many are.
constexpr unsigned long long too_many_tiny(int64_t values) {
  return 8 + static_cast<unsigned long long>(values) / 16384;
}

/// Of `places`, each of which has an item of every class, how many are left for the end, where items come class by
/// class, the longest first: CTAs take items one ahead, and the last of them keep the kernel waiting. (Only these, as
/// the classes of a place share x and lines of y, and long items beside short ones keep both products and memory busy.)
/// ms, NDHWC, none / 4 / 8 / 16 for each multiprocessor: k3 256 -> 128 from 24^3, ieee 0.358 / 0.326 / 0.320 / 0.319,
/// fp16 0.127 / 0.115 / 0.114 / 0.114; 128 -> 64 from 48^3, tf32 0.471 / 0.457 / 0.463 / 0.469. Where y does not go by
/// boxes, none / 2 / 4 / 8: ieee 0.293 / 0.281 / 0.283 / 0.295, fp16 0.130 / - / 0.135 / 0.169.
constexpr int places_by_class(Problem const& p, int places, int multiprocessors) {
  ClassOrder const order = class_order(p);
  int const classes = class_total(p);
  if (class_pieces(p, order.cls[0]) == class_pieces(p, order.cls[classes - 1])) return 0;
  int const each = choose_paths(p).y == Path::kBoxes ? 4 : uses_split(p) ? 2 : 0;
  int const last = ceil_div(int64_t{each} * multiprocessors, classes);
  return last < places ? last : places;
}

struct Workspace {
  // Offsets and the total. The scan's results and what follows from them are of fp32 in ieee mode alone; behind the
  // total comes the sm80 family's then.
  size_t counter, owners, scans, weight_scans, weight_exponents, state, tiny_x, pieces, x, bytes;
};

constexpr Workspace workspace_layout(Problem const& p) {
  constexpr size_t kAlign = 128;
  size_t at = 0;
  auto place = [&](size_t bytes) {
    size_t const offset = at;
    at += (bytes + kAlign - 1) / kAlign * kAlign;
    return offset;
  };
  size_t const tiles = static_cast<size_t>(channel_tiles(p));
  bool const split = uses_split(p);
  int64_t const voxels = p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2];
  Workspace w{};
  w.counter = place(4);
  w.owners = place(static_cast<size_t>(tiling(p).items) * 4);
  w.scans = place(split ? kScanResults * 4 : 0);
  w.weight_scans = place(split ? tiles * kWeightScanResults * 4 : 0);
  w.weight_exponents = place(split ? tiles * 4 : 0);
  w.state = place(split ? sizeof(SplitState) : 0);
  w.tiny_x = place(split ? static_cast<size_t>(p.batch * p.in_size[0]) * 4 : 0);
  w.pieces = place(tiles * tile_pieces(p) * kPieceBytes);
  w.x = at;
  w.bytes = at;
  if (!reads_x_in_place(p)) w.bytes += static_cast<size_t>(voxels * padded_channels(p)) * element_bytes(p);
  return w;
}

}  // namespace convt3d::sm90::stream
