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
#include <type_traits>
#include <utility>

#include "convt3d/activation.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "sm80/instructions.hpp"
#include "sm90/cold_path.hpp"
#include "sm90/collective_mainloop.hpp"
#include "sm90/product/walk_boxes.hpp"
#include "sm90/tails.hpp"

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

template <class T, class Walk>
struct Kernel {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kDepth = Walk::kDepth, kBoxColumns = Walk::kBoxColumns;
  static constexpr int kInstructions = 4;  // of a step, 32 bytes of channels each
  static constexpr int kRegisters = 64;    // of 64 columns by 128 positions
  static_assert(kColumns / kBoxColumns * kDepth * 128 == kWeightBytes);
  // Products that the tensor core adds up by itself: its cuts stay far within the bound even if all have one sign
  // (docs/numerics.md).
  static constexpr int kSumSteps = 128 / kDepth;
  // Of a thread, by setmaxnreg: three warpgroups' and the loading one's are all that there are.
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
  /// Where a position's first output lies, -1 past the end, and the add of it.
  struct alignas(8) Places {
    int32_t y[kPositions], add[kPositions];
  };
  /// In front of the stages, which begin at a multiple of 1024 bytes for the copy engine: one address tells both.
  struct alignas(1024) Shared {
    Places places[kMostWarpgroups];
    Barrier full[kMostStages];
    cutlass::arch::ClusterBarrier empty[kMostStages];
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

    /// At most so many more.
    CUTLASS_DEVICE void load(ProductParams const& p, Shared& shared, unsigned char* stages, int most) {
      uint32_t const bytes = Walk::x_bytes(p) + static_cast<uint32_t>(p.warpgroups * kWeightBytes);
      while (true) {
        if (!in_tile) {
          if (at.tile() >= p.tiles) return;
          next.begin(p, at.tile());
          in_tile = true;
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

  /// Two neighbouring channels in memory.
  using Pair = std::conditional_t<kWide, float2, uint32_t>;

  CUTLASS_DEVICE static float2 unpack(Pair v) {
    if constexpr (kWide) {
      return v;
    } else {
      return make_float2(Element<T>::from_bits(v & 0xffffu), Element<T>::from_bits(v >> 16));
    }
  }
  CUTLASS_DEVICE static Pair pack(float a, float b) {
    if constexpr (kWide) {
      return make_float2(a, b);
    } else {
      return Element<T>::bits(Element<T>::from_float(a)) | Element<T>::bits(Element<T>::from_float(b)) << 16;
    }
  }

  /// Where a thread's outputs are: of its column pair, at positions 8 i + 2 (lane mod 4) and the one behind it.
  struct Outputs {
    ProductParams const& p;
    Places const& places;
    Column const& column;
    int lane;
    float bias[2];

    CUTLASS_DEVICE Outputs(ProductParams const& p, Places const& places, Column const& column, int lane)
        : p(p), places(places), column(column), lane(lane), bias{} {
      EpilogueParams const& e = p.epilogue;
      if (e.has_bias) {
        T const* const from = static_cast<T const*>(e.bias) + column.channel * e.bias_stride;
        bias[0] = Element<T>::to_float(from[0]);
        bias[1] = Element<T>::to_float(from[e.bias_stride]);
      }
    }
    CUTLASS_DEVICE int2 two(int const* of, int i) const {
      return *reinterpret_cast<int2 const*>(of + i * 8 + lane % 4 * 2);
    }
    /// add of `kCount` eights of positions from number `first` on.
    template <bool kAll, int kCount>
    CUTLASS_DEVICE void load_add(int first, Pair (&v)[2 * kCount]) const {
      if (!p.cold.has_add) return;
      auto const* const add = static_cast<T const*>(p.epilogue.add);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        int2 const at = two(places.add, first + i), to = two(places.y, first + i);
        if (kAll || to.x >= 0) v[2 * i] = *reinterpret_cast<Pair const*>(add + (column.add + at.x));
        if (kAll || to.y >= 0) v[2 * i + 1] = *reinterpret_cast<Pair const*>(add + (column.add + at.y));
      }
    }
    /// Stores these, whose sums are `sums`; what is nan where a sum is not finite goes into `look`.
    template <bool kAll, int kCount, class Activation>
    CUTLASS_DEVICE void store(int first, float const* sums, Pair const (&v)[2 * kCount], Activation const& activation,
                              float& look) const {
      bool const odd = lane / 4 % 2 != 0;
      auto* const y = static_cast<T*>(p.cold.y);
      EpilogueParams const& e = p.epilogue;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kCount; ++i) {
        int2 const places_y = two(places.y, first + i / 2);
        int const to = i % 2 == 0 ? places_y.x : places_y.y;
        float const v0 = sums[i / 2 * 4 + i % 2], v1 = sums[i / 2 * 4 + 2 + i % 2];
        float const other = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 4);
        float a = odd ? other : v0, b = odd ? v1 : other;
        if (kWide) {  // an infinity becomes nan: what rounded to it on the way may have been finite
          a = fmaf(a, 0.f, a);
          b = fmaf(b, 0.f, b);
        }
        look = fmaf(a, 0.f, fmaf(b, 0.f, look));
        float2 const of_add = unpack(v[i]);
        Pair const both = pack(in_order(a + bias[0], of_add.x, e.add_after != 0, activation),
                               in_order(b + bias[1], of_add.y, e.add_after != 0, activation));
        if (kAll || to >= 0) *reinterpret_cast<Pair*>(y + (column.y + to)) = both;
      }
    }
  };

