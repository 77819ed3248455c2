// SPDX-License-Identifier: Apache-2.0
//
// Epilogue for contiguous NCDHW outputs: voxels are consecutive in memory, channels far apart.
//
// The accumulators go through shared memory, whole or in two halves, so that a warp can hold 32 consecutive rows
// (voxels) of one channel and its accesses to add and y are runs along W. With two classes that are neighbours along W
// (a pair) these are runs of whole sectors, in accesses of two voxels; one class alone has every second voxel. The
// pitch makes both sides of that trip conflict at most two ways: with pitch = 5 (mod 32), writes touch banks 5 * row +
// 2 * column, reads 5 * row.
#pragma once

#include "sm80/tail.hpp"

namespace convt3d::sm80 {

template <class Mma, class Element>
struct NcdhwEpilogue {
  using Shape = typename Mma::Shape;
  using WarpMma = typename Mma::Operator;
  using WarpCount = typename Mma::WarpCount;
  static constexpr int kThreads = 32 * WarpCount::kCount;
  static constexpr int kTileColumns = WarpCount::kN * WarpMma::Shape::kN;
  // More than 64 columns by halves, whose warps are two along N: their shared memory leaves room for a second block.
  static constexpr int kPasses = kTileColumns > 64 ? WarpCount::kN : 1;
  static constexpr int kColumns = kTileColumns / kPasses;
  static constexpr int kPitch = kColumns + 5;
  static constexpr int kRowChunks = Shape::kM / 32;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBatch = 8;  // independent loads in flight per thread
  static_assert(kWarps % kRowChunks == 0, "each warp keeps to one chunk of 32 rows");
  static constexpr int kColumnGroups = kWarps / kRowChunks;
  static constexpr int kColumnsPerWarp = kColumns / kColumnGroups;
  static_assert(kColumnsPerWarp % kBatch == 0, "");
  static_assert(WarpCount::kK == 1, "accumulators are not split over warps");
  static constexpr bool kPairs = kPasses == 1;

  struct alignas(16) SharedStorage {
    float tile[Shape::kM * kPitch];
  };

  using IteratorC = typename WarpMma::IteratorC;
  using Sums = typename IteratorC::Fragment;

  /// A tile's sums, or those of the columns of one pass.
  CUTLASS_DEVICE static void write(SharedStorage& storage, Sums const& sums, int pass, int warp_idx, int lane_idx) {
    int const warp_n = warp_idx / WarpCount::kM;
    if (kPasses > 1 && warp_n != pass) return;
    IteratorC iterator({storage.tile, typename IteratorC::Layout(kPitch)}, lane_idx);
    iterator.add_tile_offset({warp_idx % WarpCount::kM, kPasses > 1 ? 0 : warp_n});
    iterator.store(sums);
  }

  /// Behind a mainloop, whose stages share memory with `storage`; every thread has left it.
  CUTLASS_DEVICE static void run(SharedStorage& storage, Sums const& sums, TileContext<Mma> const& tile, int warp_idx,
                                 int lane_idx) {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      __syncthreads();
      write(storage, sums, pass, warp_idx, lane_idx);
      __syncthreads();
      finish<1>(nullptr, storage, tile, tile.cls, pass * kColumns, warp_idx, lane_idx);
    }
  }

  /// The same of two classes: `even`, whose sums were written before, and the one behind it, which the tile has.
  CUTLASS_DEVICE static void run_pair(SharedStorage const& held, SharedStorage& storage, Sums const& sums,
                                      TileContext<Mma> const& tile, ClassParams<Mma> const* even, int warp_idx,
                                      int lane_idx) {
    __syncthreads();
    write(storage, sums, 0, warp_idx, lane_idx);
    __syncthreads();
    finish<2>(held.tile, storage, tile, even, 0, warp_idx, lane_idx);
  }

 private:
  // A thread's row is kCount voxels, neighbours along W: one of the class, or one of each of two.
  template <int kCount>
  CUTLASS_DEVICE static void finish(float const* held, SharedStorage const& storage, TileContext<Mma> const& tile,
                                    ClassParams<Mma> const* first, int column, int warp_idx, int lane_idx) {
    using Vector = cutlass::AlignedArray<Element, kCount>;
    TailParams const& tail = *tile.tail;
    int const row = warp_idx % kRowChunks * 32 + lane_idx;
    int const begin = warp_idx / kRowChunks * kColumnsPerWarp;
    Row const& at = tile.rows[row];
    if (!at.inside) return;
    // The row's place is that of the tile's class, the second of a pair.
    auto const* add = static_cast<Element const*>(tail.add) + (at.add - (kCount - 1));
    auto* y = static_cast<Element*>(tail.y) + (at.y - (kCount - 1));
    auto const* bias_ptr = static_cast<Element const*>(tail.bias);
    int const channel_begin = tile.column_begin + column;
    bool saw_nan = false;

    Vector ahead[kBatch];
    auto const load_batch = [&](int c) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kBatch; ++e) {
        int const channel = channel_begin + c + e;
        if (tail.add == nullptr || channel >= tail.channels) continue;
        ahead[e] = *reinterpret_cast<Vector const*>(add + channel * tail.add_channel_stride);
      }
    };
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kBatch; ++e) ahead[e].fill(Element(0.f));
    // As many loads ahead, but where a warp's batch has 2 KB of sectors, half of which it has no use for: then it is
    // slower (fp32, every second voxel).
    constexpr bool kAhead = kCount == 2 || sizeof(Element) == 2;
    if (kAhead) load_batch(begin);

#pragma unroll 1
    for (int c = begin; c < begin + kColumnsPerWarp; c += kBatch) {
      float value[kBatch * kCount], bias[kBatch * kCount], addend[kBatch * kCount];
      int const channel = channel_begin + c;
      if (!kAhead) load_batch(c);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kBatch; ++e) {
        bool const inside = channel + e < tail.channels;
        float const of_channel = inside && tail.bias ? to_float(bias_ptr[(channel + e) * tail.bias_stride]) : 0.f;
        float const sum = storage.tile[row * kPitch + c + e];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          addend[e * kCount + i] = to_float(ahead[e][i]);
          bias[e * kCount + i] = of_channel;
          value[e * kCount + i] = i < kCount - 1 ? held[row * kPitch + c + e] : sum;
        }
      }
      if (kAhead && c + kBatch < begin + kColumnsPerWarp) load_batch(c + kBatch);
      apply_tail<kBatch * kCount>(tail, value, bias, addend);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kBatch; ++e) {
        if (channel + e >= tail.channels) continue;
        Vector rounded;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          rounded[i] = Element(value[e * kCount + i]);
          saw_nan |= value[e * kCount + i] != value[e * kCount + i];
        }
        *reinterpret_cast<Vector*>(y + (channel + e) * tail.y_channel_stride) = rounded;
      }
    }

    if (!saw_nan) return;
#pragma unroll 1
    for (int i = 0; i < kColumnsPerWarp * kCount; ++i) {
      int const channel = channel_begin + begin + i / kCount, voxel = i % kCount;
      if (channel >= tail.channels) break;
      float const stored = to_float(y[channel * tail.y_channel_stride + voxel]);
      if (stored == stored) continue;
      ClassParams<Mma> const& cls = voxel == kCount - 1 ? *tile.cls : *first;
      recompute_output<Mma, Element>(cls, tile.x, tail, tile.row_begin + row, channel);
    }
  }
};

}  // namespace convt3d::sm80
