// SPDX-License-Identifier: Apache-2.0
//
// The sm90 kernel: persistent CTAs of four warpgroups. Two consumers (one D parity
// each) multiply and finish the outputs; the third brings x into shared memory; the fourth has one warp that
// schedules and loads (add, weights) and three that store y.
#pragma once

#include <type_traits>

#include "cutlass/arch/reg_reconfig.h"
#include "dependent_launch.hpp"
#include "sm90/any_update.hpp"
#include "sm90/cold_path.hpp"
#include "sm90/collective_epilogue.hpp"
#include "sm90/collective_mainloop.hpp"
#include "sm90/split_route.hpp"

namespace convt3d::sm90 {

template <class T, bool kChannelsLast, class Tail>
struct Kernel {
  using Mainloop = CollectiveMainloop<T, kChannelsLast>;
  using Epilogue = CollectiveEpilogue<T, kChannelsLast, Tail>;
  using Accumulators = typename Mainloop::Accumulators;

  // Registers of a thread, 65536 in all: 16-bit types have twice the accumulators and half the bytes of x, SplitFloat
  // twice the accumulators and all the bytes, as float has in NCDHW. Found by compiling: the nearest multiples of eight
  // without spills in any role.
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  static constexpr int kThreads = (kGroups + 2) * 128;
  static constexpr int kConsumerRegisters = kSplit           ? 168
                                            : sizeof(T) == 4 ? (kChannelsLast ? 136 : 160)
                                            : Tail::kAny     ? 184
                                                             : (kChannelsLast ? 176 : 168);
  static constexpr int kIoRegisters = std::is_same_v<T, float> && kChannelsLast ? 48 : 32;
  static constexpr int kLoaderRegisters = 512 - kGroups * kConsumerRegisters - kIoRegisters;
  static_assert(128 * (kGroups * kConsumerRegisters + kLoaderRegisters + kIoRegisters) <= 65536);

  struct SharedStorage {
    typename Mainloop::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
    TileScheduler::SharedStorage scheduler;
    int32_t suspect;  // this CTA met values of x that may make sums non-finite
    SuspectList suspect_planes;
    SplitRoute::SharedStorage route;
    float bias[kSplit ? class_channels(4) : 1];  // of the class; in ieee mode alone
    OperandScale<T> x_scale;
    ResultScale<T> result_scale;
  };

  static_assert(sizeof(SharedStorage) <= kBarrierBytes, "config.hpp reserves too little");

  CUTLASS_DEVICE static void run(KernelParams const& params) {
    extern __shared__ unsigned char dynamic_smem[];
    // Tiles first, since they want 1024-byte alignment: weights, x stages, ring, then the barriers.
    unsigned char* smem = dynamic_smem + ((1024 - (cute::cast_smem_ptr_to_uint(dynamic_smem) & 1023)) & 1023);
    unsigned char* weights = smem;
    unsigned char* stages = weights + params.mainloop.weight_bytes;
    int const stage_bytes = params.mainloop.stage_bytes * params.mainloop.stages;
    unsigned char* ring = stages + stage_bytes;
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ring + params.epilogue.ring * kUnitBytes);

    int const thread = threadIdx.x;
    int const warp = cutlass::canonical_warp_idx_sync();
    int const cls = static_cast<int>(blockIdx.x) % params.scheduler.classes;