  /// `kAll`: all positions of the tile exist. Returns what is nan where a sum is not finite.
  template <bool kAll>
  CUTLASS_DEVICE static float store(ProductParams const& p, Places const& places, Column const& c, int lane,
                                    Sums& sums) {
    EpilogueParams const& e = p.epilogue;
    Outputs const outputs(p, places, c, lane);
    if (!is_linear(e.activation)) return store_any<kAll>(e, outputs, sums);
    // Eights of positions whose add is on its way together: as many as registers allow.
    constexpr int kBatch = kAll ? (kWide ? 2 : 4) : (kWide ? 1 : 2);
    auto const activation = [&](float t) { return LinearTail::apply(e, t); };
    float look = 0.f;
    Pair add[2][2 * kBatch] = {};  // of a batch, and of the next
    outputs.template load_add<kAll, kBatch>(0, add[0]);
    CUTLASS_PRAGMA_UNROLL
    for (int batch = 0; batch < kRegisters / 4; batch += kBatch) {
      asm volatile("" ::: "memory");  // no batch before its turn: registers are scarce
      if (batch + kBatch < kRegisters / 4) {
        outputs.template load_add<kAll, kBatch>(batch + kBatch, add[(batch / kBatch + 1) % 2]);
      }
      outputs.template store<kAll, kBatch>(batch, sums + batch * 4, add[batch / kBatch % 2], activation, look);
    }
    return look;
  }

  /// In a loop for each activation, for the cache of instructions: it is always the first sums' turn.
  template <bool kAll>
  CUTLASS_DEVICE static float store_any(EpilogueParams const& e, Outputs const& outputs, Sums& sums) {
    constexpr int kBatch = kWide ? 1 : 2;
    float look = 0.f;
    with_activation(e.activation, [&](auto function) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int batch = 0; batch < kRegisters / 4; batch += kBatch) {
        Pair add[2 * kBatch] = {};
        outputs.template load_add<kAll, kBatch>(batch, add);
        outputs.template store<kAll, kBatch>(
            batch, sums, add, [&](float t) { return function(t, e.negative_slope); }, look);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRegisters - 4 * kBatch; ++i) sums[i] = sums[i + 4 * kBatch];
      }
    });
    return look;
  }

  /// Every nan among the outputs of this thread, by the definition (cold_path.hpp).
  __device__ __noinline__ static void recompute(ProductParams const& p, int number, int column, int lane) {
    typename Walk::Tile const of = Walk::tile(p, number);
    int const first = Walk::find_column(p, column).channel;
#pragma unroll 1
    for (int i = 0; i < kPositions / 4; ++i) {
      Place const v = Walk::find_output(p, of, i / 2 * 8 + lane % 4 * 2 + i % 2, column);
      if (v.n < 0) continue;
#pragma unroll 1
      for (int channel = first; channel < first + 2; ++channel) {
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
    for (int i = 0; i < kColumns / kBoxColumns; ++i) {  // 128 bytes at a time
      int const first = column + i * kBoxColumns;
      if (first >= Walk::columns(p)) break;
      T const* const from = static_cast<T const*>(p.epilogue.add) + place.y + Walk::find_column(p, first).add;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }

  /// A warpgroup of consumers: products and outputs of its columns of every tile.
  CUTLASS_DEVICE static void compute_all(ProductParams const& p, Shared& shared, uint32_t first_stage, int warpgroup) {
    Cursor at;
    Places& places = shared.places[warpgroup];
#pragma unroll 1
    for (; at.tile() < p.tiles; ++at.round) {
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // all are done with the last tile's
      typename Walk::Tile const started = Walk::tile(p, at.tile());
      find_places(p, places, started, warpgroup);
      int const steps = Walk::steps(p, started);
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));

      Sums sums = {};
      multiply_tile(p, shared, first_stage, warpgroup, steps, at, sums);
      // Nothing of what follows is worked out before the products: registers are scarce.
      int now = static_cast<int>(threadIdx.x), number = at.tile();
      asm volatile("" : "+r"(now), "+r"(number));
      typename Walk::Tile const of = Walk::tile(p, number);
      int const now_lane = now % 32,
                column = of.column + now / 128 * kColumns + first_column(sizeof(T), now / 32 % 4, now_lane);
      if (column >= Walk::columns(p)) continue;  // the same for a warp: columns come in whole accesses of 128 bytes
      Column const c = Walk::find_column(p, column);
      float const look = Walk::is_whole(p, of) ? store<true>(p, places, c, now_lane, sums)
                                               : store<false>(p, places, c, now_lane, sums);
      if (look != look) recompute(p, number, column, now_lane);
    }
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
      cutlass::arch::fence_barrier_init();
      of_x.load(p, shared, stages, p.stages);
    } else if (thread < computing) {
      Walk::clear_stages(p, stages, stage_bytes(p.warpgroups), computing);
    }
    __syncthreads();
    if (warpgroup < p.warpgroups) {
      cutlass::arch::warpgroup_reg_alloc<kComputingRegisters>();
      compute_all(p, shared, cute::cast_smem_ptr_to_uint(stages), warpgroup);
      return;
    }
    cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
    if (thread == computing) {
      of_x.load(p, shared, stages, INT_MAX);
    } else if (thread == computing + 32) {
      Loader<false>{}.load(p, shared, stages, INT_MAX);
    }
  }
};

/// One warpgroup more than have columns: the last one brings in operands.
template <class T, template <class> class Walk>
__global__ void __launch_bounds__((kMostWarpgroups + 1) * 128, 1) kernel(__grid_constant__ ProductParams const params) {
  Kernel<T, Walk<T>>::run(params);
}

}  // namespace convt3d::sm90::product
