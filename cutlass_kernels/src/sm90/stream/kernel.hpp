// SPDX-License-Identifier: Apache-2.0
//
// The streaming kernel, for what the resident one does not take: persistent CTAs. Two consumer warpgroups multiply and
// finish the outputs, one D pair each. Five warps feed them (four in ieee mode): one schedules and loads add, one
// brings in weights, one x, and two store y (one). Others load add where boxes of the copy engine do not (five if y
// does not go by boxes either: then the consumers store it).
#pragma once

#include <type_traits>

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "dependent_launch.hpp"
#include "sm90/split_route.hpp"
#include "sm90/stream/epilogue.hpp"
#include "sm90/stream/parts_mainloop.hpp"
#include "sm90/stream/small_sums.hpp"
#include "sm90/stream/suspects.hpp"

namespace convt3d::sm90::stream {

template <class T, bool kChannelsLast, class Tail, int kWidth>
struct Kernel {
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  using Mainloop = std::conditional_t<kSplit, PartsMainloop<kWidth>, StreamMainloop<T, kWidth>>;
  using Epilogue = StreamEpilogue<T, kChannelsLast, Tail, kWidth>;
  using Small = SmallSums<kChannelsLast, kWidth>;

  // Two warpgroups, for setmaxnreg. One in ieee mode, whose consumers hold half as many sums again.
  static constexpr int kFeedingWarps = kSplit ? 4 : 8;
  static constexpr int kThreads = kGroups * 128 + kFeedingWarps * 32;
  static constexpr int kConsumerRegisters = kSplit ? 232 : 216;
  static constexpr int kFeedingRegisters = 40;
  static_assert(kFeedingWarps == 3 + Epilogue::kStores + Epilogue::kLoads);
  // They share what the kernel starts with: for each thread the largest multiple of 8 that fits.
  static_assert(128 * kGroups * kConsumerRegisters + 32 * kFeedingWarps * kFeedingRegisters <=
                65536 / kThreads / 8 * 8 * kThreads);
  /// When consumers find out about their next item: in 16-bit types while products are under way; in ieee mode,
  /// which waits for each of its sums, between both units of a warp, of which the second is often still on its
  /// way; otherwise behind everything, for registers are too few. Its number has been published by then: before the
  /// unit of this item that would find the ring full of those before it.
  enum class Look { kWithProducts, kBetweenUnits, kBehind };
  static constexpr Look kLook = Tail::kAny       ? Look::kBehind
                                : sizeof(T) == 2 ? Look::kWithProducts
                                : kSplit         ? Look::kBetweenUnits
                                                 : Look::kBehind;
  static_assert(Epilogue::kPublishes < kSmallestRing);
  static constexpr int kScheduleReaders = kGroups * 4 + 2;  // warps: consumers, weights, x

  /// What the outputs of an item need from memory beside its products and add.
  struct Beside {
    typename Epilogue::ChannelBits bits{};
    int32_t x_exponent = 0, weight_exponent = 0;  // in ieee mode, as the next
    uint32_t tiny = 0;

    CUTLASS_DEVICE static Beside load(StreamParams const& params, Item const& item, int group, int warp, int lane) {
      Beside v;
      v.bits = Epilogue::channel_bits(params.epilogue, item, warp, lane);
      if constexpr (kSplit) {  // by way of the cache at hand, which little else fills
        v.x_exponent = __ldca(&params.split.state->x_exponent);
        v.weight_exponent = __ldca(params.split.weight_exponent + item.channel / kTileChannels);
        v.tiny = Small::tiny_of_plane(params, item, group, lane);
      }
      return v;
    }
  };

  struct SharedStorage {
    typename Mainloop::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
    TileScheduler::SharedStorage scheduler;
    int32_t nan_seen;           // among this CTA's sums
    SuspectList suspect_items;  // where, in ieee mode
  };

  static_assert(sizeof(SharedStorage) <= kBarrierBytes, "config.hpp reserves too little");

  CUTLASS_DEVICE static void run(StreamParams const& params) {
    extern __shared__ unsigned char dynamic_smem[];
    unsigned char* smem = dynamic_smem + ((1024 - (cute::cast_smem_ptr_to_uint(dynamic_smem) & 1023)) & 1023);
    unsigned char* stages = smem;
    unsigned char* slots = stages + params.x.stage_bytes * params.x.stages;
    unsigned char* ring = slots + params.slots * kPieceBytes;
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ring + params.epilogue.ring * kUnitBytes);

    int const thread = threadIdx.x;
    int const warp = cutlass::canonical_warp_idx_sync();

