// SPDX-License-Identifier: Apache-2.0
//
// The multiply of the streaming kernel for fp32 in ieee mode.
//
// A row holds hi and lo parts side by side, in x and in the weights (parts.hpp). The products of up to two pieces
// gather in sums of their own: hi lo + lo hi, which are then scaled to hi hi, and hi hi upon them. These are added to
// the tile's with rounding to nearest: the tensor cores cut every sum, and a sum of products of one sign would lose
// many units. There are registers for one set of such sums alone; while a group waits for it and adds it up, the other
// one multiplies.
#pragma once

#include "sm90/stream/mainloop.hpp"
#include "sm90/stream/parts.hpp"

namespace convt3d::sm90::stream {

template <int kWidth>
struct PartsMainloop : StreamMainloop<SplitFloat, kWidth> {
  using Base = StreamMainloop<SplitFloat, kWidth>;
  using Base::kRegisters;
  using Base::pass;
  using typename Base::Accumulators;
  using typename Base::Atom;
  using typename Base::Position;
  using typename Base::SharedStorage;
  static constexpr int kLow = kLowPart / 16;

  /// Products of `kCount` pieces, which are the next ones, with operands `x` of their own.
  template <int kCount>
  CUTLASS_DEVICE static void multiply(StreamParams const& p, SharedStorage& shared, uint64_t pieces, RingState& next,
                                      uint64_t const (&x)[kCount], int lane, float (&sums)[kRegisters],
                                      float (&total)[kRegisters]) {
    int slot[kCount];
    uint64_t w[kCount];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      slot[i] = next.slot;
      w[i] = pieces + static_cast<uint32_t>(slot[i]) * (kPieceBytes >> 4);
      shared.piece_full[slot[i]].wait(next.phase);
      next.advance(1, p.slots);
    }
    fence(sums);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      products(w[i], x[i] + kLow, sums, i > 0);
      products(w[i] + kLow, x[i], sums, true);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence(sums);
    constexpr float kSmall = 1.0f / (1 << kSplitShift);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) sums[i] *= kSmall;

    fence(sums);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) products(w[i], x[i], sums, true);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence(sums);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (lane == 0) shared.piece_empty[slot[i]].arrive();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) total[i] += sums[i];
  }

  /// acc = the tile's sums for consumer group `group`, at the scale of both operands.
  template <class Meanwhile>
  CUTLASS_DEVICE static void mma(StreamParams const& p, DeviceClass const& cls, SharedStorage& shared, uint64_t pieces,
                                 uint64_t positions, Position& at, int group, int lane, Accumulators& acc,
                                 Meanwhile&& meanwhile) {
    float sums[kRegisters];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) acc[0][i] = acc[1][i] = sums[i] = 0.f;

    uint32_t const stage_units = static_cast<uint32_t>(p.x.stage_bytes) >> 4;
    for (int slab = 0; slab < p.x.slabs; ++slab) {
      // Planes of the slab: the first is group 0's alone, the last one group 1's.
      if (group == 1) pass(p, shared, at.stage, lane);
      for (int d = 0; d < cls.depth_count; ++d) {
        shared.full[at.stage.slot].wait(at.stage.phase);
        uint64_t const x = positions + at.stage.slot * stage_units;
        auto operand = [&](int piece) { return x + static_cast<uint32_t>(cls.operand_offset[piece]); };
        // `count` pieces of one parity from number `piece` on.
        auto parity = [&](float(&total)[kRegisters], int piece, int count) {
          for (; count >= 2; count -= 2, piece += 2) {
            uint64_t const two[2] = {operand(piece), operand(piece + 1)};
            multiply(p, shared, pieces, at.slot, two, lane, sums, total);
          }
          if (count > 0) {
            uint64_t const one[1] = {operand(piece)};
            multiply(p, shared, pieces, at.slot, one, lane, sums, total);
          }
        };
        int piece = 0;
        for (int h = 0; h < cls.height_count; ++h) {
          parity(acc[0], piece, cls.width_count[0]);
          piece += cls.width_count[0];
          parity(acc[1], piece, cls.width_count[1]);
          piece += cls.width_count[1];
        }
        __syncwarp();
        if (lane == 0) shared.empty[at.stage.slot].arrive();
        at.stage.advance(1, p.x.stages);
      }
      if (group == 0) pass(p, shared, at.stage, lane);
    }
    meanwhile();
  }

  /// The rest of the inverse of the scales, which is nearly always 1.
  CUTLASS_DEVICE static void multiply_sums(float factor, Accumulators& acc) {
    if (factor == 1.0f) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kRegisters; ++i) acc[i / kRegisters][i % kRegisters] *= factor;
  }

 private:
  CUTLASS_DEVICE static void fence(float (&sums)[kRegisters]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRegisters; ++i) cute::warpgroup_fence_operand(sums[i]);
  }

  /// 32 channels of one part of each operand.
  CUTLASS_DEVICE static void products(uint64_t w, uint64_t x, float (&sums)[kRegisters], bool accumulate) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 2; ++k) {
      fma(w + 2 * k, x + 2 * k, sums, accumulate || k > 0, std::make_index_sequence<kRegisters>{});
    }
  }

  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, float (&sums)[kRegisters], bool accumulate,
                                 std::index_sequence<I...>) {
    Atom::fma(a, b, sums[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
};

}  // namespace convt3d::sm90::stream
