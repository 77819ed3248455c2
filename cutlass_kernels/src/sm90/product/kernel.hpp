// SPDX-License-Identifier: Apache-2.0
//
// The product kernel: for few, wide voxels, where the streaming kernel's boxes of positions are half empty and its
// pre-kernel takes as long as the products. One to three warpgroups share the positions of a thread block, each with
// 64 columns of the weight; two threads of another one ask the copy engine for both as they lie, one step of input
// channels at a time; it rounds fp32 to TF32. The sums go straight to y. What a tile is, and what its steps are, is
// its walk's (walk_rows.hpp, walk_boxes.hpp).
//
// The weight is wgmma's A. Its k dimension is outermost in memory: 16-bit types are transposed by the tensor core, TF32
// by threads, which read their words of A from shared memory.
#pragma once

#include <climits>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "sm80/instructions.hpp"
#include "sm90/product/cluster.hpp"
#include "sm90/product/outputs.hpp"

namespace convt3d::sm90::product {

namespace atom {
using cute::SM90::GMMA::Major;
template <class T>
struct Of;
template <>
struct Of<float> : cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_RS_TN<> {};
template <>
struct Of<__half> : cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::MN, Major::K> {};
template <>
struct Of<__nv_bfloat16> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<Major::MN, Major::K> {};
}  // namespace atom

/// Thread blocks in a cluster of `kBlocks` have one tile; `kApart`: channels are not neighbours in y and add.
template <class T, class Walk, int kBlocks, bool kApart>
struct Kernel {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kDepth = Walk::kDepth, kBoxColumns = Walk::kBoxColumns;
  static constexpr int kInstructions = 4;  // of a step, 32 bytes of channels each
  static constexpr int kRegisters = 64;    // of 64 columns by 128 positions
  static_assert(kColumns / kBoxColumns * kDepth * 128 == kWeightBytes);
  // Products that the tensor core adds up by itself: its cuts stay far within the bound even if all have one sign
  // (docs/numerics.md).
  static constexpr int kSumSteps = 128 / kDepth;
  // Of a thread, by setmaxnreg: three warpgroups' and the loading one's are all that there are. Of a single one, in a
  // cluster, all threads have what they want.
  static constexpr int kLoadingRegisters = 32, kComputingRegisters = 160;
  static_assert(kLoadingRegisters + kMostWarpgroups * kComputingRegisters == 65536 / 128);
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  using Sums = float[kRegisters];

  /// What a thread block computes, tile by tile. Tiles are handed out forwards and backwards in turn: the last ones are
  /// the shortest, and go to those that had the longest first.
  struct Cursor {
    int round = 0;
    uint32_t stage = 0;  // slot and, from kPhase on, phase: one word, for registers are scarce

    static constexpr uint32_t kPhase = 8;
    static_assert(kMostStages <= kPhase);
    CUTLASS_DEVICE int tile() const {
      if constexpr (kBlocks > 1) return round == 0 ? Cluster<kBlocks>::tile() : INT_MAX;
      auto const blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
      return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    }
    CUTLASS_DEVICE uint32_t slot() const { return stage % kPhase; }
    CUTLASS_DEVICE uint32_t phase() const { return stage / kPhase; }
    CUTLASS_DEVICE void advance(int stages) {
      bool const last = slot() + 1 == static_cast<uint32_t>(stages);
      stage = last ? (stage & kPhase) ^ kPhase : stage + 1;
    }
  };
  /// In front of the stages, which begin at a multiple of 1024 bytes for the copy engine: one address tells both.
  struct alignas(1024) Shared {
    Places places[kMostWarpgroups];
    Barrier full[kMostStages];
    cutlass::arch::ClusterBarrier empty[kMostStages];
    Barrier received;  // a cluster's sums
  };
  static constexpr int kSharedBytes = product::kSharedBytes + static_cast<int>(sizeof(Shared)) + 1024;

  CUTLASS_DEVICE static void fence(Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) cute::warpgroup_fence_operand(sums[i]);
  }

  // ---- the copy engine -------------------------------------------------------------------------------------------

  /// Brings in x of every step of every tile, one after the other, or the weight of all warpgroups: a thread for each,
  /// since what one of them has to do for a step takes as long as the tensor cores.
  template <bool kOfX>
  struct Loader {
    Cursor at;
    typename Walk::Ahead next;
    bool in_tile = false;
    int left = 0;  // of the steps of a block in a cluster

