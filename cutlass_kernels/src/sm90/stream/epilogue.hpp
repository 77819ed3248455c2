// SPDX-License-Identifier: Apache-2.0
//
// add and y of the streaming kernel: the same ring of 8 KB units as in the resident one, with other boxes (every second
// output row) and other places of the accumulators. What the copy engine cannot move goes by plain.hpp.
#pragma once

#include "sm90/stream/plain.hpp"
#include "sm90/stream/update.hpp"

namespace convt3d::sm90::stream {

template <class T, bool kChannelsLast, class Tail, int kWidth>
struct StreamEpilogue {
  using Resident = CollectiveEpilogue<T, kChannelsLast, Tail>;
  using SharedStorage = typename Resident::SharedStorage;
  using UnitBox = typename Resident::UnitBox;
  using Params = EpilogueParams;
  using Update = UnitUpdate<T, kChannelsLast, Tail, kWidth>;
  using Channels = typename Update::Channels;
  using ChannelBits = typename Update::ChannelBits;
  static constexpr bool kSplit = Update::kSplit;
  static constexpr int kUnits = Update::kUnits;            // of a warp and tile
  static constexpr int kTileUnits = kUnits * kGroups * 4;  // in the order unit of a warp, group, warp
  static constexpr int kPublishes = 4;  // units of an item are loaded before the next one's number is published
  static constexpr int kUnitStep = kGroups * 4;          // from a warp's unit to its next
  static constexpr int kCopies = kChannelsLast ? 1 : 2;  // boxes of a unit
  static constexpr int kChannelsOfUnit = kChannelsLast ? 16 : 16 / kUnits;
  static constexpr int kBoxBytes = kUnitBytes / kTileW * kWidth;  // of a unit, in memory
  static constexpr bool kPlain = kWidth == kTileW;                // whether warps may move what boxes do not
  static constexpr int kStores = kSplit ? 1 : kStoreWarps;        // warps
  static constexpr int kLoads = kSplit ? 0 : kLoadWarps;          // of add by warps, besides
  static_assert(Resident::enough_laps(stream::kSmallestRing, kUnitStep, kStores));

  CUTLASS_DEVICE static void init(SharedStorage& shared, StreamParams const& params) {
    // Of a load warp every lane arrives by itself, and the load thread as ever: a box is written before its unit is
    // full. So does every lane of a consumer warp: a race checker does not follow __syncwarp() to one that would
    // arrive for all, and it is no slower.
    Resident::init(shared, kStores, loads_by_warps(params) ? 33 : 1, 32);
  }

  /// Whether load warps bring add in, and consumer warps store what they have finished.
  CUTLASS_DEVICE static bool loads_by_warps(StreamParams const& params) {
    return kPlain && params.epilogue.add_mode == AddMode::kTile && params.plain.path.add != Path::kBoxes;
  }
  CUTLASS_DEVICE static bool stores_by_consumers(StreamParams const& params) {
    return kPlain && params.plain.path.y != Path::kBoxes;
  }

  /// The store warps load where they have nothing to store.
  CUTLASS_DEVICE static int load_warps(StreamParams const& params) {
    if (!loads_by_warps(params)) return 0;
    return stores_by_consumers(params) ? kLoads + kStores : kLoads;
  }

  // ---- load warp and store warps (one thread each) ------------------------------------------------------------

  /// NCDHW: a is W, b is H / (2 stride). NDHWC: a is W, b is H / stride. `map` are the maps of the boxes.
  CUTLASS_DEVICE static UnitBox unit_box(StreamParams const& params, Item const& it, int unit) {
    Params const& p = params.epilogue;
    int const warp = unit % 4;
    int const group = unit / 4 % kGroups;
    int const sub = unit / kUnitStep;
    UnitBox box;
    box.a = it.w * 2 * kWidth;
    box.b = it.h * (kChannelsLast ? kTileH : kTileH / 2);
    box.c = it.channel + warp * 16;
    if constexpr (kChannelsLast) {
      box.a += sub * (2 * kWidth / kUnits);
    } else {
      box.c += sub * kChannelsOfUnit;
    }
    Residues const r = residues(params, it.cls);
    box.d = params.stride_d * (it.d + group) + r.d;
    box.n = it.n;
    box.store = box.c < p.out_channels && box.d < p.out_depth ? Resident::kStore : Resident::kSkip;
    box.map[0] = r.h;
    box.map[1] = r.h + params.stride_h;
    return box;
  }

  CUTLASS_DEVICE static UnitPlace place(UnitBox const& box, int pair) {
    return {box.c, box.a, kChannelsLast ? box.b : 2 * box.b, box.d, box.n, box.map[0], pair};
  }

