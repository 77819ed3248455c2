// SPDX-License-Identifier: Apache-2.0
//
// Epilogue for channels-last outputs of tiles that CUTLASS's own has no form for: 48 channels at a time.
//
// The sums go through shared memory, so that a thread has 16 neighbouring bytes of a row of y and a warp whole sectors.
#pragma once

#include "sm80/tail.hpp"

namespace convt3d::sm80 {

template <class Mma, class Element>
struct RowsEpilogue {
  using WarpMma = typename Mma::Operator;
  using WarpCount = typename Mma::WarpCount;
  static constexpr int kThreads = 32 * WarpCount::kCount;
  static constexpr int kRows = Mma::Shape::kM;
  static constexpr int kColumns = WarpMma::Shape::kN;  // of one pass
  static constexpr int kAccess = kAccessBytes / int(sizeof(Element));
  static constexpr int kPerRow = kColumns / kAccess;
  static constexpr int kAccesses = kRows * kPerRow / kThreads;  // of a thread, in one pass
  static constexpr int kBatch = 6;                              // independent loads in flight
  static constexpr int kPitch = kColumns + 4;                   // rows begin at other banks, and at 16 bytes
  static_assert(kRows * kPerRow % kThreads == 0 && kAccesses % kBatch == 0, "no access is left over");

  struct alignas(16) SharedStorage {
    float tile[kRows * kPitch];
    float bias[kColumns];
  };

  using IteratorC = typename WarpMma::IteratorC;
  using Sums = typename IteratorC::Fragment;
  using Vector = cutlass::AlignedArray<Element, kAccess>;

  CUTLASS_DEVICE static int row_of(int access) { return (int(threadIdx.x) + access * kThreads) / kPerRow; }
  CUTLASS_DEVICE static int column_of(int access) { return (int(threadIdx.x) + access * kThreads) % kPerRow * kAccess; }

  /// Behind a mainloop, whose stages share memory with `storage`; every thread has left it.
  CUTLASS_DEVICE static void run(SharedStorage& storage, Sums const& sums, TileContext<Mma> const& tile, int warp_idx,
                                 int lane_idx) {
    TailParams const& tail = *tile.tail;
#pragma unroll 1
    for (int pass = 0; pass < WarpCount::kN; ++pass) {
      int const begin = tile.column_begin + pass * kColumns;
      Vector addend[kBatch];
      load_batch(addend, tile, begin, 0);
      __syncthreads();
      if (warp_idx / WarpCount::kM == pass) {
        IteratorC iterator({storage.tile, typename IteratorC::Layout(kPitch)}, lane_idx);
        iterator.add_tile_offset({warp_idx % WarpCount::kM, 0});
        iterator.store(sums);
      }
      for (int i = threadIdx.x; i < kColumns; i += kThreads) {
        bool const inside = tail.bias && begin + i < tail.channels;
        storage.bias[i] =
            inside ? to_float(static_cast<Element const*>(tail.bias)[(begin + i) * tail.bias_stride]) : 0.f;
      }
      __syncthreads();
      finish(storage, tile, begin, addend);
    }
  }

 private:
  CUTLASS_DEVICE static void load_batch(Vector (&addend)[kBatch], TileContext<Mma> const& tile, int begin, int first) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatch; ++i) load_add(addend[i], tile, row_of(first + i), begin + column_of(first + i));
  }

  // `addend`: of the first batch, which was on its way while the sums were written.
  CUTLASS_DEVICE static void finish(SharedStorage const& storage, TileContext<Mma> const& tile, int begin,
                                    Vector (&addend)[kBatch]) {
    TailParams const& tail = *tile.tail;
    bool saw_nan = false;
#pragma unroll 1
    for (int first = 0; first < kAccesses; first += kBatch) {
      if (first > 0) load_batch(addend, tile, begin, first);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        int const row = row_of(first + i), column = column_of(first + i);
        Row const& at = tile.rows[row];
        if (!at.inside || begin + column >= tail.channels) continue;
        cutlass::Array<float, kAccess> value, bias;
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kAccess; ++e) {
          value[e] = storage.tile[row * kPitch + column + e];
          bias[e] = storage.bias[column + e];
        }
        cutlass::NumericArrayConverter<float, Element, kAccess> widen;
        cutlass::NumericArrayConverter<Element, float, kAccess> round;
        apply_tail<kAccess>(tail, value, bias, widen(addend[i]));
        // One test for the access: the sum is nan if a value is.
        float sum = value[0];
        CUTLASS_PRAGMA_UNROLL
        for (int e = 1; e < kAccess; ++e) sum += value[e];
        saw_nan |= sum != sum;
        store(tail, static_cast<Element*>(tail.y) + at.y, begin + column, round(value));
      }
    }
    if (!saw_nan) return;
    // A thread rereads only what it wrote itself, so no barrier is needed.
#pragma unroll 1
    for (int i = 0; i < kAccesses * kAccess; ++i) {
      int const row = row_of(i / kAccess), channel = begin + column_of(i / kAccess) + i % kAccess;
      Row const& at = tile.rows[row];
      if (!at.inside || channel >= tail.channels) continue;
      float const stored = to_float(static_cast<Element const*>(tail.y)[at.y + channel * tail.y_channel_stride]);
      if (stored != stored) {
        recompute_output<Mma, Element>(*tile.cls, tile.x, tail, tile.row_begin + row, channel);
      }
    }
  }

  CUTLASS_DEVICE static void load_add(Vector& addend, TileContext<Mma> const& tile, int row, int channel) {
    TailParams const& tail = *tile.tail;
    Row const& at = tile.rows[row];
    addend.fill(Element(0.f));
    if (!tail.add || !at.inside || channel >= tail.channels) return;
    auto const* add = static_cast<Element const*>(tail.add) + at.add;
    if (tail.vector_add) {
      addend = *reinterpret_cast<Vector const*>(add + channel);
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kAccess; ++e) {
      if (channel + e < tail.channels) addend[e] = add[(channel + e) * tail.add_channel_stride];
    }
  }

  CUTLASS_DEVICE static void store(TailParams const& tail, Element* y, int channel,
                                   cutlass::Array<Element, kAccess> const& value) {
    if (tail.vector_y) {
      *reinterpret_cast<Vector*>(y + channel) = reinterpret_cast<Vector const&>(value);
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kAccess; ++e) {
      if (channel + e < tail.channels) y[(channel + e) * tail.y_channel_stride] = value[e];
    }
  }
};

}  // namespace convt3d::sm80