    /// At most so many more.
    CUTLASS_DEVICE void load(ProductParams const& p, Shared& shared, unsigned char* stages, int most) {
      uint32_t const bytes = Walk::x_bytes(p) + static_cast<uint32_t>(p.warpgroups * kWeightBytes);
      while (true) {
        if (!in_tile) {
          if (at.tile() >= p.tiles) return;
          next.begin(p, at.tile());
          in_tile = true;
          if constexpr (kBlocks > 1) {
            int const steps = Walk::steps(p, next.at),
                      first = Cluster<kBlocks>::first_step(steps, Cluster<kBlocks>::rank());
            left = Cluster<kBlocks>::first_step(steps, Cluster<kBlocks>::rank() + 1) - first;
            next.skip(p, first);
            in_tile = left > 0;
          }
        }
#pragma unroll 1
        while (in_tile) {
          if (most-- == 0) return;
          uint32_t const slot = at.slot();
          unsigned char* const stage = stages + slot * static_cast<uint32_t>(stage_bytes(p.warpgroups));
          auto* const full = reinterpret_cast<uint64_t*>(&shared.full[slot]);
          shared.empty[slot].wait(at.phase() ^ 1);
          if constexpr (kOfX) {
            shared.full[slot].arrive_and_expect_tx(bytes);
            next.load_x(p, full, stage);
          } else {
            next.load_weight(p, full, stage + kXBytes);
          }
          at.advance(p.stages);
          in_tile = next.next(p);
          if constexpr (kBlocks > 1) in_tile = --left > 0;
        }
        ++at.round;
      }
    }
  };

