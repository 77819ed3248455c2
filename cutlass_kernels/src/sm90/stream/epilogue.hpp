// SPDX-License-Identifier: Apache-2.0
//
// add and y of the streaming kernel: the same ring of 8 KB units as in the resident one, with other boxes (every second
// output row) and other places of the accumulators. What the copy engine cannot move goes by plain.hpp.
#pragma once

#include "sm90/collective_epilogue.hpp"
#include "sm90/stream/plain.hpp"
#include "sm90/stream/shift.hpp"

namespace convt3d::sm90::stream {

template <class T, bool kChannelsLast, class Tail, int kWidth>
struct StreamEpilogue {
  using Resident = CollectiveEpilogue<T, kChannelsLast, Tail>;
  using SharedStorage = typename Resident::SharedStorage;
  using UnitBox = typename Resident::UnitBox;
  using Params = EpilogueParams;
  static constexpr int kVector = Element<T>::kVector;
  static constexpr int kUnits = units_per_warp(sizeof(T));  // of a warp and tile
  static constexpr int kTileUnits = kUnits * kGroups * 4;   // in the order unit of a warp, group, warp
  static constexpr int kUnitStep = kGroups * 4;             // from a warp's unit to its next
  static constexpr int kCopies = kChannelsLast ? 1 : 2;     // boxes of a unit
  static constexpr int kChannelsOfUnit = kChannelsLast ? 16 : 16 / kUnits;
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  static constexpr bool kScaled = kSplit || sizeof(T) == 2;
  /// Accesses of a thread to a unit that are read at a time: of 16 bytes, and (NDHWC) of pairs. They are read ahead,
  /// while the batch before them is worked on, but in ieee mode, where that was no faster.
  static constexpr bool kReadsAhead = !kSplit;
  static constexpr int kRowVectors = 2 * kWidth / kVector;  // NCDHW: of 16 bytes, in a row along W
  static constexpr int kBatch = Tail::kLarge ? 2 : kRowVectors % 4 == 0 ? 4 : 3;
  static constexpr int kPairBatch = Tail::kLarge || kSplit ? 4 : 8;
  static constexpr int kBoxBytes = kUnitBytes / kTileW * kWidth;  // of a unit, in memory
  static constexpr bool kPlain = kWidth == kTileW;                // whether warps may move what boxes do not
  static constexpr int kPairWords = sizeof(T) == 4 ? 2 : 1;
  static constexpr int kStores = kSplit ? 1 : kStoreWarps;  // warps
  static constexpr int kLoads = kSplit ? 0 : kLoadWarps;    // of add by warps, besides
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
        if (unit == kTileUnits / 2) scheduler.publish();
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

  /// Bias, and what stands in for add where it is not loaded, of a thread's two channels.
  struct Channels {
    float bias[2];
    uint32_t add[2];  // the value of a channel, in each element of a word
    float scale[2];   // of the sums of each W parity; but in tf32 mode

    CUTLASS_DEVICE float finish(float sum, int half, int parity) const {
      return kScaled ? fmaf(sum, scale[kSplit ? 0 : parity], bias[half]) : sum + bias[half];
    }
  };

  /// Their bits as they lie in memory, to be read before the products: nothing waits for them then. (In ieee mode after
  /// them, where registers are scarcer.)
  struct ChannelBits {
    uint32_t bias[2], add[2];

    CUTLASS_DEVICE Channels channels() const {
      Channels v{};
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        if constexpr (sizeof(T) == 4) {
          v.bias[half] = __uint_as_float(bias[half]);
          v.add[half] = add[half];
        } else {
          v.bias[half] = Element<T>::from_bits(bias[half]);
          v.add[half] = add[half] | add[half] << 16;
        }
      }
      return v;
    }
  };

