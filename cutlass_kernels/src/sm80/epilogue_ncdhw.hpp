// SPDX-License-Identifier: Apache-2.0
//
// Epilogue for contiguous NCDHW outputs: voxels are consecutive in memory, channels far apart.
//
// The accumulators go through shared memory once, whole, so that a warp can hold 32 consecutive rows (voxels) of one
// channel and its accesses to add and y are runs along W. The pitch makes both sides of that trip conflict at most
// two ways: with pitch = 9 (mod 32), writes touch banks 9 * row + 2 * column, reads 9 * row.
#pragma once

#include "sm80/tail.hpp"

namespace convt3d::sm80 {

template <class Mma, class Element>
struct NcdhwEpilogue {
  using Shape = typename Mma::Shape;
  using WarpMma = typename Mma::Operator;
  using WarpCount = typename Mma::WarpCount;
  static constexpr int kThreads = 32 * WarpCount::kCount;
  static constexpr int kPitch = Shape::kN + 9;
  static constexpr int kRowChunks = Shape::kM / 32;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBatch = 8;  // independent loads in flight per thread
  static_assert(Shape::kN % 32 == 0 && kWarps % kRowChunks == 0, "each warp keeps to one chunk of 32 rows");
  static constexpr int kColumnGroups = kWarps / kRowChunks;
  static constexpr int kColumnsPerWarp = Shape::kN / kColumnGroups;
  static_assert(kColumnsPerWarp % kBatch == 0, "");
  static_assert(WarpCount::kK == 1, "accumulators are not split over warps");

  struct SharedStorage {
    float tile[Shape::kM * kPitch];
  };

  using IteratorC = typename WarpMma::IteratorC;

  CUTLASS_DEVICE static void run(SharedStorage& storage, typename IteratorC::Fragment const& accumulators,
                                 TileContext<Mma> const& tile, int thread_idx, int warp_idx, int lane_idx) {
    __syncthreads();  // the mainloop's stages share this memory
    IteratorC iterator({storage.tile, typename IteratorC::Layout(kPitch)}, lane_idx);
    iterator.add_tile_offset({warp_idx % WarpCount::kM, warp_idx / WarpCount::kM});
    iterator.store(accumulators);
    __syncthreads();

    TailParams const& tail = *tile.tail;
    int const row = warp_idx % kRowChunks * 32 + lane_idx;
    int const column_begin = warp_idx / kRowChunks * kColumnsPerWarp;
    Row const& at = tile.rows[row];
    if (!at.inside) return;
    auto const* add = static_cast<Element const*>(tail.add) + at.add;
    auto const* bias_ptr = static_cast<Element const*>(tail.bias);
    auto* y = static_cast<Element*>(tail.y) + at.y;
    bool saw_nan = false;

#pragma unroll 1
    for (int c = column_begin; c < column_begin + kColumnsPerWarp; c += kBatch) {
      float value[kBatch], bias[kBatch], addend[kBatch];
      int const channel = tile.column_begin + c;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kBatch; ++e) {
        bool const inside = channel + e < tail.channels;
        addend[e] = inside && tail.add ? to_float(add[(channel + e) * tail.add_channel_stride]) : 0.f;
        bias[e] = inside && tail.bias ? to_float(bias_ptr[(channel + e) * tail.bias_stride]) : 0.f;
        value[e] = storage.tile[row * kPitch + c + e];
      }
      apply_tail<kBatch>(tail, value, bias, addend);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kBatch; ++e) {
        if (channel + e >= tail.channels) continue;
        y[(channel + e) * tail.y_channel_stride] = Element(value[e]);
        saw_nan |= value[e] != value[e];
      }
    }

    if (!saw_nan) return;
#pragma unroll 1
    for (int c = column_begin; c < column_begin + kColumnsPerWarp; ++c) {
      int const channel = tile.column_begin + c;
      if (channel >= tail.channels) break;
      float const stored = to_float(y[channel * tail.y_channel_stride]);
      if (stored != stored) recompute_output<Mma, Element>(*tile.cls, tile.x, tail, tile.row_begin + row, channel);
    }
  }
};

}  // namespace convt3d::sm80
