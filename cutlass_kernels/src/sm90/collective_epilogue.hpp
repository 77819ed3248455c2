// SPDX-License-Identifier: Apache-2.0
//
// add and y. One ring of 8 KB units serves both: the load warp brings in units of `add` far ahead (TMA), a consumer
// warp updates each in place, and the store warps write it to y from the same memory. A unit is what one warp computes
// of a tile; geometry.hpp has its layouts.
#pragma once

#include <type_traits>

#include "cute/arch/copy_sm90_tma.hpp"
#include "sm90/multiply.hpp"
#include "sm90/tails.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90 {

template <class Epilogue>
struct AnyUpdate;  // any_update.hpp

template <class T, bool kChannelsLast, class Tail>
struct CollectiveEpilogue {
  using Type = T;
  using Params = EpilogueParams;
  static constexpr bool kLast = kChannelsLast;
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  static constexpr int kVector = Element<T>::kVector;
  static constexpr bool kPairs = kChannelsLast && !kPositionsFirst<T, kChannelsLast>;  // accumulators of two channels
  static constexpr int kParts = Multiply<T, kChannelsLast>::kParts;                    // wgmmas of a tile: halves of M
  using Accumulators = typename Multiply<T, kChannelsLast>::Accumulators;  // the first kParts rows hold the results
  static constexpr int kRowBytes = kChannelsLast || sizeof(T) == 2 ? 64 : 128;
  static constexpr int kMaps = kChannelsLast ? 2 : 4;  // where they are not merged
  /// Reads of a unit before the arithmetic: as many as registers allow beside the accumulators.
  static constexpr int kBatch = sizeof(T) == 4 ? 8 : 4;
  /// Channels whose bias a thread holds.
  static constexpr int kChannels = kPairs ? 2 : kChannelsLast ? kVector : kParts;
  static constexpr int kChannelStep = kChannelsLast ? 1 : 4;

  CUTLASS_DEVICE static float value(void const* tensor, int64_t at) {
    return Element<T>::to_float(static_cast<T const*>(tensor)[at]);
  }

  /// Where a unit lies in y: its first output. NCDHW: a is W, b is H / 4. NDHWC: a is W / 2, b is H, or H / 2 with the
  /// weights as A. Then, and when streaming, also the tensor map of each of its copies.
  struct alignas(16) UnitBox {
    int32_t a, b, c, d, n, store, map[2];
  };

  enum : int32_t { kSkip = 0, kStore = 1, kEnd = 2 };  // UnitBox::store

  // Barriers of a slot, used lap by lap in turn. A wait tells a phase by its parity alone, so it is right only while
  // the phase before it is over: it must not begin before the same barrier's last use. Let a warp wait for unit i, and
  // j be the unit that it waited for before. j has come, and the load thread issued it after every unit a ring before j
  // was free again, hence over in all of its barriers. So the last use of this one, `laps` rings before i, is over
  // where i - laps * ring <= j - ring; a warp's first unit has no earlier use. (Nor can it end twice before the wait is
  // over: the next use waits for this unit.)
  static constexpr int kFullLaps = 4;
  static constexpr int kReadyLaps = 2;

  /// Whether that holds: `step` units, at most, from one of a consumer warp's to its next, `store_warps` from one of a
  /// store thread's to its next, in rings of `ring` units or more.
  static constexpr bool enough_laps(int ring, int step, int store_warps) {
    return step <= (kFullLaps - 1) * ring && store_warps <= (kReadyLaps - 1) * ring;
  }
  static_assert(enough_laps(kSmallestRing, kUnitsPerTile, kStoreWarps));

  struct SharedStorage {
    TransactionBarrier full[kFullLaps][kMaxRing];  // add has arrived
    Barrier ready[kReadyLaps][kMaxRing];           // a consumer warp has updated the unit
    Barrier free[kMaxRing];                        // the store has read it; one thread waits for it, lap by lap
    Barrier stored;                                // everything has reached memory, all of x has been seen
    UnitBox box[kMaxRing];
  };