    if (thread == 0) {
      Mainloop::init(shared.mainloop);
      Epilogue::init(shared.epilogue, params);
      TileScheduler::init(shared.scheduler, kScheduleReaders + Epilogue::load_warps(params));
      shared.nan_seen = 0;
      shared.suspect_items.init();
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    if constexpr (kSplit) {
      let_next_kernel_start();  // the sm80 family's, which waits for this one
      wait_for_previous_kernel();
      if (declines(params.split)) return;
    }

    if (warp >= kGroups * 4) {
      cutlass::arch::warpgroup_reg_dealloc<kFeedingRegisters>();
      int const role = warp - kGroups * 4;
      bool const leader = cutlass::canonical_lane_idx() == 0;
      wait_for_previous_kernel();  // prepared weights and x, and the zeroed counter
      if (role == 0 && leader) {
        TileScheduler::Producer scheduler(params.scheduler, shared.scheduler, blockIdx.x, gridDim.x);
        Epilogue::load(params, scheduler, shared.epilogue, ring);
      } else if (role == 1) {
        Mainloop::load_pieces(params, shared.mainloop, shared.scheduler, slots);
      } else if (role == 2) {
        Mainloop::load_x(params, shared.mainloop, shared.scheduler, stages);
      } else if (Epilogue::kPlain && role >= kFeedingWarps - Epilogue::load_warps(params)) {
        Epilogue::load_by_warp(params, shared.scheduler, shared.epilogue, ring, kFeedingWarps - 1 - role,
                               Epilogue::load_warps(params));
      } else if (role >= 3 && role < 3 + Epilogue::kStores && leader && !Epilogue::stores_by_consumers(params)) {
        Epilogue::store(params.epilogue, shared.epilogue, ring, role - 3);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, shared, stages, slots, ring, warp);
    }
  }

  CUTLASS_DEVICE static void consume(StreamParams const& params, SharedStorage& shared, unsigned char* stages,
                                     unsigned char* slots, unsigned char* ring, int warp) {
    EpilogueParams const& e = params.epilogue;
    int const lane = cutlass::canonical_lane_idx();
    int const group = warp / 4;
    using Resident = CollectiveMainloop<T, kChannelsLast>;
    uint64_t const pieces = Resident::descriptor(slots, 8 * 128 / 16, cute::SM90::GMMA::LayoutType::B128);
    // Groups of eight positions along H; from one to the next, a position along W.
    int const step = params.tile_columns / kWidth * params.x.slab_pitch;
    uint64_t const positions =
        Resident::descriptor(stages, static_cast<uint32_t>(step) * (128 / 16), cute::SM90::GMMA::LayoutType::B128);

    TileScheduler::Consumer scheduler{shared.scheduler, {}};
    typename Mainloop::Position at;
    UnitState unit;
    advance(unit, group * 4 + warp % 4, e.ring);

    bool nan_seen = false;

    // The next item, and what its outputs need from memory, looked up where that is waited for least.
    int next_number;
    Item next;
    Beside next_beside;
    auto next_item = [&] {
      next_number = scheduler.fetch();
      if (next_number != TileScheduler::kEnd) next = decode(params, next_number);
    };
    auto look_beside = [&] {
      if (next_number != TileScheduler::kEnd) next_beside = Beside::load(params, next, group, warp, lane);
    };
    next_item();
    if constexpr (kLook != Look::kBehind || kSplit) look_beside();

    while (next_number != TileScheduler::kEnd) {
      int const number = next_number;
      // Worked out again where it would be kept beside the products: registers are scarce.
      Item const item = kLook == Look::kWithProducts ? decode(params, number) : next;
      if constexpr (kLook == Look::kBehind && !kSplit) look_beside();
      Beside const beside = next_beside;
      typename Mainloop::Accumulators acc;
      Mainloop::mma(params, params.cls[item.cls], shared.mainloop, pieces, positions, at, group, lane, acc, [&] {
        if constexpr (kLook == Look::kWithProducts) {
          next_item();
          look_beside();
        }
      });
      if constexpr (kSplit) {
        bool suspect = Mainloop::holds_nan(acc);
        uint32_t const tiny = __reduce_add_sync(0xffffffffu, beside.tiny);
        if (tiny != 0 && Small::spoil(params, item, group, warp, lane, tiny, acc)) suspect = true;
        if (__any_sync(0xffffffffu, suspect) && lane == 0) shared.suspect_items.add(number);
      } else {
        bool const holds_nan = Mainloop::holds_nan(acc);
        nan_seen = nan_seen || holds_nan;
        if (holds_nan) Mainloop::suspect_infinities(acc);
      }
      typename Epilogue::Channels channels = beside.bits.channels();
      if constexpr (kSplit) {
        SplitRoute::Scales const scales{beside.x_exponent, beside.weight_exponent};
        channels.scale[0] = scales.inverse(0);
        Mainloop::multiply_sums(scales.inverse(1), acc);
      } else if constexpr (sizeof(T) == 2) {
        for (int parity = 0; parity < 2; ++parity) channels.scale[parity] = params.cls[item.cls].factor[parity];
      }
      // A warp that stores by itself hands a unit back before it waits for its next one: a ring may be too short for
      // both.
      auto store = [&](UnitState done) {
        if (Epilogue::stores_by_consumers(params)) {
          Epilogue::store_by_consumer(params, shared.epilogue, ring, done, lane);
        }
      };
      Epilogue::template update<0>(params, item, shared.epilogue, ring, unit, warp, lane, channels, acc);
      store(unit);
      if constexpr (kLook == Look::kBetweenUnits) {
        next_item();
        look_beside();
      }
      if constexpr (Epilogue::kUnits == 2) {
        UnitState second = unit;
        advance(second, Epilogue::kUnitStep, e.ring);
        Epilogue::template update<1>(params, item, shared.epilogue, ring, second, warp, lane, channels, acc);
        store(second);
      }
      advance(unit, Epilogue::kTileUnits, e.ring);
      if constexpr (kLook == Look::kBehind) {
        next_item();
        if constexpr (kSplit) look_beside();
      }
    }

    // Cold path, after every store of this CTA has reached memory. Outside x and past the last channel the tensor cores
    // multiply zeros, and inf * 0 is nan.
    if (nan_seen) *static_cast<int32_t volatile*>(&shared.nan_seen) = 1;
    cutlass::arch::NamedBarrier::sync(kGroups * 128, 0);
    bool const any = kSplit ? shared.suspect_items.count() > 0 : *static_cast<int32_t volatile*>(&shared.nan_seen) != 0;
    if (any) {
      if (!Epilogue::stores_by_consumers(params)) shared.epilogue.stored.wait(0);
      asm volatile("fence.proxy.async;" ::: "memory");
      if constexpr (kSplit) {
        // Its memory is that of the weights, which nothing uses by now.
        recompute_suspects<T, kWidth>(params, shared.suspect_items,
                                      {reinterpret_cast<int32_t*>(slots), params.slots * kPieceBytes / 4 - 1});
      } else {
        recompute(params, threadIdx.x);
      }
    }
  }

