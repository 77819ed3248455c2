// SPDX-License-Identifier: Apache-2.0
//
// add and y. One ring of 8 KB units serves both: the load warp brings in units of `add` far ahead (TMA), a consumer
// warp updates each in place, and the store warps write it to y from the same memory.
//
// A unit is what one warp computes of a tile: 4 channels x 16 whole output rows x 32 outputs, 2 KB contiguous per
// channel. In shared memory its rows are ordered (oh mod 4, channel, oh / 4): then row = lane for the accumulators of
// each H position of a thread, and with the 128-byte swizzle the 16-byte accesses of a warp never conflict.
#pragma once

#include "convt3d/activation.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90 {

/// Activation fixed at compile time; add_order is "before".
template <class Functor>
struct FixedTail {
  static constexpr bool kAddAfterPossible = false;
  CUTLASS_DEVICE static float apply(EpilogueParams const& p, float t) { return Functor{}(t, p.negative_slope); }
};

/// t * hardswish(t) in three instructions: clamp(t + 3, 0, 6) / 6 is one saturating fma. It differs from the exact
/// value by 2^-25 of t^2 at most, and gives nan for nan and -inf as the plain form does.
struct XHardswishTail {
  static constexpr bool kAddAfterPossible = false;
  CUTLASS_DEVICE static float apply(EpilogueParams const&, float t) {
    return t * (t * __saturatef(fmaf(t, 1.0f / 6.0f, 0.5f)));
  }
};

/// Everything chosen at run time.
struct AnyTail {
  static constexpr bool kAddAfterPossible = true;
  CUTLASS_DEVICE static float apply(EpilogueParams const& p, float t) {
    return apply_activation(p.activation, t, p.negative_slope);
  }
};

template <class Tail>
struct CollectiveEpilogue {
  using Params = EpilogueParams;

  /// Where a unit lies in y: its first output, with the row given in fours.
  struct alignas(16) UnitBox {
    int32_t w, h4, c, d, n, store, unused[2];
  };

  enum : int32_t { kSkip = 0, kStore = 1, kEnd = 2 };  // UnitBox::store

  struct SharedStorage {
    TransactionBarrier full[kMaxRing];  // add has arrived
    Barrier ready[kMaxRing];            // a consumer warp has updated the unit
    Barrier free[kMaxRing];             // the store has read it
    Barrier stored;                     // everything has reached memory, all of x has been seen
    int32_t issued;                     // units whose load has been issued, ever
    UnitBox box[kMaxRing];
  };

  CUTLASS_DEVICE static void init(SharedStorage& shared) {
    for (int i = 0; i < kMaxRing; ++i) {
      shared.full[i].init(1);
      shared.ready[i].init(1);
      shared.free[i].init(1);
    }
    shared.stored.init(kStoreWarps + kLoaderWarps);
    shared.issued = 0;
  }

  /// The ring is shared by warps that are not in step, and a parity cannot tell a phase from the one two before it.
  /// Once unit `index` has been issued, the slot's previous phases are over and the parity is unambiguous.
  CUTLASS_DEVICE static void wait_until_issued(SharedStorage& shared, int index) {
    while (*static_cast<int32_t volatile*>(&shared.issued) <= index) {
    }
  }

  // ---- load warp and store warps (one thread each) ------------------------------------------------------------

  CUTLASS_DEVICE static void load_unit(Params const& p, TransactionBarrier& full, unsigned char* unit,
                                       UnitBox const& box) {
    auto* const barrier = reinterpret_cast<uint64_t*>(&full);
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    full.arrive_and_expect_tx(kUnitBytes);
    if (p.add_merged) {
      cute::SM90_TMA_LOAD_5D::copy(&p.add_map[0], barrier, kHint, unit, box.w, box.h4, box.n * p.out_channels + box.c,
                                   box.d, 0);
    } else {
      for (int m = 0; m < 4; ++m) {
        cute::SM90_TMA_LOAD_5D::copy(&p.add_map[m], barrier, kHint, unit + m * (kUnitBytes / 4), box.w, box.h4, box.c,
                                     box.d, box.n);
      }
    }
  }

  CUTLASS_DEVICE static void store_unit(Params const& p, unsigned char* unit, UnitBox const& box) {
    if (p.y_merged) {
      cute::SM90_TMA_STORE_5D::copy(&p.y_map[0], unit, box.w, box.h4, box.n * p.out_channels + box.c, box.d, 0);
    } else {
      for (int m = 0; m < 4; ++m) {
        cute::SM90_TMA_STORE_5D::copy(&p.y_map[m], unit + m * (kUnitBytes / 4), box.w, box.h4, box.c, box.d, box.n);
      }
    }
    cute::tma_store_arrive();
  }