  CUTLASS_DEVICE static ChannelBits channel_bits(Params const& p, Item const& it, int warp, int lane) {
    ChannelBits v{};
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const c = it.channel + row_channel(kChannelsLast, warp % 4 * 16 + half * 8 + lane / 4);
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
                                    float const (&acc)[2][4 * kWidth]) {
    Params const& p = params.epilogue;
    uint32_t const unit = cute::cast_smem_ptr_to_uint(ring) + slot.slot * kUnitBytes;
    // Of few channels most warps have none.
    bool const live = item.channel + warp % 4 * 16 + (kChannelsLast ? 0 : kSub * kChannelsOfUnit) < p.out_channels;
    Shift<T> rows{};
    bool shifted = false;
    if constexpr (kPlain && sizeof(T) == 2 && !kChannelsLast) {
      shifted = params.plain.path.add == Path::kShift4;
      if (shifted && live) rows = Shift<T>::make(params, item, warp, lane);
    }
    Resident::wait_full(shared, slot);
    auto update_unit = [&](bool tile) {
      if constexpr (kChannelsLast) {
        update_ndhwc<kSub>(p, unit, lane, channels, tile, acc);
      } else {
        update_ncdhw<kSub, false>(p, unit, lane, channels, tile, rows, acc);
      }
    };
    if (live) {
      bool const tile = p.add_mode == AddMode::kTile;
      if (kPlain && sizeof(T) == 2 && !kChannelsLast && shifted) {
        update_ncdhw<kSub, kPlain && sizeof(T) == 2 && !kChannelsLast>(p, unit, lane, channels, true, rows, acc);
      } else if (Tail::kLarge || kSplit) {
        update_unit(tile);
      } else if (tile) {
        update_unit(true);
      } else {
        update_unit(false);
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

  /// wgmma's accumulator of W position `j`, accumulator half (channel) and H position 2 (lane % 4) + b.
  CUTLASS_DEVICE static constexpr int accumulator(int j, int half, int b) { return 4 * j + 2 * half + b; }

  /// `tile`: whether add is in the unit.
  template <int kSub, bool kShift>
  CUTLASS_DEVICE static void update_ncdhw(Params const& p, uint32_t unit, int lane, Channels const& channels, bool tile,
                                          Shift<T> const& rows, float const (&acc)[2][4 * kWidth]) {
    constexpr int kRowBytes = 32 * sizeof(T);
    constexpr int kPerRow = kRowVectors / kBatch;
    constexpr int kBatches = 2 * (2 / kUnits) * kPerRow;
    uint32_t const base = unit + unit_row_ncdhw(sizeof(T), lane, 0, 0) * kRowBytes;
    int const swizzle = (kRowBytes == 128 ? lane & 7 : (lane >> 1) & 3) << 4;
    auto half_of = [](int batch) { return kUnits == 2 ? kSub : batch / kPerRow / 2; };
    auto address = [&](int batch, int k) {
      uint32_t const row = base + unit_row_ncdhw(sizeof(T), 0, half_of(batch), batch / kPerRow % 2) * kRowBytes;
      return row + (((batch % kPerRow * kBatch + k) << 4) ^ swizzle);
    };
    uint4 v[2][kBatch];
    auto load = [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        uint32_t const flat = channels.add[half_of(batch)];
        v[batch % 2][k] = tile ? load_shared(address(batch, k)) : make_uint4(flat, flat, flat, flat);
      }
    };
    if (kReadsAhead) load(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatches; ++i) {
      int const b = i / kPerRow % 2;
      int const half = half_of(i);
      int const first = i % kPerRow * kBatch;
      if (!kReadsAhead) load(i);
      if (kReadsAhead && i + 1 < kBatches) load(i + 1);
      uint4(&elements)[kBatch] = v[i % 2];
      if constexpr (kShift) {
        uint32_t next = rows.last[half][b];
        if (first + kBatch < kRowVectors) next = v[(i + 1) % 2][0].x;
        shift(elements, next, rows.selector[half]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        float f[kVector];
        Element<T>::unpack(elements[k], f);
        CUTLASS_PRAGMA_UNROLL
        for (int o = 0; o < kVector; ++o) {
          int const ow = kVector * (first + k) + o;
          f[o] = Resident::tail(p, channels.finish(acc[ow % 2][accumulator(ow / 2, half, b)], half, ow % 2), f[o]);
        }
        store_shared(address(i, k), Element<T>::pack(f));
      }
    }
  }

  /// Two neighbouring channels of one output after the other: 8 bytes of fp32, 4 of 16-bit types.
  template <int kSub>
  CUTLASS_DEVICE static void update_ndhwc(Params const& p, uint32_t unit, int lane, Channels const& channels, bool tile,
                                          float const (&acc)[2][4 * kWidth]) {
    constexpr int kRowBytes = 16 * sizeof(T);
    constexpr int kBatches = 4 * kWidth / kUnits / kPairBatch;
    int const byte = lane / 4 * 2 * static_cast<int>(sizeof(T));
    // The swizzle takes address bits from the 128-byte line: bits 7 and 8 of fp32's 64-byte rows, 7 of 32-byte rows.
    int const line = lane % 4 * 2 * kRowBytes >> 7;
    uint32_t v[2][kPairBatch][kPairWords];
    auto load = [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairBatch; ++i) {
        uint32_t(&pair)[kPairWords] = v[batch % 2][i];
        if (tile) {
          load_pair(pair_address(unit, batch * kPairBatch + i, line, byte, lane), pair);
        } else if constexpr (sizeof(T) == 4) {
          pair[0] = channels.add[0];
          pair[1] = channels.add[1];
        } else {
          pair[0] = __byte_perm(channels.add[0], channels.add[1], 0x5410);
        }
      }
    };
    if (kReadsAhead) load(0);
    CUTLASS_PRAGMA_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      if (!kReadsAhead) load(batch);
      if (kReadsAhead && batch + 1 < kBatches) load(batch + 1);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairBatch; ++i) {
        int const index = batch * kPairBatch + i;
        int const ow = index / 2;  // in the unit
        int const j = ow / 2 + kSub * (kWidth / 2);
        float f[2];
        unpack_pair(v[batch % 2][i], f);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float const sum = acc[ow % 2][accumulator(j, half, index % 2)];
          f[half] = Resident::tail(p, channels.finish(sum, half, ow % 2), f[half]);
        }
        store_pair(pair_address(unit, index, line, byte, lane), f);
      }
    }
  }

  /// Of output `index` / 2 and b = `index` mod 2.
  CUTLASS_DEVICE static uint32_t pair_address(uint32_t unit, int index, int line, int byte, int lane) {
    constexpr int kRowBytes = 16 * sizeof(T);
    constexpr int kMask = kRowBytes / 16 - 1;
    // Whole lines per output, so that its part of the swizzle is known at compile time; b does not reach the next line.
    int const of_output = index / 2 * 8 * kRowBytes;
    int const swizzle = ((of_output >> 7) + line) & kMask;
    return unit + of_output + (lane % 4 * 2 + index % 2) * kRowBytes + (byte ^ (swizzle << 4));
  }

  CUTLASS_DEVICE static void load_pair(uint32_t address, uint32_t (&v)[kPairWords]) {
    if constexpr (sizeof(T) == 4) {
      uint2 const pair = load_shared_pair(address);
      v[0] = pair.x;
      v[1] = pair.y;
    } else {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v[0]) : "r"(address) : "memory");
    }
  }

  CUTLASS_DEVICE static void unpack_pair(uint32_t const (&v)[kPairWords], float (&f)[2]) {
    if constexpr (sizeof(T) == 4) {
      f[0] = __uint_as_float(v[0]);
      f[1] = __uint_as_float(v[1]);
    } else {
      f[0] = Element<T>::from_bits(v[0]);
      f[1] = Element<T>::from_bits(v[0] >> 16);
    }
  }

  CUTLASS_DEVICE static void store_pair(uint32_t address, float const (&f)[2]) {
    if constexpr (sizeof(T) == 4) {
      store_shared(address, make_uint2(__float_as_uint(f[0]), __float_as_uint(f[1])));
    } else {
      uint32_t const both =
          Element<T>::bits(Element<T>::from_float(f[0])) | Element<T>::bits(Element<T>::from_float(f[1])) << 16;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(both) : "memory");
    }
  }
};

}  // namespace convt3d::sm90::stream
