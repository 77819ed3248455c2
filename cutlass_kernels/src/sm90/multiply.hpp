// SPDX-License-Identifier: Apache-2.0
//
// The wgmma of each type and format: which operand is which, and its shape. A tile is kParts of them per K step.
#pragma once

#include <type_traits>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "sm90/element.hpp"

namespace convt3d::sm90 {

namespace mma_atom {
using cute::SM90::GMMA::Major;
template <class T, bool kPositionsFirst>
struct Of;
// The weights as A: 64 weight rows by 128 positions. The positions as A: 64 of them by all weight rows.
template <>
struct Of<float, false> : cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_SS_TN<> {};
template <>
struct Of<float, true> : cute::SM90::GMMA::MMA_64x64x8_F32TF32TF32_SS_TN<> {};
template <>
struct Of<SplitFloat, false> : cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::K, Major::K> {};
template <bool kPositionsFirst>
struct Of<__half, kPositionsFirst> : cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::K, Major::K> {};
template <bool kPositionsFirst>
struct Of<__nv_bfloat16, kPositionsFirst> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K> {};
}  // namespace mma_atom

/// Sums of products. SplitFloat's hi hi go into one, its hi lo and lo hi, which count 2^-11 of it, into another. In
/// tf32 mode there are two because the tensor cores cut off what lies below a sum's largest term, so that a long sum of
/// one sign drifts (docs/numerics.md); not in NDHWC, where this takes 6 % longer, and kGivesBack 2 %.
template <class T, bool kChannelsLast>
constexpr int kSumsOf = std::is_same_v<T, SplitFloat> || (std::is_same_v<T, float> && !kChannelsLast) ? 2 : 1;

/// Whether fp32's only sum gets back the middle of what it may have lost, where it is not exact (sums.hpp).
template <class T, bool kChannelsLast>
constexpr bool kGivesBack = std::is_same_v<T, float> && kSumsOf<T, kChannelsLast> == 1;

/// Of the small ones.
constexpr float kLowScale = 1.0f / (1 << kSplitShift);

template <class T, bool kChannelsLast>
struct Multiply {
  static constexpr bool kSwapped = kPositionsFirst<T, kChannelsLast>;
  using Atom = mma_atom::Of<T, kSwapped>;
  static constexpr int kParts = kSwapped || sizeof(T) == 2 ? 2 : 1;
  static constexpr int kRegisters = kSwapped ? 2 * class_channels(sizeof(T)) : 64;  // of a part
  static constexpr int kHalves = 4 / sizeof(T);                                     // blocks of 32 channels in a slab
  static constexpr int kRows = kSumsOf<T, kChannelsLast> * kParts;
  using Accumulators = float[kRows][kRegisters];  // sum after sum, each of all parts

  // In descriptor units of 16 bytes: from one part to the next (weight rows, or positions along W), from step to step.
  static constexpr int kWeightsPart = kSwapped ? 0 : kWeightBlockBytes / 2 / 16;
  static constexpr int kPositionsPart = kSwapped ? 8 * 128 / 16 : 0;
  static constexpr int kStep = 2;             // 32 bytes along K
  static constexpr int kLow = kLowPart / 16;  // to the lo parts

  /// All products of one block, into the rows from `row`.
  CUTLASS_DEVICE static void block(uint64_t weights, uint64_t positions, Accumulators& acc, int row, bool accumulate) {
    steps<sizeof(T)>(weights, positions, acc, row, accumulate);
  }

  /// Of SplitFloat: the large products of one block into the rows from `row`, and its small ones into the second sum.
  CUTLASS_DEVICE static void high(uint64_t weights, uint64_t positions, Accumulators& acc, int row, bool accumulate) {
    steps<2>(weights, positions, acc, row, accumulate);
  }
  CUTLASS_DEVICE static void low(uint64_t weights, uint64_t positions, Accumulators& acc, bool accumulate) {
    steps<2>(weights, positions + kLow, acc, kParts, accumulate);
    steps<2>(weights + kLow, positions, acc, kParts, true);
  }