  /// Whether parts do not hold the operands of this problem. CTA 0 leaves the answer to the sm80 family's launches.
  CUTLASS_DEVICE static bool declines(StreamSplit const& split) {
    SplitState const& found = *split.state;
    bool const declined = __ldcg(&found.bad_weights) != 0 || __ldcg(&found.bad_x) > split.too_many_bad ||
                          __ldcg(&found.tiny_x) > split.too_many_tiny;
    if (blockIdx.x == 0 && threadIdx.x == 0) split.state->declined = declined;
    return declined;
  }

  /// Steps of at most four, since one must not pass the ring.
  CUTLASS_DEVICE static void advance(UnitState& unit, int step, int ring) {
    for (; step > 4; step -= 4) unit.advance(4, ring);
    unit.advance(step, ring);
  }

  /// Every nan among the outputs of this CTA's items, by the definition (cold_path.hpp).
  __device__ __noinline__ static void recompute(StreamParams const& params, int thread) {
    int32_t const volatile* owners = params.scheduler.owners;
    for (int number = 0; number < params.scheduler.runs; ++number) {
      if (owners[number] != 1 + static_cast<int>(blockIdx.x)) continue;
      Item const item = decode(params, number);
      for (int i = thread; i < kItemOutputs<kWidth>; i += kGroups * 128) {
        Place const at = place<kWidth>(params, item, i);
        if (at.inside) recompute_output<T>(params.x, params.epilogue, params.cold, item.n, at.c, at.od, at.oh, at.ow);
      }
    }
  }
};

template <class T, bool kChannelsLast, class Tail, int kWidth>
__global__ void __launch_bounds__(Kernel<T, kChannelsLast, Tail, kWidth>::kThreads, 1)
    kernel(__grid_constant__ StreamParams const params) {
  Kernel<T, kChannelsLast, Tail, kWidth>::run(params);
}

}  // namespace convt3d::sm90::stream
