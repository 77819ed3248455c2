// SPDX-License-Identifier: Apache-2.0
//
// The wgmma of each type and format: which operand is which, and its shape. A tile is kParts of them per K step.
#pragma once

#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "sm90/element.hpp"

namespace convt3d::sm90 {

namespace mma_atom {
using cute::SM90::GMMA::Major;
template <class T, bool kChannelsLast>
struct Of;
// NCDHW: 64 weight rows by 128 positions. NDHWC: 64 positions by all weight rows.
template <>
struct Of<float, false> : cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_SS_TN<> {};
template <>
struct Of<float, true> : cute::SM90::GMMA::MMA_64x64x8_F32TF32TF32_SS_TN<> {};
template <bool kChannelsLast>
struct Of<__half, kChannelsLast> : cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::K, Major::K> {};
template <bool kChannelsLast>
struct Of<__nv_bfloat16, kChannelsLast> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K> {};
}  // namespace mma_atom

template <class T, bool kChannelsLast>
struct Multiply {
  using Atom = mma_atom::Of<T, kChannelsLast>;
  static constexpr int kParts = kChannelsLast || sizeof(T) == 2 ? 2 : 1;
  static constexpr int kRegisters = kChannelsLast ? 2 * class_channels(sizeof(T)) : 64;  // of a part
  static constexpr int kSteps = sizeof(T);       // of 32 bytes of channels: 32 channels
  static constexpr int kHalves = 4 / sizeof(T);  // blocks of 32 channels in a slab
  using Accumulators = float[kParts][kRegisters];

  // In descriptor units of 16 bytes: from one part to the next (weight rows, or positions along W), from step to step.
  static constexpr int kWeightsPart = kChannelsLast ? 0 : kWeightBlockBytes / 2 / 16;
  static constexpr int kPositionsPart = kChannelsLast ? 8 * 128 / 16 : 0;
  static constexpr int kStep = 2;

  /// All products of one block.
  CUTLASS_DEVICE static void block(uint64_t weights, uint64_t positions, Accumulators& acc, bool accumulate) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        uint64_t const w = weights + (part * kWeightsPart + k * kStep);
        uint64_t const x = positions + (part * kPositionsPart + k * kStep);
        fma(kChannelsLast ? x : w, kChannelsLast ? w : x, acc[part], accumulate || k > 0,
            std::make_index_sequence<kRegisters>{});
      }
    }
  }

 private:
  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, float (&acc)[kRegisters], bool accumulate,
                                 std::index_sequence<I...>) {
    Atom::fma(a, b, acc[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
};

}  // namespace convt3d::sm90