  /// `last`: arrivals that end the kernel's stores. `filling`: those that bring in a unit of add; `finishing`: that are
  /// done with it.
  CUTLASS_DEVICE static void init(SharedStorage& shared, int last = kStoreWarps + kLoaderWarps, int filling = 1,
                                  int finishing = 1) {
    for (int i = 0; i < kMaxRing; ++i) {
      for (int lap = 0; lap < kFullLaps; ++lap) shared.full[lap][i].init(filling);
      for (int lap = 0; lap < kReadyLaps; ++lap) shared.ready[lap][i].init(finishing);
      shared.free[i].init(1);
    }
    shared.stored.init(last);
  }

  CUTLASS_DEVICE static TransactionBarrier& full(SharedStorage& shared, UnitState unit) {
    return shared.full[unit.lap % kFullLaps][unit.slot];
  }
  CUTLASS_DEVICE static Barrier& ready(SharedStorage& shared, UnitState unit) {
    return shared.ready[unit.lap % kReadyLaps][unit.slot];
  }
  CUTLASS_DEVICE static void wait_full(SharedStorage& shared, UnitState unit) {
    full(shared, unit).wait(static_cast<uint32_t>(unit.lap) / kFullLaps & 1);
    wait_last_ready(shared, unit);
  }
  CUTLASS_DEVICE static void wait_ready(SharedStorage& shared, UnitState unit) {
    ready(shared, unit).wait(static_cast<uint32_t>(unit.lap) / kReadyLaps & 1);
  }
  /// Of the lap before; at once in the first.
  CUTLASS_DEVICE static void wait_free(SharedStorage& shared, UnitState unit) {
    shared.free[unit.slot].wait((static_cast<uint32_t>(unit.lap) & 1) ^ 1);
    wait_last_ready(shared, unit);
  }
  /// That the warp which had the slot in the lap before is done with it: true by then, by way of the store's and the
  /// load's barriers. This costs nothing and puts one barrier between the two, where a race checker sees it.
  CUTLASS_DEVICE static void wait_last_ready(SharedStorage& shared, UnitState unit) {
    if (unit.lap > 0) wait_ready(shared, {unit.slot, unit.lap - 1});
  }

  // ---- load warp and store warps (one thread each) ------------------------------------------------------------

  CUTLASS_DEVICE static void load_unit(Params const& p, TransactionBarrier& full, unsigned char* unit,
                                       UnitBox const& box) {
    auto* const barrier = reinterpret_cast<uint64_t*>(&full);
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    using Copy = cute::SM90_TMA_LOAD_5D;
    full.arrive_and_expect_tx(kUnitBytes);
    if constexpr (kPairs) {
      Copy::copy(&p.add_map[box.map[0]], barrier, kHint, unit, box.c, box.b, box.a, box.d, box.n);
    } else if (p.add_merged) {
      if constexpr (kChannelsLast) {
        Copy::copy(&p.add_map[0], barrier, kHint, unit, box.c, box.a, box.b, box.n * p.out_depth + box.d, 0);
      } else {
        Copy::copy(&p.add_map[0], barrier, kHint, unit, box.a, box.b, box.n * p.out_channels + box.c, box.d, 0);
      }
    } else {
      for (int m = 0; m < kMaps; ++m) {
        unsigned char* const part = unit + m * (kUnitBytes / kMaps);
        if constexpr (kChannelsLast) {
          Copy::copy(&p.add_map[m], barrier, kHint, part, box.c, box.a, box.b, box.d, box.n);
        } else {
          Copy::copy(&p.add_map[m], barrier, kHint, part, box.a, box.b, box.c, box.d, box.n);
        }
      }
    }
  }