  CUTLASS_DEVICE static void load_unit(Params const& p, TransactionBarrier& full, unsigned char* unit,
                                       UnitBox const& box) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    full.arrive_and_expect_tx(kBoxBytes);
    for (int i = 0; i < kCopies; ++i) {
      CUtensorMap const* map = &p.add_map[box.map[i]];
      unsigned char* const part = unit + i * (kUnitBytes / kCopies);
      auto* const barrier = reinterpret_cast<uint64_t*>(&full);
      if constexpr (kChannelsLast) {
        cute::SM90_TMA_LOAD_5D::copy(map, barrier, kHint, part, box.c, box.b, box.a, box.d, box.n);
      } else {
        cute::SM90_TMA_LOAD_5D::copy(map, barrier, kHint, part, box.a, box.b, box.c, box.d, box.n);
      }
    }
  }

  CUTLASS_DEVICE static void store_unit(Params const& p, unsigned char* unit, UnitBox const& box) {
    for (int i = 0; i < kCopies; ++i) {
      CUtensorMap const* map = &p.y_map[box.map[i]];
      unsigned char* const part = unit + i * (kUnitBytes / kCopies);
      if constexpr (kChannelsLast) {
        cute::SM90_TMA_STORE_5D::copy(map, part, box.c, box.b, box.a, box.d, box.n);
      } else {
        cute::SM90_TMA_STORE_5D::copy(map, part, box.a, box.b, box.c, box.d, box.n);
      }
    }
    cute::tma_store_arrive();
  }

