// SPDX-License-Identifier: Apache-2.0
//
// x, weights and the multiply of the streaming kernel. Both operands come through rings, in wgmma's layout and without
// passing through registers: slabs of x as boxes of a channels-last tensor (x itself where it is one, rounded to TF32
// by the copy engine; otherwise a prepared copy), and weight pieces out of the prepared images. The two consumer groups
// multiply the same pieces, each at its own D pair.
#pragma once

#include <type_traits>
#include <utility>

#include "cute/arch/copy_sm90_tma.hpp"
#include "sm90/collective_mainloop.hpp"
#include "sm90/stream/tile.hpp"

namespace convt3d::sm90::stream {

/// 64 output channels by the positions of a tile's plane: `kWidth` by eight.
template <class T, int kWidth>
struct StreamAtom;
template <class T>
struct StreamAtom<T, kTileW> : mma_atom::Of<T, false> {};
template <>
struct StreamAtom<float, kNarrowTileW> : cute::SM90::GMMA::MMA_64x96x8_F32TF32TF32_SS_TN<> {};
template <>
struct StreamAtom<SplitFloat, kNarrowTileW>
    : cute::SM90::GMMA::MMA_64x96x16_F32F16F16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K> {};
template <>
struct StreamAtom<__half, kNarrowTileW> : StreamAtom<SplitFloat, kNarrowTileW> {};
template <>
struct StreamAtom<__nv_bfloat16, kNarrowTileW>
    : cute::SM90::GMMA::MMA_64x96x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K> {};

template <class T, int kWidth>
struct StreamMainloop {
  static constexpr int kRegisters = 4 * kWidth;
  using Atom = StreamAtom<T, kWidth>;
  using Accumulators = float[2][kRegisters];  // W parity
  static constexpr int kPiecesOfSum = pieces_of_sum(std::is_same_v<T, __nv_bfloat16>);

  struct SharedStorage {
    TransactionBarrier full[kMaxStages];  // slabs
    Barrier empty[kMaxStages];
    TransactionBarrier piece_full[kMaxSlots];
    Barrier piece_empty[kMaxSlots];
  };

  CUTLASS_DEVICE static void init(SharedStorage& shared) {
    for (int i = 0; i < kMaxStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kGroups * 4);
    }
    for (int i = 0; i < kMaxSlots; ++i) {
      shared.piece_full[i].init(1);
      shared.piece_empty[i].init(kGroups * 4);
    }
  }

  /// The x warp: slab by slab, the planes of a tile.
  CUTLASS_DEVICE static void load_x(StreamParams const& p, SharedStorage& shared,
                                    TileScheduler::SharedStorage& schedule, unsigned char* stages) {
    // x is read by every class and by neighbouring tiles; add and y stream past it in L2.
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    TileScheduler::Consumer scheduler{schedule, {}};
    RingState stage;
    bool const leader = cutlass::canonical_lane_idx() == 0;
    for (;;) {
      int const number = scheduler.fetch();
      if (number == TileScheduler::kEnd) break;
      Item const item = decode(p, number);
      DeviceClass const& cls = p.cls[item.cls];
      int const first = item.d + cls.depth_lo;
      int const planes = cls.depth_count + kGroups - 1;
      if (leader) {
        for (int slab = 0; slab < p.x.slabs; ++slab) {
          for (int plane = 0; plane < planes; ++plane) {
            shared.empty[stage.slot].wait(stage.phase ^ 1);
            shared.full[stage.slot].arrive_and_expect_tx(p.box_bytes);
            cute::SM90_TMA_LOAD_5D::copy(&p.x_map, reinterpret_cast<uint64_t*>(&shared.full[stage.slot]), kHint,
                                         stages + stage.slot * p.x.stage_bytes,
                                         slab * (128 / static_cast<int>(sizeof(T))), item.h * kTileH + p.x.window_lo[1],
                                         item.w * p.tile_columns + p.x.window_lo[2], first + plane, item.n);
            stage.advance(1, p.x.stages);
          }
        }
      }
      __syncwarp();
    }
  }