  /// Brings the second sum, of small products, to the scale of the large ones.
  CUTLASS_DEVICE static void scale_second(Accumulators& acc) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kParts * kRegisters; ++i) acc[kParts + i / kRegisters][i % kRegisters] *= kLowScale;
  }

  /// Adds the second sum, times `scale`, to the first.
  CUTLASS_DEVICE static void add_second(Accumulators& acc, float scale) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kParts * kRegisters; ++i) {
      float& sum = acc[i / kRegisters][i % kRegisters];
      sum = fmaf(acc[kParts + i / kRegisters][i % kRegisters], scale, sum);
    }
  }

 private:
  /// `kSteps` steps along K into the rows from `row`.
  template <int kSteps>
  CUTLASS_DEVICE static void steps(uint64_t weights, uint64_t positions, Accumulators& acc, int row, bool accumulate) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        uint64_t const w = weights + (part * kWeightsPart + k * kStep);
        uint64_t const x = positions + (part * kPositionsPart + k * kStep);
        fma(kSwapped ? x : w, kSwapped ? w : x, acc[row + part], accumulate || k > 0,
            std::make_index_sequence<kRegisters>{});
      }
    }
  }

  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, float (&acc)[kRegisters], bool accumulate,
                                 std::index_sequence<I...>) {
    Atom::fma(a, b, acc[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }
};

/// Whether all sums of a thread fit 16 bits: then they are taken for exact, as those of whole numbers are. A sum with
/// nothing in its last eight bits by chance is one of 256, and there are 64.
template <int kRows, int kRegisters>
CUTLASS_DEVICE bool are_short(float const (&acc)[kRows][kRegisters]) {
  uint32_t bits[4] = {};  // several, as each waits for its own last term
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRows * kRegisters; ++i) bits[i / 2 % 4] |= __float_as_uint(acc[i / kRegisters][i % kRegisters]);
  return ((bits[0] | bits[1] | (bits[2] | bits[3])) & 0xff) == 0;
}

/// From sums to the convolution's values. In shared memory.
template <class T>
struct ResultScale {};

template <>
struct ResultScale<SplitFloat> {
  float inverse[2];   // of both operands' scales, in two factors; the second is nearly always 1
  float floor;        // below which tiny values of the weights may spoil a sum
  uint32_t products;  // of a result, at most

  /// The first factor, which the epilogue applies as it adds the bias.
  CUTLASS_DEVICE float factor() const { return *static_cast<float const volatile*>(&inverse[0]); }

  /// Sums that tiny values may spoil become nan; x has `tiny` of them here. Whether one is nan.
  template <int kRows, int kRegisters>
  CUTLASS_DEVICE bool check(float (&acc)[kRows][kRegisters], uint32_t tiny) const {
    constexpr int kParts = kRows / kSumsOf<SplitFloat, false>;
    // Zero times a value is nan or zero, and four sums of that need fewer cycles than a chain of comparisons.
    float nans[4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kParts * kRegisters; ++i) {
      // A nan of x reaches every weight row, so one of them tells: register 4 j + 2 half + b is row lane / 4 + 8 half,
      // column 8 j + 2 (lane mod 4) + b.
      float& some = nans[i / 4 % 2 * 2 + i % 2];
      if (i % 4 < 2) some = fmaf(acc[i / kRegisters][i % kRegisters], 0.f, some);
    }
    float const all = nans[0] + nans[1] + nans[2] + nans[3];
    bool nan = all != all;
    float least = *static_cast<float const volatile*>(&floor);
    if (tiny != 0 || least > 0.f) {
      least = fmaf(static_cast<float>(tiny < kManyTiny ? min(tiny, products) : products), kTinyFloor, least);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts * kRegisters; ++i) {
        float& value = acc[i / kRegisters][i % kRegisters];
        bool const small = fabsf(value) < least;
        nan = nan || small;
        value = small ? __int_as_float(0x7fffffff) : value;
      }
    }
    float const second = *static_cast<float const volatile*>(&inverse[1]);
    if (second != 1.0f) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts * kRegisters; ++i) acc[i / kRegisters][i % kRegisters] *= second;
    }
    return nan;
  }
};

}  // namespace convt3d::sm90
