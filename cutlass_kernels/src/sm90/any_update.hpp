// SPDX-License-Identifier: Apache-2.0
//
// The epilogue's arithmetic behind any activation, and with add before or after it.
#pragma once

#include "convt3d/activation.hpp"
#include "sm90/collective_epilogue.hpp"

namespace convt3d::sm90 {

/// A unit of AnyTail in eight steps, a loop for each activation: an activation's code once for each output is more than
/// the cache of instructions brings in. A step's sums are the first ones; then the others move up.
template <class Epilogue>
struct AnyUpdate {
  using T = typename Epilogue::Type;
  using Params = typename Epilogue::Params;
  using Accumulators = typename Epilogue::Accumulators;
  using FlatAdd = typename Epilogue::FlatAdd;
  using Pairs = typename Epilogue::Pairs;
  static constexpr int kVector = Epilogue::kVector;
  static constexpr int kParts = Epilogue::kParts;
  static constexpr int kChannels = Epilogue::kChannels;
  static constexpr int kRowBytes = Epilogue::kRowBytes;
  static constexpr int kRegisters = sizeof(Accumulators{}[0]) / sizeof(float);
  static constexpr int kSums = kParts * kRegisters;
  static constexpr int kSteps = 8;
  static constexpr int kStepSums = kSums / kSteps;
  static constexpr int kStepVectors = 2;  // of 16 bytes
  static_assert(kStepSums <= kRegisters && kStepSums == kStepVectors * kVector);

  /// unit = activation(factor acc + bias + unit), or with unit behind the activation. Nothing is left of `acc`.
  CUTLASS_DEVICE static void unit(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                  float const (&factor)[4], FlatAdd const& flat, Accumulators& acc) {
    with_activation(p.activation, [&](auto function) {
      auto const finish = [&](float conv, float add) {
        return in_order(conv, add, p.add_after != 0, [&](float t) { return function(t, p.negative_slope); });
      };
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (Epilogue::kPairs) {
          pairs(p, unit, lane, bias, factor[0], flat, acc[0], step, finish);
        } else if constexpr (Epilogue::kLast) {
          channels(p, unit, lane, bias, factor, flat, acc[0], step, finish);
        } else {
          rows(p, unit, lane, bias, factor, flat, acc[0], step, finish);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSums - kStepSums; ++i) {
          acc[i / kRegisters][i % kRegisters] = acc[(i + kStepSums) / kRegisters][(i + kStepSums) % kRegisters];
        }
      }
    });
  }

 private:
  using Sums = float[kRegisters];  // the step's come first

  /// NCDHW: a vector of outputs along W, of the rows of two H positions.
  template <class Finish>
  CUTLASS_DEVICE static void rows(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                  float const (&factor)[4], FlatAdd const& flat, Sums const& sums, int step,
                                  Finish const& finish) {
    int const parity = Epilogue::kSplit ? 0 : lane / 16 * 2;
    float const of_columns[2] = {factor[parity], factor[parity + 1]};
    constexpr int kPerPart = kSteps / kParts;
    int const part = step / kPerPart;
    float const of_part = part == 0 ? bias[0] : bias[kParts - 1];
    uint32_t const word = part == 0 ? flat.word[0] : flat.word[kParts - 1];
    int const swizzle = (kRowBytes == 128 ? lane & 7 : (lane >> 1) & 3) << 4;
    uint32_t const base = unit + unit_row_ncdhw(sizeof(T), lane, 0, part) * kRowBytes;
    auto address = [&](int b) {
      return base + unit_row_ncdhw(sizeof(T), 0, b, 0) * kRowBytes + ((step % kPerPart << 4) ^ swizzle);
    };
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < kStepVectors; ++b) {
      uint4 const v = p.add_mode == AddMode::kTile ? load_shared(address(b)) : make_uint4(word, word, word, word);
      float f[kVector];
      Element<T>::unpack(v, f);
      CUTLASS_PRAGMA_UNROLL
      for (int o = 0; o < kVector; ++o) {
        f[o] = finish(Epilogue::finish(sums[2 * o + b], of_part, of_columns[o % 2]), f[o]);
      }
      store_shared(address(b), Element<T>::pack(f));
    }
  }

  /// NDHWC: vectors of channels, of two outputs of the same parities.
  template <class Finish>
  CUTLASS_DEVICE static void channels(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                      float const (&factor)[4], FlatAdd const& flat, Sums const& sums, int step,
                                      Finish const& finish) {
    int const part = step / 4, h = step / 2 % 2, w = step % 2;
    float const of_parity = h ? (w ? factor[3] : factor[2]) : (w ? factor[1] : factor[0]);  // in registers
    uint32_t const base =
        unit + unit_row_ndhwc(lane, part, 0, h, w) * kRowBytes + (((lane & 3) ^ ((lane >> 3) & 3)) << 4);
    auto address = [&](int half) { return base + unit_row_ndhwc(0, 0, half, 0, 0) * kRowBytes; };
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < kStepVectors; ++half) {
      uint4 const v = p.add_mode == AddMode::kTile ? load_shared(address(half))
                                                   : make_uint4(flat.word[0], flat.word[1], flat.word[2], flat.word[3]);
      float f[kVector];
      Element<T>::unpack(v, f);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kVector; ++c) {
        f[c] = finish(Epilogue::finish(sums[4 * (c / 2) + 2 * half + c % 2], bias[c], of_parity), f[c]);
      }
      store_shared(address(half), Element<T>::pack(f));
    }
  }

  /// NDHWC with the weights as A: pairs of channels, of two W positions.
  template <class Finish>
  CUTLASS_DEVICE static void pairs(Params const& p, uint32_t unit, int lane, float const (&bias)[kChannels],
                                   float factor, FlatAdd const& flat, Sums const& sums, int step,
                                   Finish const& finish) {
    constexpr int kStepPairs = 2 * kStepVectors;
    Pairs const at(unit + unit_row_pairs(0, step * kStepPairs / 2, 0) * kRowBytes, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStepPairs; ++i) {
      uint2 const v =
          p.add_mode == AddMode::kTile ? load_shared_pair(at.address(i)) : make_uint2(flat.word[0], flat.word[1]);
      float f[2] = {__uint_as_float(v.x), __uint_as_float(v.y)};
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        f[half] = finish(Epilogue::finish(at.sum(sums, i, half), bias[half], factor), f[half]);
      }
      store_shared(at.address(i), make_uint2(__float_as_uint(f[0]), __float_as_uint(f[1])));
    }
  }
};

}  // namespace convt3d::sm90