    if (thread == 0) {
      Mainloop::init(shared.mainloop);
      Epilogue::init(shared.epilogue);
      TileScheduler::init(shared.scheduler);
      shared.suspect = 0;
      shared.suspect_planes.init();
      cutlass::arch::fence_barrier_init();
    }
    // Slab rows and channels that no loader writes must multiply as zeros.
    for (int i = thread * 16; i < stage_bytes; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(stages + i) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    __syncthreads();

    if constexpr (kSplit) {
      let_next_kernel_start();  // the sm80 family's, which waits for this one
      wait_for_previous_kernel();
      SplitRoute::Scales scales;
      if (!SplitRoute::decide<kThreads>(params.split, shared.route, cls, thread, scales)) return;
      EpilogueParams const& e = params.epilogue;
      if (int const channel = cls * class_channels(4) + thread; thread < class_channels(4)) {
        shared.bias[thread] =
            e.has_bias && channel < e.out_channels ? Epilogue::value(e.bias, channel * e.bias_stride) : 0.f;
      }
      if (thread == 0) {
        shared.x_scale = {scales.x_factor(), 2 * smallest_split(scales.x)};
        shared.result_scale = {{scales.inverse(0), scales.inverse(1)}, scales.floor, params.split.products};
      }
      __syncthreads();
    }

    if (warp >= kGroups * 4 + kLoaderWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kIoRegisters>();
      int const role = warp - kGroups * 4 - kLoaderWarps;
      if (cutlass::canonical_lane_idx() == 0) {
        if (role == 0) {
          wait_for_previous_kernel();  // prepared weights and zeroed counters
          Mainloop::load_weights(params.mainloop, shared.mainloop, weights, cls);
          TileScheduler::Producer scheduler(params.scheduler, shared.scheduler, blockIdx.x, gridDim.x);
          Epilogue::load(params.epilogue, params.scheduler, cls, scheduler, shared.epilogue, ring);
        } else {
          Epilogue::store(params.epilogue, shared.epilogue, ring, role - 1);
        }
      }
    } else if (warp >= kGroups * 4) {
      // Each of the two instructions goes one way only.
      if constexpr (kLoaderRegisters < 65536 / kThreads) {
        cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
      } else {
        cutlass::arch::warpgroup_reg_alloc<kLoaderRegisters>();
      }
      auto flag = [&] { *static_cast<int32_t volatile*>(&shared.suspect) = 1; };
      Mainloop::Loader::load(params.mainloop, params.scheduler, shared.mainloop.full, shared.mainloop.empty,
                             shared.mainloop.tiny, shared.scheduler, stages, shared.x_scale, thread - kGroups * 128,
                             flag);
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) shared.epilogue.stored.arrive();
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, shared, weights, stages, ring, cls, warp);
    }
  }

  CUTLASS_DEVICE static void consume(KernelParams const& params, SharedStorage& shared, unsigned char* weights,
                                     unsigned char* stages, unsigned char* ring, int cls, int warp) {
    MainloopParams const& m = params.mainloop;
    EpilogueParams const& e = params.epilogue;
    int const lane = cutlass::canonical_lane_idx();
    int const group = warp / 4;
    DeviceProgram const& program = m.program[group];

    float bias[Epilogue::kChannels];
    auto load_bias = [&] {
      int const first_channel = Epilogue::first_channel(cls, warp, lane);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Epilogue::kChannels; ++i) {
        int const channel = first_channel + i * Epilogue::kChannelStep;
        if constexpr (kSplit) {
          bias[i] = *static_cast<float const volatile*>(&shared.bias[channel - cls * class_channels(4)]);
        } else {
          bias[i] = e.has_bias && channel < e.out_channels ? Epilogue::value(e.bias, channel * e.bias_stride) : 0.f;
        }
      }
    };
    if (!kSplit) load_bias();

    uint64_t const weight_base = Mainloop::weights_descriptor(weights + program.first_byte);
    uint64_t const x_base = Mainloop::positions_descriptor(m, stages);

    TileScheduler::Consumer scheduler{shared.scheduler, {}};
    RingState stage;
    UnitState unit;
    unit.advance(group * kUnitsPerGroup, e.ring);
    unit.advance(warp % 4, e.ring);
    shared.mainloop.weights.wait(0);

    for (;;) {
      int const number = scheduler.fetch();
      if (number == TileScheduler::kEnd) break;
      TileScheduler::Run const run = TileScheduler::decode(params.scheduler, number);
      typename Epilogue::FlatAdd flat;
      if (!kSplit) flat = Epilogue::flat_add(e, params.scheduler.classes, run.n);
      for (int tile = 0; tile < run.length; ++tile) {
        Accumulators acc;
        bool const keep = m.keep != 0 && tile + 1 < run.length;
        uint32_t tiny = 0;
        RingState const next =
            Mainloop::mma(m, program, shared.mainloop, weight_base, x_base, stage, keep, lane, acc, tiny);
        if constexpr (kSplit) {
          tiny = __shfl_sync(0xffffffffu, tiny, 0);
          bool const nan = shared.result_scale.check(acc, tiny);
          if (__any_sync(0xffffffffu, nan) && lane == 0) {
            shared.suspect_planes.add(RunPlane::number(params.scheduler, number, kGroups * tile + group));
          }
          // Not before the products, where registers are scarcest.
          load_bias();
          flat = Epilogue::flat_add(e, params.scheduler.classes, run.n);
        }
        if constexpr (kSplit) {
          float const factor = shared.result_scale.factor();
          float const factors[4] = {factor, factor, factor, factor};
          Epilogue::update(e, shared.epilogue, ring, unit, lane, bias, factors, flat, acc);
        } else if constexpr (kGivesBack<T, kChannelsLast>) {
          bool const exact = are_short(acc);
          float factors[4];
          for (int parity = 0; parity < 4; ++parity) factors[parity] = exact ? 1.0f : program.factor[parity];
          Epilogue::update(e, shared.epilogue, ring, unit, lane, bias, factors, flat, acc);
        } else {
          Epilogue::update(e, shared.epilogue, ring, unit, lane, bias, program.factor, flat, acc);
        }
        Mainloop::release_rest(m, program, shared.mainloop, stage, keep, lane);
        stage = next;
        for (int i = 0; i < kGroups; ++i) unit.advance(kUnitsPerGroup, e.ring);  // a step must not pass the ring
      }
    }

    // Cold path, after every store of this CTA has reached memory.
    if constexpr (kSplit) {
      shared.epilogue.stored.wait(0);
      if (shared.suspect_planes.count() > 0) {
        asm volatile("fence.proxy.async;" ::: "memory");
        recompute_listed<T>(params, shared.suspect_planes, cls);
      }
    } else {
      // All at once and before the wait: one after the other they took 17 us, longer than a small problem.
      int32_t suspect = 0;
#pragma unroll 4
      for (int i = lane; i < params.cold.weight_suspects; i += 32) suspect |= __ldcg(params.cold.weight_suspect + i);
      shared.epilogue.stored.wait(0);
      suspect |= *static_cast<int32_t volatile*>(&shared.suspect);
      if (__any_sync(0xffffffffu, suspect != 0)) {
        asm volatile("fence.proxy.async;" ::: "memory");
        recompute<T>(params, cls);
      }
    }
  }
};

template <class T, bool kChannelsLast, class Tail>
__global__ void __launch_bounds__((kGroups + 2) * 128, 1) kernel(__grid_constant__ KernelParams const params) {
  Kernel<T, kChannelsLast, Tail>::run(params);
}

}  // namespace convt3d::sm90