  /// The load thread: loads run ahead of the consumers by the ring.
  CUTLASS_DEVICE static void load(Params const& p, SchedulerParams const& sp, int cls,
                                  TileScheduler::Producer& scheduler, SharedStorage& shared, unsigned char* ring) {
    RingState slot;
    int issued = 0;
    for (;;) {
      int const number = scheduler.start();
      if (number == TileScheduler::kEnd) break;
      TileScheduler::Run const run = TileScheduler::decode(sp, number);
      for (int tile = 0; tile < run.length; ++tile) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int unit = 0; unit < kUnitsPerTile; ++unit) {
          if (tile == 0 && unit == kUnitsPerGroup) scheduler.publish();
          UnitBox box;
          box.w = run.w * 2 * kTileW;
          box.h4 = run.h * (kTileH / 2);
          box.c = cls * kClassChannels + unit % kUnitsPerGroup * kUnitChannels;
          box.d = 2 * (run.d + tile) + unit / kUnitsPerGroup;
          box.n = run.n;
          box.store = box.c < p.out_channels ? kStore : kSkip;
          shared.free[slot.slot].wait(slot.phase ^ 1);
          shared.box[slot.slot] = box;
          if (p.add_mode == AddMode::kTile && box.store == kStore) {
            load_unit(p, shared.full[slot.slot], ring + slot.slot * kUnitBytes, box);
          } else {
            shared.full[slot.slot].arrive();
          }
          *static_cast<int32_t volatile*>(&shared.issued) = ++issued;
          slot.advance(1, p.ring);
        }
      }
    }
    for (int i = 0; i < kStoreWarps; ++i) {
      shared.free[slot.slot].wait(slot.phase ^ 1);
      shared.box[slot.slot].store = kEnd;
      shared.ready[slot.slot].arrive();
      *static_cast<int32_t volatile*>(&shared.issued) = ++issued;
      slot.advance(1, p.ring);
    }
  }

  /// Store thread `which`: every kStoreWarps-th unit. Several, because each waits until its store has read the unit:
  /// a wait that blocks is all there is, and a single thread would pass one unit per read latency.
  CUTLASS_DEVICE static void store(Params const& p, SharedStorage& shared, unsigned char* ring, int which) {
    RingState slot;
    slot.advance(which, p.ring);
    for (int index = which;; index += kStoreWarps) {
      wait_until_issued(shared, index);
      shared.ready[slot.slot].wait(slot.phase);
      cutlass::arch::fence_view_async_shared();  // the consumers' stores, before the copy engine reads them
      UnitBox const box = shared.box[slot.slot];
      if (box.store == kEnd) break;
      if (box.store == kStore) {
        store_unit(p, ring + slot.slot * kUnitBytes, box);
        cute::tma_store_wait<0>();
      }
      shared.free[slot.slot].arrive();
      slot.advance(kStoreWarps, p.ring);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    shared.stored.arrive();
  }

  // ---- consumer ----------------------------------------------------------------------------------------------

  /// One warp's unit: unit += acc + bias, activation, in place; the two H positions of a thread's accumulators one
  /// after the other. `flat_add` stands in for the unit's contents where add is not loaded.
  CUTLASS_DEVICE static void update(Params const& p, SharedStorage& shared, unsigned char* ring, RingState slot,
                                    int index, int lane, float bias, float flat_add, float const (&acc)[64]) {
    wait_until_issued(shared, index);
    shared.full[slot.slot].wait(slot.phase);
    unsigned char* const unit = ring + slot.slot * kUnitBytes + lane * 128;
    int const swizzle = (lane & 7) << 4;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < 2; ++b) {
      unsigned char* const row = unit + b * (kUnitBytes / 2);
      float4 v[8];
      if (p.add_mode == AddMode::kTile) {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 8; ++k) v[k] = *reinterpret_cast<float4 const*>(row + ((k << 4) ^ swizzle));
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 8; ++k) v[k] = make_float4(flat_add, flat_add, flat_add, flat_add);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 8; ++k) {
        // Accumulators of W position j: [4 j + 2 (W parity) + b].
        v[k].x = tail(p, acc[8 * k + b] + bias, v[k].x);
        v[k].y = tail(p, acc[8 * k + 2 + b] + bias, v[k].y);
        v[k].z = tail(p, acc[8 * k + 4 + b] + bias, v[k].z);
        v[k].w = tail(p, acc[8 * k + 6 + b] + bias, v[k].w);
        *reinterpret_cast<float4*>(row + ((k << 4) ^ swizzle)) = v[k];
      }
    }
    __syncwarp();
    if (lane == 0) shared.ready[slot.slot].arrive();
  }

  CUTLASS_DEVICE static float tail(Params const& p, float conv, float add) {
    if constexpr (Tail::kAddAfterPossible) {
      float const t = Tail::apply(p, p.add_after ? conv : conv + add);
      return p.add_after ? t + add : t;
    } else {
      return Tail::apply(p, conv + add);
    }
  }
};

}  // namespace convt3d::sm90
