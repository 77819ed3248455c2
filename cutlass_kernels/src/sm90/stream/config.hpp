// SPDX-License-Identifier: Apache-2.0
//
// Choice of the streaming kernel's tuning parameters, and its workspace.
#pragma once

#include "sm90/config.hpp"
#include "sm90/stream/geometry.hpp"

namespace convt3d::sm90::stream {

constexpr int kStoreWarps = 2;
constexpr int kLoadWarps = 3;  // of add, where boxes do not bring it in
constexpr int kMaxSlots = 16;
constexpr int kSmallestRing = 5;  // a step of four units must not pass the ring
constexpr int kPieceCtas = 1024;  // of the pre-kernel, at most

struct Config {
  int stages;  // slabs of x
  int slots;   // weight pieces
  int ring;    // units
};

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

constexpr Config choose_config(Problem const& p) {
  // Two stages more than a tile needs at once, so that the next slab is on its way; six pieces cover the latency of the
  // L2 cache; the ring takes what is left, and eight units of it are worth more than a stage.
  Config c{most_planes(p) + 2, 6, 0};
  auto fill_ring = [&] {
    while (c.ring < kLargestRing && shared_bytes(p, {c.stages, c.slots, c.ring + 1}) <= kSharedLimit) ++c.ring;
  };
  fill_ring();
  if (c.ring < 8) {
    --c.stages;
    fill_ring();
  }
  if (c.ring < kSmallestRing) {
    c.slots = 4;
    fill_ring();
  }
  return c;
}

/// Input channels of the prepared copy of x: the copy engine steps by 16 bytes.
constexpr int64_t padded_channels(Problem const& p) {
  return ceil_div(p.in_channels * element_bytes(p), 16) * 16 / element_bytes(p);
}

/// Whether x is read where it lies: fp32 must be rounded first, and the copy engine wants neighbouring channels and
/// everything else in steps of 16 bytes.
constexpr bool reads_x_in_place(Problem const& p) {
  if (p.dtype == CONVT3D_F32 || p.x_alignment < 16 || p.x_stride[1] != 1) return false;
  Size5 const shape = x_shape(p);
  for (int axis : {0, 2, 3, 4}) {
    int64_t const bytes = p.x_stride[axis] * element_bytes(p);
    if (shape[axis] > 1 && (bytes == 0 || bytes % 16 != 0 || bytes >= int64_t{1} << 39)) return false;
  }
  return true;
}

struct Workspace {
  size_t counter, owners, pieces, x, bytes;
};

constexpr Workspace workspace_layout(Problem const& p) {
  constexpr size_t kAlign = 128;
  Workspace w{};
  w.owners = kAlign;
  w.pieces = w.owners + (static_cast<size_t>(tiling(p).items) * 4 + kAlign - 1) / kAlign * kAlign;
  w.x = w.pieces + static_cast<size_t>(channel_tiles(p)) * tile_pieces(p) * kPieceBytes;
  w.bytes = w.x;
  if (!reads_x_in_place(p)) {
    int64_t const voxels = p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2];
    w.bytes += static_cast<size_t>(voxels * padded_channels(p)) * element_bytes(p);
  }
  return w;
}

}  // namespace convt3d::sm90::stream
