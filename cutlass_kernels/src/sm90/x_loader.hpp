// SPDX-License-Identifier: Apache-2.0
//
// The loader warps: every slab of every run, in order, from global into shared memory.
#pragma once

#include <type_traits>

#include "sm90/tile_scheduler.hpp"
#include "sm90/x_gather.hpp"

namespace convt3d::sm90 {

/// A slab's loads take an L2 latency, longer than its turn, so two chunks are in flight: one is loaded while the other
/// is stored. The loop has few instructions to spare (a warp issues one every few cycles here), so what does not
/// change is computed once where a slab is one chunk.
template <class T, bool kChannelsLast>
struct XLoader {
  using Params = MainloopParams;
  using Vectors = std::conditional_t<kChannelsLast, RowGather<T>, TransposingGather<T>>;
  static constexpr int kThreads = kLoaderWarps * 32;
  static_assert(kLoaderWarps == sizeof(uint32_t), "a byte for each");
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  /// Registers are scarce beside twice the accumulators: of the items of a slab that is one chunk only a thread's first
  /// is kept, the others are some rows further.
  static constexpr bool kStepped = kSplit;

  /// What a loader thread has in flight: some items of one slab.
  template <class Gather, int kItems>
  struct Chunk {
    typename Gather::Piece piece[kItems];
    int first;  // item of piece 0; not of a slab that is one chunk
    bool last;  // of its slab
  };