  /// The load thread: claims items and brings in their units of add, ahead of the consumers by the ring.
  CUTLASS_DEVICE static void load(StreamParams const& params, TileScheduler::Producer& scheduler, SharedStorage& shared,
                                  unsigned char* ring) {
    Params const& p = params.epilogue;
    UnitState slot;
    for (;;) {
      int const number = scheduler.start();
      if (number == TileScheduler::kEnd) break;
      Item const item = decode(params, number);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int unit = 0; unit < kTileUnits; ++unit) {
        if (unit == kPublishes) scheduler.publish();
        UnitBox const box = unit_box(params, item, unit);
        Resident::wait_free(shared, slot);
        shared.box[slot.slot] = box;
        // What the consumers need to know instead of a second map.
        if (stores_by_consumers(params)) shared.box[slot.slot].map[1] = residues(params, item.cls).pair;
        if (p.add_mode == AddMode::kTile && box.store == Resident::kStore && !loads_by_warps(params)) {
          load_unit(p, Resident::full(shared, slot), ring + slot.slot * kUnitBytes, box);
        } else {
          Resident::full(shared, slot).arrive();
        }
        slot.advance(1, p.ring);
      }
    }
    if (stores_by_consumers(params)) return;
    for (int i = 0; i < kStores; ++i) {
      Resident::wait_free(shared, slot);
      shared.box[slot.slot].store = Resident::kEnd;
      for (int lane = 0; lane < 32; ++lane) Resident::ready(shared, slot).arrive();
      slot.advance(1, p.ring);
    }
  }

  /// Load warp `which` of `warps`: brings in every `warps`-th unit.
  CUTLASS_DEVICE static void load_by_warp(StreamParams const& params, TileScheduler::SharedStorage& schedule,
                                          SharedStorage& shared, unsigned char* ring, int which, int warps) {
    using Units = PlainUnits<T, kChannelsLast>;
    TileScheduler::Consumer scheduler{schedule, {}};
    UnitState slot;
    slot.advance(which, params.epilogue.ring);
    int unit = which;
    for (;;) {
      int number = scheduler.fetch();
      if (number == TileScheduler::kEnd) break;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; unit < kTileUnits; unit += warps) {
        asm volatile("" : "+r"(number));  // decoded anew for every unit: registers are scarce
        Item const item = decode(params, number);
        UnitBox const box = unit_box(params, item, unit);
        UnitPlace const at = place(box, residues(params, item.cls).pair);
        TransactionBarrier& full = Resident::full(shared, slot);
        wait_free_now_and_then(shared, slot);
        if (box.store == Resident::kStore) {
          Units::load(params, at, cute::cast_smem_ptr_to_uint(ring) + slot.slot * kUnitBytes,
                      reinterpret_cast<uint64_t*>(&full));
        } else {
          full.arrive();
        }
        slot.advance(warps, params.epilogue.ring);
      }
      unit -= kTileUnits;
    }
  }

  /// wait_free() of a warp that does not wait for a slot in every lap. `free` alone could be two phases behind: first
  /// that of the lap before must have begun, which it has once the unit of that lap is ready, since it was issued. And
  /// ready's phase is never too far behind: this warp's last unit was loaded, so the one a ring before it was ready,
  /// hence issued, and all units a ring before that one free.
  CUTLASS_DEVICE static void wait_free_now_and_then(SharedStorage& shared, UnitState unit) {
    Resident::wait_last_ready(shared, unit);
    Resident::wait_free(shared, unit);
  }

  CUTLASS_DEVICE static void store(Params const& p, SharedStorage& shared, unsigned char* ring, int which) {
    UnitState slot;
    slot.advance(which, p.ring);
    int reading = -1;  // slot of a unit that the copy engine may still be reading
    for (;;) {
      Resident::wait_ready(shared, slot);
      cutlass::arch::fence_view_async_shared();  // the consumers' stores, before the copy engine reads them
      UnitBox const box = shared.box[slot.slot];
      if (box.store == Resident::kEnd) break;
      if (box.store == Resident::kStore) store_unit(p, ring + slot.slot * kUnitBytes, box);
      if constexpr (kStores == 1) {
        // Two units at a time, as two warps have.
        if (reading >= 0) {
          if (box.store == Resident::kStore) {
            cute::tma_store_wait<1>();
          } else {
            cute::tma_store_wait<0>();
          }
          shared.free[reading].arrive();
        }
        reading = box.store == Resident::kStore ? slot.slot : -1;
        if (reading < 0) shared.free[slot.slot].arrive();
      } else {
        if (box.store == Resident::kStore) cute::tma_store_wait<0>();
        shared.free[slot.slot].arrive();
      }
      slot.advance(kStores, p.ring);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    shared.stored.arrive();
  }

  // ---- consumer ----------------------------------------------------------------------------------------------

  CUTLASS_DEVICE static ChannelBits channel_bits(Params const& p, Item const& it, int warp, int lane) {
    ChannelBits v{};
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const c = it.channel + row_channel(Update::kPairs, warp % 4 * 16 + half * 8 + lane / 4);
      if (c >= p.out_channels) continue;
      if (p.has_bias) v.bias[half] = Element<T>::bits(static_cast<T const*>(p.bias)[c * p.bias_stride]);
      if (p.add_mode == AddMode::kPerChannel) {
        v.add[half] = Element<T>::bits(static_cast<T const*>(p.add)[it.n * p.add_stride[0] + c * p.add_stride[1]]);
      }
    }
    return v;
  }

  /// Finishes unit `kSub` of a warp: unit += acc + bias, activation, in place.
  template <int kSub>
  CUTLASS_DEVICE static void update(StreamParams const& params, Item const& item, SharedStorage& shared,
                                    unsigned char* ring, UnitState slot, int warp, int lane, Channels const& channels,
                                    float (&acc)[2][4 * kWidth]) {
    Params const& p = params.epilogue;
    constexpr bool kMayShift = kPlain && sizeof(T) == 2 && !kChannelsLast;
    uint32_t const unit = cute::cast_smem_ptr_to_uint(ring) + slot.slot * kUnitBytes;
    // Of few channels most warps have none.
    bool const live = item.channel + warp % 4 * 16 + (kChannelsLast ? 0 : kSub * kChannelsOfUnit) < p.out_channels;
    Shift<T> rows{};
    bool shifted = false;
    if constexpr (kMayShift) {
      shifted = params.plain.path.add == Path::kShift4;
      if (shifted && live) rows = Shift<T>::make(params, item, warp, lane);
    }
    Resident::wait_full(shared, slot);
    if (live) {
      bool const tile = p.add_mode == AddMode::kTile;
      if (kMayShift && shifted) {
        Update::template shifted_unit<kSub>(p, unit, lane, channels, rows, acc);
      } else {
        Update::template unit<kSub>(p, unit, lane, channels, tile, acc);
      }
    }
    if (!stores_by_consumers(params)) Resident::ready(shared, slot).arrive();
    __syncwarp();
  }

  /// Stores an updated unit of this warp's where the copy engine cannot, and hands its slot back. Not by warps of its
  /// own: eight of these, with registers for many accesses at once, are past it in the time that one of those takes for
  /// two accesses.
  CUTLASS_DEVICE static void store_by_consumer(StreamParams const& params, SharedStorage& shared, unsigned char* ring,
                                               UnitState slot, int lane) {
    UnitBox const box = shared.box[slot.slot];
    if (box.store == Resident::kStore) {
      PlainUnits<T, kChannelsLast>::store(params, place(box, box.map[1]),
                                          cute::cast_smem_ptr_to_uint(ring) + slot.slot * kUnitBytes, lane);
    }
    // Before a box comes to lie where these threads wrote.
    if (!loads_by_warps(params)) cutlass::arch::fence_view_async_shared();
    Resident::ready(shared, slot).arrive();
    __syncwarp();
    if (lane == 0) shared.free[slot.slot].arrive();
  }
};

}  // namespace convt3d::sm90::stream
