// SPDX-License-Identifier: Apache-2.0
//
// The product kernel: for few, wide voxels, where the streaming kernel's boxes of positions are half empty and its
// pre-kernel takes as long as the products. One to three warpgroups share the positions of a thread block, each with
// 64 columns of the weight; the copy engine brings in both as they lie, one step of input channels at a time, and
// rounds fp32 to TF32. The sums go straight to y.
//
// The weight is wgmma's A. Its k dimension is outermost in memory: 16-bit types are transposed by the tensor core, TF32
// by threads, which read their words of A from shared memory.
#pragma once

#include <type_traits>
#include <utility>

#include "convt3d/activation.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "sm80/instructions.hpp"
#include "sm90/cold_path.hpp"
#include "sm90/collective_mainloop.hpp"
#include "sm90/product/geometry.hpp"
#include "sm90/product/params.hpp"
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

template <class T>
struct Kernel {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kDepth = kStepBytes / static_cast<int>(sizeof(T));  // input channels of a step
  static constexpr int kInstructions = 4;                                  // of a step, 32 bytes of channels each
  static constexpr int kRegisters = 64;                                    // of 64 columns by 128 positions
  static constexpr int kBoxColumns = 128 / static_cast<int>(sizeof(T));    // 128 bytes of the weight
  static_assert(kColumns / kBoxColumns * kDepth * 128 == kWeightBytes);
  // Products that the tensor core adds up by itself: its cuts stay far within the bound even if all have one sign
  // (docs/numerics.md).
  static constexpr int kSumSteps = 128 / kDepth;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  using Sums = float[kRegisters];

  /// What a thread block computes, tile by tile: the next step to bring in, or to multiply.
  struct Cursor {
    int tile, step, slot;
    uint32_t phase;

    CUTLASS_DEVICE void advance_slot(int stages) {
      if (++slot == stages) {
        slot = 0;
        phase ^= 1;
      }
    }
  };
  /// Where a position's first output lies, -1 past the end, and the add of it.
  struct alignas(8) Places {
    int32_t y[kPositions], add[kPositions];
  };
  struct Shared {
    Places places[kMostWarpgroups];
    Cursor ahead;  // of the thread that brings steps in: registers are scarce
    Barrier full[kMostStages];
    cutlass::arch::ClusterBarrier empty[kMostStages];
  };
  static constexpr int kSharedBytes = product::kSharedBytes + static_cast<int>(sizeof(Shared)) + 1024;