  /// A thread's items: computed where they are used, kept, or steps from the first.
  template <class Gather, int kItems, bool kOneChunk, bool kSteps = kStepped>
  struct Kept {
    CUTLASS_DEVICE void init(Params const&, int, int) {}
    CUTLASS_DEVICE Kept const& unpacked() const { return *this; }
    CUTLASS_DEVICE typename Gather::Item item(Params const& p, int first, int i, int items) const {
      return Gather::item(p, first + i * kThreads, items);
    }
  };
  template <class Gather, int kItems>
  struct Kept<Gather, kItems, true, false> {
    typename Gather::Item all[kItems];
    CUTLASS_DEVICE Kept const& unpacked() const { return *this; }
    CUTLASS_DEVICE void init(Params const& p, int thread, int items) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) all[i] = Gather::item(p, thread + i * kThreads, items);
    }
    CUTLASS_DEVICE typename Gather::Item item(Params const&, int, int i, int) const { return all[i]; }
  };
  template <class Gather, int kItems>
  struct Kept<Gather, kItems, true, true> {
    typename Gather::Kept first;
    CUTLASS_DEVICE Kept unpacked() const { return {first.unpacked()}; }
    CUTLASS_DEVICE void init(Params const& p, int thread, int) { first = Gather::first_item(p, thread); }
    CUTLASS_DEVICE typename Gather::Item item(Params const& p, int, int i, int) const {
      return Gather::further(p, first, i);
    }
  };

  /// Walks the chunks of all slabs of all slices of all runs.
  struct Cursor {
    TileScheduler::Run run;
    int slices = 0, slab = 0, first = 0;  // slices: left in the run
    int d = 0, depth = 0;                 // plane of x, and its number in the tile
  };

  CUTLASS_DEVICE static int item_count(Params const& p) { return p.groups * p.rows * p.fetch_count; }

  /// `flag()` is called where x may not keep sums finite. In ieee mode `tiny[slot]` says how many tiny values
  /// (split.hpp) each warp has brought into the stage, in a byte for each, kManyTiny at most; guarded as the stage is.
  template <class Flag>
  CUTLASS_DEVICE static void load(Params const& p, SchedulerParams const& sp, Barrier* full, Barrier* empty,
                                  uint32_t* tiny, TileScheduler::SharedStorage& schedule, unsigned char* smem,
                                  OperandScale<T> const& operand_scale, int thread, Flag&& flag) {
    bool const one_chunk =
        kStepped ? p.rows <= Vectors::kFastItems * p.item_rows : item_count(p) <= Vectors::kFastItems * kThreads;
    if (p.vectorized && one_chunk) {
      load_as<Vectors, Vectors::kFastItems, true>(p, sp, full, empty, tiny, schedule, smem, operand_scale, thread,
                                                  flag);
    } else if (kChannelsLast || p.vectorized) {
      load_as<Vectors, Vectors::kItems, false>(p, sp, full, empty, tiny, schedule, smem, operand_scale, thread, flag);
    } else {
      load_as<ElementGather<T>, 2, false>(p, sp, full, empty, tiny, schedule, smem, operand_scale, thread, flag);
    }
  }

  /// `kOneChunk`: a slab is one chunk, whose items are kept.
  template <class Gather, int kItems, bool kOneChunk, class Flag>
  CUTLASS_DEVICE static void load_as(Params const& p, SchedulerParams const& sp, Barrier* full, Barrier* empty,
                                     uint32_t* tiny, TileScheduler::SharedStorage& schedule, unsigned char* smem,
                                     OperandScale<T> const& operand_scale, int thread, Flag&& flag) {
    TileScheduler::Consumer scheduler{schedule, {}};
    int const items = item_count(p);
    uint64_t const policy = keep_in_l2();
    uint32_t const smem_address = cute::cast_smem_ptr_to_uint(smem);
    Cursor at;
    RingState stage;  // of the chunk that is finished next
    Extremes<T> extremes;
    unsigned tiny_seen = 0;  // by the warp, in this slab
    Chunk<Gather, kItems> even, odd;
    bool even_pending = false, odd_pending = false;
    Kept<Gather, kItems, kOneChunk> kept;
    kept.init(p, thread, items);

    auto finish = [&](Chunk<Gather, kItems> const& chunk) {
      empty[stage.slot].wait(stage.phase ^ 1);
      uint32_t const slab = smem_address + stage.slot * p.stage_bytes;
      OperandScale<T> const scale = operand_scale.read();
      Extremes<T> seen;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < Gather::kReads; ++c) seen.see(chunk.piece[i].v[c]);
      }
      extremes.see(seen);
      if constexpr (kSplit) {
        if (__any_sync(0xffffffffu, seen.tiny(scale))) {
          unsigned tiny_values = 0;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kItems; ++i) {
            CUTLASS_PRAGMA_UNROLL
            for (int c = 0; c < Gather::kReads; ++c) tiny_values += scale.count_tiny(chunk.piece[i].v[c]);
          }
          tiny_seen += __reduce_add_sync(0xffffffffu, tiny_values);
        }
        if (kOneChunk || chunk.last) {
          auto volatile* const of_warps = reinterpret_cast<unsigned char volatile*>(tiny + stage.slot);
          if (cutlass::canonical_lane_idx() == 0) {
            of_warps[thread / 32] = static_cast<unsigned char>(min(tiny_seen, static_cast<unsigned>(kManyTiny)));
          }
          tiny_seen = 0;
        }
      }
      auto const& from = kept.unpacked();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        typename Gather::Item const it = from.item(p, chunk.first, i, items);
        // A branch around each item would keep their instructions from overlapping.
        if (kOneChunk && kStepped && Gather::kReads > 1 && i + 1 == kItems && it.row >= p.rows) continue;
        if (seen.tame(scale)) {
          Gather::template store<false>(p, scale, slab, it, chunk.piece[i]);
        } else {
          Gather::template store<true>(p, scale, slab, it, chunk.piece[i]);
        }
      }
      if (kOneChunk || chunk.last) {
        // No proxy fence here: it would wait for the loads that are in flight. The consumers have it.
        __syncwarp();
        if (cutlass::canonical_lane_idx() == 0) full[stage.slot].arrive();
        stage.advance(1, p.stages);
      }
    };

    // Loads the next chunk into `chunk`; `other` is the one before it, finished on the way. False at the end.
    auto step = [&](Chunk<Gather, kItems>& chunk, Chunk<Gather, kItems>& other, bool& other_pending) {
      if (at.slices == 0) {
        if (other_pending && !scheduler.available()) {  // the next run may wait for that very chunk
          finish(other);
          other_pending = false;
        }
        int const run = scheduler.fetch();
        if (run == TileScheduler::kEnd) {
          if (other_pending) finish(other);
          return false;
        }
        at.run = TileScheduler::decode(sp, run);
        at.d = at.run.d + p.window_lo[0];
        at.slices = p.keep ? at.run.length + p.depth_count - 1 : at.run.length * p.depth_count;
        at.first = 0;
      }
      int const d = at.d;
      int const channel = at.slab * (128 / static_cast<int>(sizeof(T)));
      SlabSource<T> from;
      from.h = at.run.h * kTileH + p.window_lo[1];
      from.w = at.run.w * kTileW;
      from.height = d >= 0 && d < p.in_size[0] ? p.in_size[1] : 0;
      if constexpr (kOneChunk && kStepped) from.height = min(from.height, from.h + p.rows);
      from.groups = (p.in_channels - channel) / Gather::kVector;
      from.corner = static_cast<T const*>(p.x) + at.run.n * p.x_stride[0] + channel * p.x_stride[1] +
                    d * p.x_stride[2] + from.h * p.x_stride[3] + from.w * p.x_stride[4];
      if (!kOneChunk) chunk.first = at.first + thread;
      // In ieee mode the last item, which few threads have, takes the registers that the other chunk leaves.
      constexpr int kLate = kOneChunk && std::is_same_v<Gather, TransposingGather<SplitFloat>> ? 1 : 0;
      auto load = [&](int begin, int end) {
        auto const& place = kept.unpacked();
        CUTLASS_PRAGMA_UNROLL
        for (int i = begin; i < end; ++i) {
          Gather::load(p, from, place.item(p, chunk.first, i, items), policy, chunk.piece[i]);
        }
      };
      load(0, kItems - kLate);
      bool last = true;
      if constexpr (!kOneChunk) {
        at.first += kItems * kThreads;
        last = chunk.last = at.first >= items;
        if (last) at.first = 0;
      }
      if (last) {
        if (++at.slab == p.slabs) {
          at.slab = 0;
          --at.slices;
          ++at.d;
          if (!p.keep && ++at.depth == p.depth_count) {
            at.depth = 0;
            at.d -= p.depth_count - 1;
          }
        }
      }
      if (other_pending) finish(other);
      other_pending = false;
      load(kItems - kLate, kItems);
      return true;
    };

    for (;;) {
      if (!step(even, odd, odd_pending)) break;
      even_pending = true;
      if (!step(odd, even, even_pending)) break;
      odd_pending = true;
    }
    if (__any_sync(0xffffffffu, extremes.suspect())) flag();
  }
};

}  // namespace convt3d::sm90