  CUTLASS_DEVICE static void store_unit(Params const& p, unsigned char* unit, UnitBox const& box) {
    using Copy = cute::SM90_TMA_STORE_5D;
    if constexpr (kPairs) {
      Copy::copy(&p.y_map[box.map[0]], unit, box.c, box.b, box.a, box.d, box.n);
    } else if (p.y_merged) {
      if constexpr (kChannelsLast) {
        Copy::copy(&p.y_map[0], unit, box.c, box.a, box.b, box.n * p.out_depth + box.d, 0);
      } else {
        Copy::copy(&p.y_map[0], unit, box.a, box.b, box.n * p.out_channels + box.c, box.d, 0);
      }
    } else {
      for (int m = 0; m < kMaps; ++m) {
        unsigned char* const part = unit + m * (kUnitBytes / kMaps);
        if constexpr (kChannelsLast) {
          Copy::copy(&p.y_map[m], part, box.c, box.a, box.b, box.d, box.n);
        } else {
          Copy::copy(&p.y_map[m], part, box.a, box.b, box.c, box.d, box.n);
        }
      }
    }
    cute::tma_store_arrive();
  }

  /// The load thread: loads run ahead of the consumers by the ring.
  CUTLASS_DEVICE static void load(Params const& p, SchedulerParams const& sp, int cls,
                                  TileScheduler::Producer& scheduler, SharedStorage& shared, unsigned char* ring) {
    UnitState slot;
    for (;;) {
      int const number = scheduler.start();
      if (number == TileScheduler::kEnd) break;
      TileScheduler::Run const run = TileScheduler::decode(sp, number);
      for (int tile = 0; tile < run.length; ++tile) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int unit = 0; unit < kUnitsPerTile; ++unit) {
          if (tile == 0 && unit == kUnitsPerGroup) scheduler.publish();
          UnitBox box;
          int const warp = unit % kUnitsPerGroup;
          if constexpr (kChannelsLast) {
            box.a = run.w * kTileW;
            box.b = kPairs ? run.h * kTileH : run.h * 2 * kTileH + 4 * warp;
            box.map[0] = warp;  // its parity
            box.c = cls * class_channels(sizeof(T));
          } else {
            box.a = run.w * 2 * kTileW;
            box.b = run.h * (kTileH / 2);
            box.c = cls * class_channels(sizeof(T)) + warp * kVector;
          }
          box.d = 2 * (run.d + tile) + unit / kUnitsPerGroup;
          box.n = run.n;
          // In a merged map the plane after the last one is the next sample's.
          box.store = box.c < p.out_channels && box.d < p.out_depth ? kStore : kSkip;
          wait_free(shared, slot);
          shared.box[slot.slot] = box;
          if (p.add_mode == AddMode::kTile && box.store == kStore) {
            load_unit(p, full(shared, slot), ring + slot.slot * kUnitBytes, box);
          } else {
            full(shared, slot).arrive();
          }
          slot.advance(1, p.ring);
        }
      }
    }
    for (int i = 0; i < kStoreWarps; ++i) {
      wait_free(shared, slot);
      shared.box[slot.slot].store = kEnd;
      ready(shared, slot).arrive();
      slot.advance(1, p.ring);
    }
  }

  /// Store thread `which`: every kStoreWarps-th unit. Several, because each waits until its store has read the unit:
  /// a wait that blocks is all there is, and a single thread would pass one unit per read latency.
  CUTLASS_DEVICE static void store(Params const& p, SharedStorage& shared, unsigned char* ring, int which) {
    UnitState slot;
    slot.advance(which, p.ring);
    for (;;) {
      wait_ready(shared, slot);
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

  /// The channel of a thread's first bias value; the `i`-th is kChannelStep * i further.
  CUTLASS_DEVICE static int first_channel(int cls, int warp, int lane) {
    if constexpr (kPairs) {
      return cls * class_channels(sizeof(T)) + lane / 4 * 2;
    } else if constexpr (kChannelsLast) {
      return cls * class_channels(sizeof(T)) + lane % 4 * kVector;
    } else {
      return block_row_ncdhw(sizeof(T), cls, 0, warp % 4 * 16 + lane / 4).channel;
    }
  }

  /// What stands in for a unit's contents where add is not loaded: for NDHWC the vector of a thread's channels, for
  /// NCDHW a word that repeats the value of each of its channels.
  struct FlatAdd {
    uint32_t word[kChannelsLast ? 4 : kParts];
  };

  /// The values of sample `n`.
  CUTLASS_DEVICE static FlatAdd flat_add(Params const& p, int classes, int n) {
    FlatAdd flat{};
    if (p.add_mode == AddMode::kPerChannel) {
      // Registers are scarce where this is called: nothing may be kept for it.
      int thread, cta;
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
      asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
      int const first = first_channel(cta % classes, thread / 32, thread % 32);
      constexpr int kPerWord = kChannelsLast ? 4 / static_cast<int>(sizeof(T)) : 1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kChannels; ++i) {
        int const c = first + i * kChannelStep;
        if (c >= p.out_channels) continue;
        T const v = static_cast<T const*>(p.add)[n * p.add_stride[0] + c * p.add_stride[1]];
        uint32_t const bits = Element<T>::bits(v);
        flat.word[i / kPerWord] |= bits << (i % kPerWord * 16);
        if (!kChannelsLast && sizeof(T) == 2) flat.word[i] |= bits << 16;
      }
    }
    return flat;
  }

  /// One warp's unit: unit += factor acc + bias, activation, in place. The factor is that of the (H, W) parity; the
  /// same for all in ieee mode, not looked at in tf32 mode and NCDHW. AnyTail leaves nothing of `acc`.
  CUTLASS_DEVICE static void update(Params const& p, SharedStorage& shared, unsigned char* ring, UnitState slot,
                                    int lane, float const (&bias)[kChannels], float const (&factor)[4],
                                    FlatAdd const& flat, Accumulators& acc) {
    wait_full(shared, slot);
    uint32_t const unit = cute::cast_smem_ptr_to_uint(ring) + slot.slot * kUnitBytes;
    if constexpr (Tail::kAny) {
      AnyUpdate<CollectiveEpilogue>::unit(p, unit, lane, bias, factor, flat, acc);
    } else if constexpr (kPairs) {
      update_pairs(p, unit, lane, bias, factor[0], flat, acc);
    } else if constexpr (kChannelsLast) {
      update_ndhwc(p, unit, lane, bias, factor, flat, acc);
    } else {
      update_ncdhw(p, unit, lane, bias, factor, flat, acc);
    }
    __syncwarp();
    if (lane == 0) ready(shared, slot).arrive();
  }

  /// Whole output rows, those of one H position after the other.
  CUTLASS_DEVICE static void update_ncdhw(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                          float const (&factor)[4], FlatAdd const& flat, Accumulators const& acc) {
    int const parity = kSplit ? 0 : lane / 16 * 2;  // lane / 16: of H
    float const of_columns[2] = {factor[parity], factor[parity + 1]};
    constexpr int kChunks = kRowBytes / 16;
    constexpr int kPerRow = kChunks / kBatch;
    uint32_t const base = unit + unit_row_ncdhw(sizeof(T), lane, 0, 0) * kRowBytes;
    int const swizzle = (kRowBytes == 128 ? lane & 7 : (lane >> 1) & 3) << 4;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kParts * kPerRow; ++i) {
      int const b = i / (kParts * kPerRow);
      int const part = i / kPerRow % kParts;
      int const first = i % kPerRow * kBatch;
      uint32_t const row = base + unit_row_ncdhw(sizeof(T), 0, b, part) * kRowBytes;
      uint4 v[kBatch];
      if (p.add_mode == AddMode::kTile) {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kBatch; ++k) v[k] = load_shared(row + (((first + k) << 4) ^ swizzle));
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kBatch; ++k) {
          v[k] = make_uint4(flat.word[part], flat.word[part], flat.word[part], flat.word[part]);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        float f[kVector];
        Element<T>::unpack(v[k], f);
        // Accumulators of output ow: [4 (ow / 2) + 2 (ow mod 2) + b].
        tail(p, f, [&](int o) {
          return finish(acc[part][2 * (kVector * (first + k) + o) + b], bias[part], of_columns[o % 2]);
        });
        store_shared(row + (((first + k) << 4) ^ swizzle), Element<T>::pack(f));
      }
    }
  }

  /// 16 bytes of channels of one output after the other.
  CUTLASS_DEVICE static void update_ndhwc(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                          float const (&factor)[4], FlatAdd const& flat, Accumulators const& acc) {
    uint32_t const base = unit + unit_row_ndhwc(lane, 0, 0, 0, 0) * kRowBytes + (((lane & 3) ^ ((lane >> 3) & 3)) << 4);
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kParts * 8; first += kBatch) {  // part, half, H parity, W parity
      uint4 v[kBatch];
      if (p.add_mode == AddMode::kTile) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatch; ++i) v[i] = load_shared(base + row_of(first + i) * kRowBytes);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatch; ++i) v[i] = make_uint4(flat.word[0], flat.word[1], flat.word[2], flat.word[3]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        int const half = (first + i) / 4 % 2;
        int const parity = (first + i) % 4;
        float f[kVector];
        Element<T>::unpack(v[i], f);
        // Column 8 j + 2 q + c mod 2 of the accumulator, j = (vector / 2) (parity) + c / 2; row `half`.
        tail(p, f, [&](int c) {
          int const j = kVector / 2 * parity + c / 2;
          return finish(acc[(first + i) / 8][4 * j + 2 * half + c % 2], bias[c], factor[parity]);
        });
        store_shared(base + row_of(first + i) * kRowBytes, Element<T>::pack(f));
      }
    }
  }

  /// Where a thread's pairs of channels are in a unit, and their sums.
  struct Pairs {
    // Rows of even and of odd H positions share no bank, so lanes of odd columns take their odd row first. The swizzle
    // XORs the chunk with half the row's number, of which lane % 4 alone counts.
    bool swap;
    uint32_t base[2];

    CUTLASS_DEVICE Pairs(uint32_t unit, int lane) : swap(lane % 2 != 0) {
      uint32_t const even =
          unit + unit_row_pairs(lane, 0, 0) * kRowBytes + ((lane / 8 ^ lane % 4) << 4) + lane / 4 % 2 * 8;
      base[0] = swap ? even + kRowBytes : even;
      base[1] = swap ? even : even + kRowBytes;
    }
    /// `index`: W position, row.
    CUTLASS_DEVICE uint32_t address(int index) const {
      return base[index % 2] + unit_row_pairs(0, index / 2, 0) * kRowBytes;
    }
    template <int kCount>
    CUTLASS_DEVICE float sum(float const (&sums)[kCount], int index, int half) const {
      int const at = index / 2 * 4 + index % 2 + 2 * half;
      return swap ? sums[at ^ 1] : sums[at];
    }
  };

  /// Two neighbouring channels of one output after the other.
  CUTLASS_DEVICE static void update_pairs(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                          float factor, FlatAdd const& flat, Accumulators const& acc) {
    static_assert(kRowBytes == 64);
    constexpr int kPairBatch = 2 * kBatch;
    Pairs const at(unit, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < 2 * kTileW; first += kPairBatch) {  // W position, row
      uint2 v[kPairBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairBatch; ++i) {
        v[i] = p.add_mode == AddMode::kTile ? load_shared_pair(at.address(first + i))
                                            : make_uint2(flat.word[0], flat.word[1]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairBatch; ++i) {
        float f[2] = {__uint_as_float(v[i].x), __uint_as_float(v[i].y)};
        tail(p, f, [&](int half) { return finish(at.sum(acc[0], first + i, half), bias[half], factor); });
        store_shared(at.address(first + i), make_uint2(__float_as_uint(f[0]), __float_as_uint(f[1])));
      }
    }
  }

  CUTLASS_DEVICE static constexpr int row_of(int index) {
    return unit_row_ndhwc(0, index / 8, index / 4 % 2, index / 2 % 2, index % 2);
  }

  /// `factor`: of sums that get something back (sums.hpp), and from parts to fp32.
  CUTLASS_DEVICE static float finish(float sum, float bias, float factor) {
    return sizeof(T) == 2 || kSplit || kGivesBack<T, kChannelsLast> ? fmaf(sum, factor, bias) : sum + bias;
  }

  /// `values`: from add to the outputs of an access. `convolution(i)` is the value of the `i`-th before it.
  template <int kCount, class Convolution>
  CUTLASS_DEVICE static void tail(Params const& p, float (&values)[kCount], Convolution const& convolution) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = Tail::apply(p, convolution(i) + values[i]);
  }
};

}  // namespace convt3d::sm90