  CUTLASS_DEVICE static void fence(Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) cute::warpgroup_fence_operand(sums[i]);
  }

  // ---- the copy engine -------------------------------------------------------------------------------------------

  /// One thread: brings in a step, with the weight of all warpgroups in one box.
  CUTLASS_DEVICE static void load(ProductParams const& p, Shared& shared, unsigned char* stages, int step, int slot,
                                  int position, int column) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    unsigned char* const stage = stages + slot * stage_bytes(p.warpgroups);
    auto* const barrier = reinterpret_cast<uint64_t*>(&shared.full[slot]);
    shared.full[slot].arrive_and_expect_tx(static_cast<uint32_t>(stage_bytes(p.warpgroups)));
    cute::SM90_TMA_LOAD_2D::copy(&p.x_map, barrier, kHint, stage, step * kDepth, position);
    cute::SM90_TMA_LOAD_3D::copy(&p.weight_map, barrier, kHint, stage + kXBytes, 0, step * kDepth,
                                 column / kBoxColumns);
  }

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

  /// TF32's words of A: this thread's rows of all k of a step, as wgmma wants them.
  CUTLASS_DEVICE static void load_weights(uint32_t (&a)[kInstructions][4], uint32_t weights, int warp, int lane) {
    uint32_t const first = weights + first_word(warp, lane);
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

  /// A step into `part`, which starts anew where `first`; `meanwhile()` runs beside the tensor cores.
  template <class Meanwhile>
  CUTLASS_DEVICE static void multiply(uint32_t stage, int warpgroup, int warp, int lane, Sums& part, bool first,
                                      Meanwhile&& meanwhile) {
    constexpr auto kAll = std::make_index_sequence<kRegisters>{};
    uint64_t const x = descriptor(stage);
    uint32_t const weights = stage + static_cast<uint32_t>(kXBytes + warpgroup * kWeightBytes);
    [[maybe_unused]] uint32_t a[kInstructions][4];
    if constexpr (kWide) load_weights(a, weights, warp, lane);
    fence(part);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kInstructions; ++i) {
      if constexpr (kWide) {
        fma(a[i], x + i * 2, part, !first || i > 0, kAll);
      } else {
        fma(descriptor(weights) + i * (16 * 128 / 16), x + i * 2, part, !first || i > 0, kAll);
      }
    }
    cute::warpgroup_commit_batch();
    meanwhile();
    cute::warpgroup_wait<0>();
    fence(part);
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

  /// A column's tap and channel, and where they lie beside a position's first output.
  struct Column {
    int tap[3], channel;
    int32_t y, add;
  };
  CUTLASS_DEVICE static Column find_column(ProductParams const& p, int column) {
    Column c;
    int tap;
    p.divide_channels(tap, c.channel, column);
    p.divide_kernel_w(tap, c.tap[2], tap);
    p.divide_kernel_h(c.tap[0], c.tap[1], tap);
    c.y = c.channel;
    c.add = c.channel;
    for (int axis = 0; axis < 3; ++axis) {
      c.y += c.tap[axis] * p.y_tap[axis];
      c.add += c.tap[axis] * p.add_tap[axis];
    }
    return c;
  }

  struct Position {
    int n, at[3];
  };
  CUTLASS_DEVICE static Position find_position(ProductParams const& p, int position) {
    Position v;
    p.divide_w(v.n, v.at[2], position);
    p.divide_h(v.n, v.at[1], v.n);
    p.divide_d(v.n, v.at[0], v.n);
    return v;
  }
  CUTLASS_DEVICE static int offset(int32_t const (&step)[5], Position const& v) {
    return v.n * step[0] + v.at[0] * step[2] + v.at[1] * step[3] + v.at[2] * step[4];
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
  __device__ __noinline__ static void recompute(ProductParams const& p, int position_begin, int column, int lane) {
    Column const c = find_column(p, column);
#pragma unroll 1
    for (int i = 0; i < kPositions / 4; ++i) {
      int const position = position_begin + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (position >= p.positions) return;
      Position const v = find_position(p, position);
      int out[3];
      for (int axis = 0; axis < 3; ++axis) out[axis] = v.at[axis] * p.cold.stride[axis] + c.tap[axis];
#pragma unroll 1
      for (int channel = c.channel; channel < c.channel + 2; ++channel) {
        recompute_output<T>(p.mainloop, p.epilogue, p.cold, v.n, channel, out[0], out[1], out[2]);
      }
    }
  }

  // ---- the kernel --------------------------------------------------------------------------------------------------

  struct Tile {
    int position, column;  // the first
  };
  CUTLASS_DEVICE static Tile tile(ProductParams const& p, int number) {
    int position, column;
    p.position_tiles(column, position, number);
    return {position * kPositions, column * p.warpgroups * kColumns};
  }

  CUTLASS_DEVICE static void load_next(ProductParams const& p, Shared& shared, unsigned char* stages, Cursor& at) {
    Tile const of = tile(p, at.tile);
    load(p, shared, stages, at.step, at.slot, of.position, of.column);
    at.advance_slot(p.stages);
    if (++at.step == p.steps) {
      at.step = 0;
      at.tile += static_cast<int>(gridDim.x);
    }
  }

  /// A warpgroup: where the positions of a tile lie, and the tail's reads into the L2 cache while there are products.
  CUTLASS_DEVICE static void find_places(ProductParams const& p, Places& places, int number, int warpgroup) {
    Tile const of = tile(p, number);
    int const column = of.column + warpgroup * kColumns;
    int const thread = static_cast<int>(threadIdx.x) % kPositions, position = of.position + thread;
    Position const v = find_position(p, min(position, p.positions - 1));
    places.y[thread] = position < p.positions ? offset(p.y_step, v) : -1;
    places.add[thread] = offset(p.add_step, v);
    if (!p.cold.has_add || position >= p.positions) return;
    for (int i = 0; i < kColumns / kBoxColumns; ++i) {  // 128 bytes at a time
      int const first = column + i * kBoxColumns;
      if (first >= p.columns) break;
      T const* const from = static_cast<T const*>(p.epilogue.add) + places.add[thread] + find_column(p, first).add;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }

  CUTLASS_DEVICE static void run(ProductParams const& p) {
    extern __shared__ unsigned char dynamic_smem[];
    unsigned char* const stages = dynamic_smem + ((1024 - (cute::cast_smem_ptr_to_uint(dynamic_smem) & 1023)) & 1023);
    uint32_t const first_stage = cute::cast_smem_ptr_to_uint(stages);
    Shared& shared = *reinterpret_cast<Shared*>(stages + p.stages * stage_bytes(p.warpgroups));
    int const thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    int const warpgroup = cutlass::canonical_warp_group_idx(), warp = thread / 32 % 4;
    Cursor at{static_cast<int>(blockIdx.x), 0, 0, 0};

    if (thread == 0) {
      for (int slot = 0; slot < p.stages; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(static_cast<uint32_t>(p.warpgroups * 4));
      }
      cutlass::arch::fence_barrier_init();
      Cursor ahead = at;
      for (int i = 0; i < p.stages && ahead.tile < p.tiles; ++i) load_next(p, shared, stages, ahead);
      shared.ahead = ahead;
    }
    __syncthreads();

    Places& places = shared.places[warpgroup];
#pragma unroll 1
    for (; at.tile < p.tiles; at.tile += static_cast<int>(gridDim.x)) {
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // all are done with the last tile's
      find_places(p, places, at.tile, warpgroup);
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));

      Sums sums = {}, part;
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        shared.full[at.slot].wait(at.phase);
        multiply(first_stage + static_cast<uint32_t>(at.slot * stage_bytes(p.warpgroups)), warpgroup, warp, lane, part,
                 step % kSumSteps == 0, [&] {
                   // Into the place of the step before.
                   if (thread == 0 && (step > 0 || at.tile != static_cast<int>(blockIdx.x))) {
                     Cursor ahead = shared.ahead;
                     if (ahead.tile < p.tiles) {
                       shared.empty[ahead.slot].wait(ahead.phase ^ 1);
                       load_next(p, shared, stages, ahead);
                       shared.ahead = ahead;
                     }
                   }
                   __syncwarp();
                 });
        if (lane == 0) shared.empty[at.slot].arrive();
        at.advance_slot(p.stages);
        if ((step + 1) % kSumSteps == 0 || step + 1 == p.steps) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kRegisters; ++i) sums[i] += part[i];
        }
      }
      // Nothing of what follows is worked out before the products: registers are scarce.
      int now = thread, number = at.tile;
      asm volatile("" : "+r"(now), "+r"(number));
      Tile const of = tile(p, number);
      int const now_lane = now % 32,
                column = of.column + now / 128 * kColumns + first_column(sizeof(T), now / 32 % 4, now_lane);
      if (column >= p.columns) continue;  // the same for a warp: columns come in whole accesses of 128 bytes
      Column const c = find_column(p, column);
      bool const all = of.position + kPositions <= p.positions;
      float const look = all ? store<true>(p, places, c, now_lane, sums) : store<false>(p, places, c, now_lane, sums);
      if (look != look) recompute(p, of.position, column, now_lane);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kMostWarpgroups * 128, 1) kernel(__grid_constant__ ProductParams const params) {
  Kernel<T>::run(params);
}

}  // namespace convt3d::sm90::product