  /// The weight warp.
  CUTLASS_DEVICE static void load_pieces(StreamParams const& p, SharedStorage& shared,
                                         TileScheduler::SharedStorage& schedule, unsigned char* slots) {
    TileScheduler::Consumer scheduler{schedule, {}};
    RingState slot;
    bool const leader = cutlass::canonical_lane_idx() == 0;
    for (;;) {
      int const number = scheduler.fetch();
      if (number == TileScheduler::kEnd) break;
      Item const item = decode(p, number);
      DeviceClass const& cls = p.cls[item.cls];
      int const count = p.x.slabs * cls.depth_count * cls.height_count * (cls.width_count[0] + cls.width_count[1]);
      unsigned char const* from =
          p.pieces +
          (static_cast<int64_t>(item.channel / kTileChannels) * p.tile_pieces + cls.first_piece) * kPieceBytes;
      if (leader) {
        for (int i = 0; i < count; ++i) {
          shared.piece_empty[slot.slot].wait(slot.phase ^ 1);
          shared.piece_full[slot.slot].arrive_and_expect_tx(kPieceBytes);
          cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&shared.piece_full[slot.slot]),
                                         slots + slot.slot * kPieceBytes, kPieceBytes);
          from += kPieceBytes;
          slot.advance(1, p.slots);
        }
      }
      __syncwarp();
    }
  }

  // ---- consumer ----------------------------------------------------------------------------------------------

  /// Where a consumer warp stands in both rings.
  struct Position {
    RingState stage, slot;
  };

  /// Passes by a slab that a group does not multiply. It waits like the other one, in order: a phase that it never saw
  /// could pass for the one after next.
  CUTLASS_DEVICE static void pass(StreamParams const& p, SharedStorage& shared, RingState& stage, int lane) {
    shared.full[stage.slot].wait(stage.phase);
    __syncwarp();
    if (lane == 0) shared.empty[stage.slot].arrive();
    stage.advance(1, p.x.stages);
  }

  CUTLASS_DEVICE static void fence(float (&acc)[kRegisters]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) cute::warpgroup_fence_operand(acc[i]);
  }

  CUTLASS_DEVICE static void add(float const (&sums)[kRegisters], float (&total)[kRegisters]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) total[i] += sums[i];
  }

  /// acc = the tile's sums for consumer group `group`. Tensor cores cut off what lies below a sum's largest term, so
  /// few products may gather in one accumulator: those of kPiecesOfSum pieces. The first ones go to the tile's sums
  /// (DeviceClass::direct). The others, in runs of one W parity, go to registers of their own, which are added to the
  /// tile's with rounding to nearest. A group waits for every such sum, so they are few: the pieces come in an order
  /// that makes runs long (Program).
  ///
  /// The code is kept short, by loops that are not unrolled: in a cache of instructions that does not hold it a group
  /// spends more time on a piece than the tensor cores do. `meanwhile` is called once, while the last of the first
  /// products are under way.
  template <class Meanwhile>
  CUTLASS_DEVICE static void mma(StreamParams const& p, DeviceClass const& cls, SharedStorage& shared, uint64_t pieces,
                                 uint64_t positions, Position& at, int group, int lane, Accumulators& acc,
                                 Meanwhile&& meanwhile) {
    uint32_t const stage_units = static_cast<uint32_t>(p.x.stage_bytes) >> 4;
    int used_slot = -1, used_stage = -1;  // to be handed back once what was read there has been multiplied
    auto hand_back = [&] {
      if (lane == 0) {
        if (used_slot >= 0) shared.piece_empty[used_slot].arrive();
        if (used_stage >= 0) shared.empty[used_stage].arrive();
      }
      used_slot = used_stage = -1;
    };

    // Planes of a slab: the first is group 0's alone, the last one group 1's.
    if (group == 1) pass(p, shared, at.stage, lane);
    int const planes = p.x.slabs * cls.depth_count;
    int plane = 0, d = 0;
    auto next_plane = [&] {
      used_stage = at.stage.slot;
      at.stage.advance(1, p.x.stages);
      ++plane;
      if (++d == cls.depth_count) {
        d = 0;
        if (group == 0 || plane < planes) pass(p, shared, at.stage, lane);
      }
    };
    // Pieces of one W parity that follow each other, which are a plane's last and the next one's first: `left` more of
    // them, the next one at place `of_plane` among a plane's.
    int run = -1, parity = 0, first = 0, per_plane = 0, of_plane = 0, left = 0;
    auto next_run = [&] {
      if (left > 0) return true;
      if (++run > planes) return false;
      parity = 1 - run % 2;
      first = parity == 0 ? 0 : cls.height_count * cls.width_count[0];
      per_plane = cls.height_count * cls.width_count[parity];
      left = run == 0 || run == planes ? per_plane : 2 * per_plane;
      of_plane = 0;
      return true;
    };
    auto multiply = [&](float(&sums)[kRegisters], bool accumulate) {
      uint64_t const w = pieces + static_cast<uint32_t>(at.slot.slot) * (kPieceBytes >> 4);
      uint64_t const x =
          positions + at.stage.slot * stage_units + static_cast<uint32_t>(cls.operand_offset[first + of_plane]);
      shared.full[at.stage.slot].wait(at.stage.phase);
      shared.piece_full[at.slot.slot].wait(at.slot.phase);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        fma(w + 2 * k, x + 2 * k, sums, accumulate || k > 0, std::make_index_sequence<kRegisters>{});
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      hand_back();
      used_slot = at.slot.slot;
      at.slot.advance(1, p.slots);
      if (++of_plane == per_plane) {
        of_plane = 0;
        if (plane < run) next_plane();
      }
    };

    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) acc[0][i] = acc[1][i] = 0.f;
    fence(acc[0]);
    fence(acc[1]);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int direct = cls.direct; direct > 0;) {
      next_run();
      int const count = min(left, direct);
      if (parity == 0) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < count; ++i) multiply(acc[0], true);
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < count; ++i) multiply(acc[1], true);
      }
      left -= count;
      direct -= count;
    }
    meanwhile();
    cute::warpgroup_wait<0>();
    hand_back();
    fence(acc[0]);
    fence(acc[1]);

    // Anything: the first product sets them. But left alone, or zeros, they would take registers before this, too.
    float sums[kRegisters];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) sums[i] = acc[0][i];
    CUTLASS_PRAGMA_NO_UNROLL
    while (next_run()) {
      int const count = min(left, kPiecesOfSum);
      fence(sums);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < count; ++i) multiply(sums, i > 0);
      cute::warpgroup_wait<0>();
      hand_back();
      fence(sums);
      if (parity == 0) {
        add(sums, acc[0]);
      } else {
        add(sums, acc[1]);
      }
      left -= count;
    }
  }

  /// The copy engine rounds values in the last half unit before infinity to it, where TF32's largest number is meant
  /// (operand_bits.hpp): an infinite sum becomes nan, so that it is computed again.
  CUTLASS_DEVICE static void suspect_infinities(Accumulators& acc) {
    if constexpr (std::is_same_v<T, float>) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kRegisters; ++i) {
        float& sum = acc[i / kRegisters][i % kRegisters];
        sum = fmaf(sum, 0.f, sum);
      }
    }
  }

  /// Whether a sum is nan (or infinite, which does no harm: y decides in the end). In parts a nan of x reaches every
  /// weight row, so one of a thread's two tells.
  CUTLASS_DEVICE static bool holds_nan(Accumulators const& acc) {
    constexpr bool kOneOfTwo = std::is_same_v<T, SplitFloat>;
    constexpr int kCount = kOneOfTwo ? kRegisters / 2 : kRegisters;
    auto const at = [](int i) { return kOneOfTwo ? i / 2 * 4 + i % 2 : i; };
    // First as little as can tell: what is not finite makes products of two and their sum not finite either. So do huge
    // sums, which are looked at again.
    float any[8] = {};  // several, as each waits for its own last term
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) any[i % 8] = fmaf(acc[0][at(i)], acc[1][at(i)], any[i % 8]);
    if (is_finite(any)) return false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) any[i] = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kCount; ++i) any[i % 8] = fmaf(acc[i / kCount][at(i % kCount)], 0.f, any[i % 8]);
    return !is_finite(any);
  }

 private:
  /// Of their sum.
  CUTLASS_DEVICE static bool is_finite(float const (&v)[8]) {
    float const sum = (v[0] + v[1]) + (v[2] + v[3]) + ((v[4] + v[5]) + (v[6] + v[7]));
    return fabsf(sum) <= 3.402823466e38f;
  }

  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, float (&acc)[kRegisters], bool accumulate,
                                 std::index_sequence<I...>) {
    Atom::fma(a, b, acc[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
};

}  // namespace convt3d::sm90::stream