  // ---- products ----------------------------------------------------------------------------------------------------

  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint32_t const (&a)[4], uint64_t b, Sums& sums, bool accumulate,
                                 std::index_sequence<I...>) {
    atom::Of<T>::fma(a[0], a[1], a[2], a[3], b, sums[I]...,
                     accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, Sums& sums, bool accumulate, std::index_sequence<I...>) {
    atom::Of<T>::fma(a, b, sums[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// Where a warpgroup's weights begin in a stage, in TF32 this thread's words of A. Worked out anew at each step,
  /// behind the compiler's back: registers are scarce.
  CUTLASS_DEVICE static uint32_t find_weights(int warpgroup) {
    auto const of_warpgroup = static_cast<uint32_t>(kXBytes + warpgroup * kWeightBytes);
    if constexpr (!kWide) return of_warpgroup;
    auto thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));
    return of_warpgroup + first_word(thread / 32 % 4, thread % 32);
  }

  /// TF32's words of A: this thread's rows of all k of a step, as wgmma wants them.
  CUTLASS_DEVICE static void load_weights(uint32_t (&a)[kInstructions][4], uint32_t first) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kInstructions; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int word = 0; word < 4; ++word) {
        a[i][word] = sm80::load_word(next_word(first, i, word));
      }
    }
  }

  CUTLASS_DEVICE static uint64_t descriptor(uint32_t address) {
    cute::GmmaDescriptor desc;
    desc.desc_ = 0;
    desc.bitfield.start_address_ = static_cast<uint16_t>(address >> 4);
    desc.bitfield.leading_byte_offset_ = 1;
    desc.bitfield.stride_byte_offset_ = 8 * 128 / 16;  // of eight positions, or of eight k of the weight
    desc.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    return desc.desc_;
  }

  /// Enqueues a step into `part`, which starts anew where `first`.
  CUTLASS_DEVICE static void multiply(uint32_t stage, uint32_t weights, Sums& part, bool first) {
    constexpr auto kAll = std::make_index_sequence<kRegisters>{};
    uint64_t const x = descriptor(stage);
    [[maybe_unused]] uint32_t a[kInstructions][4];
    if constexpr (kWide) load_weights(a, stage + weights);
    fence(part);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kInstructions; ++i) {
      if constexpr (kWide) {
        fma(a[i], x + i * 2, part, !first || i > 0, kAll);
      } else {
        fma(descriptor(stage + weights) + i * (16 * 128 / 16), x + i * 2, part, !first || i > 0, kAll);
      }
    }
    cute::warpgroup_commit_batch();
    if constexpr (kWide) cute::warpgroup_wait<0>();  // the weights are in registers that the next step wants
    fence(part);
  }

  /// All steps of a tile: a warpgroup's 64 columns by 128 positions.
  CUTLASS_DEVICE static void multiply_tile(ProductParams const& p, Shared& shared, uint32_t first_stage, int warpgroup,
                                           int steps, Cursor& at, Sums& sums) {
    auto const release = [&](uint32_t slot) {
      if (threadIdx.x % 32 == 0) shared.empty[slot].arrive();
    };
    Sums part = {};  // so that it is nothing while there are outputs
#pragma unroll 1
    for (; steps > 0; steps -= kSumSteps) {
      [[maybe_unused]] uint32_t last = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSumSteps; ++i) {
        if (i >= steps) break;
        uint32_t const slot = at.slot(), weights = find_weights(warpgroup);
        shared.full[slot].wait(at.phase());
        multiply(first_stage + slot * static_cast<uint32_t>(stage_bytes(p.warpgroups)), weights, part, i == 0);
        if constexpr (kWide) {
          release(slot);
        } else if (i > 0) {
          cute::warpgroup_wait<1>();
          release(last);
        }
        last = slot;
        at.advance(p.stages);
      }
      if constexpr (!kWide) {
        cute::warpgroup_wait<0>();
        fence(part);
        release(last);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRegisters; ++i) sums[i] += part[i];
    }
  }

  // ---- outputs -----------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE static Column find_column(ProductParams const& p, int column) {
    Column c = Walk::find_column(p, column);
    if constexpr (kApart) {
      c.y += c.channel * (p.y_step[1] - 1);
      c.add += c.channel * (p.add_step[1] - 1);
    }
    return c;
  }

  /// Every nan among the outputs of this thread, by the definition (cold_path.hpp).
  __device__ __noinline__ static void recompute(ProductParams const& p, int number, int column, int lane, int begin) {
    typename Walk::Tile const of = Walk::tile(p, number);
    int const first = Walk::find_column(p, column).channel;
    int const end = kApart ? min(first + 2, p.channels) : first + 2;
#pragma unroll 1
    for (int i = begin * 2; i < begin * 2 + kPositions / 4 / kBlocks; ++i) {
      Place const v = Walk::find_output(p, of, i / 2 * 8 + lane % 4 * 2 + i % 2, column);
      if (v.n < 0) continue;
#pragma unroll 1
      for (int channel = first; channel < end; ++channel) {
        recompute_output<T>(p.mainloop, p.epilogue, p.cold, v.n, channel, v.at[0], v.at[1], v.at[2]);
      }
    }
  }

  // ---- the kernel --------------------------------------------------------------------------------------------------

  /// A warpgroup: where the positions of a tile lie, and the tail's reads into the L2 cache while there are products.
  CUTLASS_DEVICE static void find_places(ProductParams const& p, Places& places, typename Walk::Tile const& of,
                                         int warpgroup) {
    int const column = of.column + warpgroup * kColumns, thread = static_cast<int>(threadIdx.x) % kPositions;
    int2 const place = Walk::find_place(p, of, thread);
    places.y[thread] = place.x;
    places.add[thread] = place.y;
    if (!p.cold.has_add || place.x < 0) return;
    auto const* const add = static_cast<T const*>(p.epilogue.add) + place.y;
    if constexpr (kApart) {  // eight threads have eight positions, which often are neighbours
      for (int i = thread % 8; i < kColumns; i += 8) {
        if (column + i >= p.channels) break;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(add + find_column(p, column + i).add));
      }
    } else {
      for (int i = 0; i < kColumns / kBoxColumns; ++i) {  // 128 bytes at a time
        int const first = column + i * kBoxColumns;
        if (first >= Walk::columns(p)) break;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(add + find_column(p, first).add));
      }
    }
  }

  /// A warpgroup of consumers: products and outputs of its columns of every tile. `room` is for a cluster's sums.
  CUTLASS_DEVICE static void compute_all(ProductParams const& p, Shared& shared, uint32_t first_stage, int warpgroup,
                                         unsigned char* room) {
    Cursor at;
    Places& places = shared.places[warpgroup];
#pragma unroll 1
    for (; at.tile() < p.tiles; ++at.round) {
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // all are done with the last tile's
      typename Walk::Tile const started = Walk::tile(p, at.tile());
      find_places(p, places, started, warpgroup);
      int steps = Walk::steps(p, started);
      if constexpr (kBlocks > 1) {
        int const rank = Cluster<kBlocks>::rank();
        steps = Cluster<kBlocks>::first_step(steps, rank + 1) - Cluster<kBlocks>::first_step(steps, rank);
      }
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));

      Sums sums = {};
      multiply_tile(p, shared, first_stage, warpgroup, steps, at, sums);
      if constexpr (kBlocks > 1) {
        float own[Cluster<kBlocks>::kOwn];
        Cluster<kBlocks>::exchange(sums, own, room, shared.received);
        put_out(p, places, at.tile(), Cluster<kBlocks>::rank() * (Cluster<kBlocks>::kOwn / 4), own);
      } else {
        put_out(p, places, at.tile(), 0, sums);
      }
    }
  }

  /// Outputs of a thread's sums, which are of eights of positions from number `begin` on.
  template <int kCount>
  CUTLASS_DEVICE static void put_out(ProductParams const& p, Places const& places, int tile, int begin,
                                     float (&sums)[kCount]) {
    // Nothing of what follows is worked out before the products: registers are scarce.
    int now = static_cast<int>(threadIdx.x), number = tile;
    asm volatile("" : "+r"(now), "+r"(number));
    typename Walk::Tile const of = Walk::tile(p, number);
    int const lane = now % 32, column = of.column + now / 128 * kColumns + first_column(sizeof(T), now / 32 % 4, lane);
    if (column >= Walk::columns(p)) return;  // the same for a warp: columns come in whole accesses of 128 bytes
    // All lanes go on: they exchange sums.
    int const there = kApart ? min(p.channels - column, 2) : 2;
    Column const c = find_column(p, kApart ? min(column, p.channels - 1) : column);
    float const look = Walk::is_whole(p, of)
                           ? Outlet<T, kApart>::template store<true, kCount>(p, places, c, there, lane, begin, sums)
                           : Outlet<T, kApart>::template store<false, kCount>(p, places, c, there, lane, begin, sums);
    if (there > 0 && look != look) recompute(p, number, column, lane, begin);
  }

  CUTLASS_DEVICE static void run(ProductParams const& p) {
    extern __shared__ unsigned char dynamic_smem[];
    unsigned char* const base = dynamic_smem + ((1024 - (cute::cast_smem_ptr_to_uint(dynamic_smem) & 1023)) & 1023);
    Shared& shared = *reinterpret_cast<Shared*>(base);
    unsigned char* const stages = base + sizeof(Shared);
    int const warpgroup = cutlass::canonical_warp_group_idx();

    int const computing = p.warpgroups * 128, thread = static_cast<int>(threadIdx.x);
    Loader<true> of_x;
    if (thread == computing) {
      for (int slot = 0; slot < p.stages; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(static_cast<uint32_t>(p.warpgroups * 4));
      }
      if constexpr (kBlocks > 1) Cluster<kBlocks>::init(shared.received);
      cutlass::arch::fence_barrier_init();
      of_x.load(p, shared, stages, p.stages);
    } else if (thread < computing) {
      Walk::clear_stages(p, stages, stage_bytes(p.warpgroups), computing);
    }
    if constexpr (kBlocks > 1) {
      __syncwarp();
      cute::cluster_sync();
    } else {
      __syncthreads();
    }
    if (warpgroup < p.warpgroups) {
      if constexpr (kBlocks == 1) cutlass::arch::warpgroup_reg_alloc<kComputingRegisters>();
      compute_all(p, shared, cute::cast_smem_ptr_to_uint(stages), warpgroup,
                  stages + p.stages * stage_bytes(p.warpgroups));
      return;
    }
    if constexpr (kBlocks == 1) cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
    if (thread == computing) {
      of_x.load(p, shared, stages, INT_MAX);
    } else if (thread == computing + 32) {
      Loader<false>{}.load(p, shared, stages, INT_MAX);
    }
  }
};

/// One warpgroup more than have columns: the last one brings in operands.
template <class T, template <class> class Walk, int kBlocks, bool kApart>
__global__ void __launch_bounds__((kBlocks > 1 ? 2 : kMostWarpgroups + 1) * 128, 1)
    kernel(__grid_constant__ ProductParams const params) {
  Kernel<T, Walk<T>, kBlocks, kApart>::run(params);
}

}  // namespace convt3d::sm90::product
