// SPDX-License-Identifier: Apache-2.0
//
// The consumers' arithmetic on a unit of the streaming kernel: unit = activation(scale sums + bias + unit), in place.
#pragma once

#include <type_traits>

#include "convt3d/activation.hpp"
#include "sm80/instructions.hpp"
#include "sm90/collective_epilogue.hpp"
#include "sm90/stream/forms.hpp"
#include "sm90/stream/shift.hpp"

namespace convt3d::sm90::stream {

// Four matrices of 8 x 8 elements of 16 bits, transposed: each lane gives the address of a row of 16 bytes.
CUTLASS_DEVICE uint4 load_matrices(uint32_t address) {
  uint32_t v[4];
  sm80::load_matrices_transposed(v, address);
  return make_uint4(v[0], v[1], v[2], v[3]);
}

CUTLASS_DEVICE void store_matrices(uint32_t address, uint4 const& v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <class T, bool kChannelsLast, class Tail, int kWidth>
struct UnitUpdate {
  using Resident = CollectiveEpilogue<T, kChannelsLast, Tail>;
  using Params = EpilogueParams;
  /// Of `kCount` positions along W, by W parity.
  template <int kCount>
  using SumsOf = float[2][4 * kCount];
  using Accumulators = SumsOf<kWidth>;
  static constexpr int kVector = Element<T>::kVector;
  static constexpr int kUnits = units_per_warp(sizeof(T));  // of a warp and tile
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  static constexpr bool kPairs = pairs_channels(kChannelsLast, sizeof(T));
  static constexpr bool kScaled = kSplit || sizeof(T) == 2;
  /// Whether a thread reads from its unit while it works on the batch before. Not in ieee mode, where that was no
  /// faster, nor in parts, for which registers are too few.
  static constexpr bool kReadsAhead = !kSplit && !Tail::kAny;

  /// Bias, and what stands in for add where it is not loaded, of a thread's two channels.
  struct Channels {
    float bias[2];    // with what stands in for add, but where add may come after the activation
    uint32_t add[2];  // the value of a channel, in each element of a word
    float scale[2];   // of the sums of each W parity; but in tf32 mode

    CUTLASS_DEVICE float finish(float sum, int half, int parity) const {
      return kScaled ? fmaf(sum, scale[kSplit ? 0 : parity], bias[half]) : sum + bias[half];
    }
  };

  /// Their bits as they lie in memory, to be read before the products: nothing waits for them then. (In ieee mode after
  /// them, where registers are scarcer.)
  struct ChannelBits {
    uint32_t bias[2], add[2];

    CUTLASS_DEVICE static float value_of(uint32_t bits) {
      if constexpr (sizeof(T) == 4) {
        return __uint_as_float(bits);
      } else {
        return Element<T>::from_bits(bits);
      }
    }

    CUTLASS_DEVICE Channels channels() const {
      Channels v{};
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        v.bias[half] = value_of(bias[half]);
        v.add[half] = sizeof(T) == 4 ? add[half] : add[half] | add[half] << 16;
        if constexpr (!Tail::kAny) v.bias[half] += value_of(add[half]);
      }
      return v;
    }
  };

  /// Finishes unit `kSub` of a warp. `tile`: whether add is in it.
  template <int kSub>
  CUTLASS_DEVICE static void unit(Params const& p, uint32_t unit, int lane, Channels const& channels, bool tile,
                                  Accumulators& acc) {
    if constexpr (Tail::kAny) {
      with_activation(p.activation, [&](auto function) {
        FinishAny<decltype(function)> const finish{function, p.negative_slope, p.add_after != 0};
        in_parts<kSub, false>(unit, lane, channels, Either{tile}, finish, Shift<T>{}, acc);
      });
    } else {
      with_form(p, [&](auto form) {
        FinishCommon<decltype(form)> const finish{form};
        if (tile) {
          at_once<kSub, false>(unit, lane, channels, InUnit{}, finish, Shift<T>{}, acc);
        } else {
          at_once<kSub, false>(unit, lane, channels, InBias{}, finish, Shift<T>{}, acc);
        }
      });
    }
  }

  /// A unit of NCDHW that holds the words in which add lies.
  template <int kSub>
  CUTLASS_DEVICE static void shifted_unit(Params const& p, uint32_t unit, int lane, Channels const& channels,
                                          Shift<T> const& rows, Accumulators& acc) {
    if constexpr (sizeof(T) != 2 || kChannelsLast || kWidth != kTileW) {
      return;
    } else if constexpr (Tail::kAny) {
      with_activation(p.activation, [&](auto function) {
        FinishAny<decltype(function)> const finish{function, p.negative_slope, p.add_after != 0};
        in_parts<kSub, true>(unit, lane, channels, InUnit{}, finish, rows, acc);
      });
    } else {
      with_form(p, [&](auto form) {
        FinishCommon<decltype(form)> const finish{form};
        at_once<kSub, true>(unit, lane, channels, InUnit{}, finish, rows, acc);
      });
    }
  }

 private:
  // What the outputs of a unit are made of: `Source` says where add is, `Finish` is the rest of the arithmetic.
  struct InUnit {};
  struct InBias {};  // or nowhere
  struct Either {
    bool tile;  // whether it is in the unit
  };

  template <class Form>
  struct FinishCommon {
    Form form;
    CUTLASS_DEVICE float operator()(float conv, float add) const { return form(conv + add); }
    CUTLASS_DEVICE float operator()(float conv) const { return form(conv); }
  };
  template <class Function>
  struct FinishAny {
    Function function;
    float negative_slope;
    bool add_after;
    CUTLASS_DEVICE float operator()(float conv, float add) const {
      return in_order(conv, add, add_after, [&](float t) { return function(t, negative_slope); });
    }
  };

  template <int kSub, bool kShift, class Source, class Finish>
  CUTLASS_DEVICE static void at_once(uint32_t unit, int lane, Channels const& channels, Source source,
                                     Finish const& finish, Shift<T> const& rows, Accumulators const& acc) {
    positions<kSub, kShift, kWidth>(unit, lane, channels, source, finish, rows, 0, acc);
  }

  /// In a loop, for activations of much code: all of it once for each output is more than the cache of instructions
  /// brings in. The sums move up: it is always the first ones' turn. So after a unit of pairs the second unit's come
  /// first. In NCDHW and fp32 each unit has half of every position's sums: there the first one turns them round.
  template <int kSub, bool kShift, class Source, class Finish>
  CUTLASS_DEVICE static void in_parts(uint32_t unit, int lane, Channels const& channels, Source source,
                                      Finish const& finish, Shift<T> const& rows, Accumulators& acc) {
    constexpr int kCount = 4;
    constexpr int kParts = kWidth / kCount;
    constexpr bool kGoRound = kUnits == 2 && !kPairs && kSub == 0;
    static_assert(kParts * kCount == kWidth && kParts % kUnits == 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = 0; part < (kPairs ? kParts / kUnits : kParts); ++part) {
      SumsOf<kCount> sums;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8 * kCount; ++i) sums[i % 2][i / 2] = acc[i % 2][i / 2];
      positions<kSub, kShift, kCount>(unit, lane, channels, source, finish, rows, part, sums);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8 * (kWidth - kCount); ++i) acc[i % 2][i / 2] = acc[i % 2][i / 2 + 4 * kCount];
      if constexpr (kGoRound) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8 * kCount; ++i) acc[i % 2][4 * (kWidth - kCount) + i / 2] = sums[i % 2][i / 2];
      }
    }
  }

  /// `kCount` of a unit's positions along W, from number `part` * kCount on, whose sums are `sums`; or all of them.
  template <int kSub, bool kShift, int kCount, class Source, class Finish>
  CUTLASS_DEVICE static void positions(uint32_t unit, int lane, Channels const& channels, Source source,
                                       Finish const& finish, Shift<T> const& rows, int part,
                                       SumsOf<kCount> const& sums) {
    if constexpr (kPairs) {
      pairs<kSub, kCount>(unit, lane, channels, source, finish, part, sums);
    } else if constexpr (kChannelsLast) {
      matrices<kCount>(unit, lane, channels, source, finish, part, sums);
    } else {
      rows_along_w<kSub, kShift, kCount>(unit, lane, channels, source, finish, rows, part, sums);
    }
  }

  /// wgmma's accumulator of W position `j`, accumulator half (channel) and H position 2 (lane % 4) + b.
  CUTLASS_DEVICE static constexpr int accumulator(int j, int half, int b) { return 4 * j + 2 * half + b; }

  /// Calls `use` for each batch of accesses and, where they read add, `load` before it or a batch ahead. (rows_along_w
  /// has this loop in itself: with its shifts the compiler makes other code of it.)
  template <bool kReads, int kBatches, class Load, class Use>
  CUTLASS_DEVICE static void in_batches(Load const& load, Use const& use) {
    if (kReads && kReadsAhead) load(0);
    CUTLASS_PRAGMA_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      if (kReads && !kReadsAhead) load(batch);
      if (kReads && kReadsAhead && batch + 1 < kBatches) load(batch + 1);
      use(batch);
    }
  }

  template <int kSub, bool kShift, int kCount, class Source, class Finish>
  CUTLASS_DEVICE static void rows_along_w(uint32_t unit, int lane, Channels const& channels, Source source,
                                          Finish const& finish, Shift<T> const& rows, int part,
                                          SumsOf<kCount> const& sums) {
    constexpr bool kReads = !std::is_same_v<Source, InBias>;
    constexpr int kRowBytes = 32 * sizeof(T);
    constexpr int kRowVectors = 2 * kCount / kVector;  // of 16 bytes, in a row along W
    constexpr int kBatch = kRowVectors % 4 == 0 ? 4 : kRowVectors % 3 == 0 ? 3 : kRowVectors;
    constexpr int kPerRow = kRowVectors / kBatch;
    constexpr int kBatches = 2 * (2 / kUnits) * kPerRow;
    uint32_t const base = unit + unit_row_ncdhw(sizeof(T), lane, 0, 0) * kRowBytes;
    int const swizzle = (kRowBytes == 128 ? lane & 7 : (lane >> 1) & 3) << 4;
    auto half_of = [](int batch) { return kUnits == 2 ? kSub : batch / kPerRow / 2; };
    auto vector = [&](int row, int index) {
      return base + unit_row_ncdhw(sizeof(T), 0, half_of(row * kPerRow), row % 2) * kRowBytes +
             (((part * kRowVectors + index) << 4) ^ swizzle);
    };
    auto address = [&](int batch, int k) { return vector(batch / kPerRow, batch % kPerRow * kBatch + k); };
    uint4 v[2][kBatch];
    auto load = [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        uint32_t const flat = channels.add[half_of(batch)];
        v[batch % 2][k] = in_unit(source) ? load_shared(address(batch, k)) : make_uint4(flat, flat, flat, flat);
      }
    };
    if (kReads && kReadsAhead) load(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatches; ++i) {
      int const b = i / kPerRow % 2;
      int const half = half_of(i);
      int const first = i % kPerRow * kBatch;
      if (kReads && !kReadsAhead) load(i);
      if (kReads && kReadsAhead && i + 1 < kBatches) load(i + 1);
      uint4(&elements)[kBatch] = v[i % 2];
      if constexpr (kShift) {
        uint32_t next = rows.last[half][b];
        if (kReadsAhead && first + kBatch < kRowVectors) {
          next = v[(i + 1) % 2][0].x;
        } else if (kCount < kWidth && part + 1 < kWidth / kCount) {
          next = sm80::load_word(vector(i / kPerRow, kRowVectors));
        }
        shift(elements, next, rows.selector[half]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        float f[kVector] = {};
        if constexpr (kReads) Element<T>::unpack(elements[k], f);
        CUTLASS_PRAGMA_UNROLL
        for (int o = 0; o < kVector; ++o) {
          int const ow = kVector * (first + k) + o;
          float const conv = channels.finish(sums[ow % 2][accumulator(ow / 2, half, b)], half, ow % 2);
          f[o] = output<kReads>(finish, conv, f[o]);
        }
        store_shared(address(i, k), Element<T>::pack(f));
      }
    }
  }

  template <bool kReads, class Finish>
  CUTLASS_DEVICE static float output(Finish const& finish, float conv, float add) {
    if constexpr (kReads) {
      return finish(conv, add);
    } else {
      return finish(conv);
    }
  }
  CUTLASS_DEVICE static constexpr bool in_unit(InUnit) { return true; }
  CUTLASS_DEVICE static constexpr bool in_unit(InBias) { return false; }
  CUTLASS_DEVICE static bool in_unit(Either source) { return source.tile; }

  /// NDHWC, fp32: two neighbouring channels of one output after the other, 8 bytes.
  template <int kSub, int kCount, class Source, class Finish>
  CUTLASS_DEVICE static void pairs(uint32_t unit, int lane, Channels const& channels, Source source,
                                   Finish const& finish, int part, SumsOf<kCount> const& sums) {
    constexpr bool kReads = !std::is_same_v<Source, InBias>;
    constexpr bool kWhole = kCount == kWidth;
    constexpr int kRowBytes = 64;
    constexpr int kBatch = !kWhole ? 2 : kSplit ? 4 : 8;
    constexpr int kPositions = kWhole ? kWidth / kUnits : kCount;
    constexpr int kFirst = kWhole ? kSub * kPositions : 0;
    constexpr int kBatches = 4 * kPositions / kBatch;
    // The swizzle adds the number of the 128-byte line, modulo 4, to the 16 bytes' own, without a carry. An output is
    // four lines, rows 2 (lane % 4) and the next one are a line.
    uint32_t const base =
        unit + part * (2 * kPositions * 8 * kRowBytes) + lane % 4 * 2 * kRowBytes + ((lane / 4 * 8) ^ (lane % 4 << 4));
    // Of output `index` / 2 and b = `index` modulo 2.
    auto address = [&](int index) { return base + (index / 2 * 8 + index % 2) * kRowBytes; };
    uint2 v[2][kBatch];
    auto load = [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        v[batch % 2][i] = in_unit(source) ? load_shared_pair(address(batch * kBatch + i))
                                          : make_uint2(channels.add[0], channels.add[1]);
      }
    };
    in_batches<kReads, kBatches>(load, [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        int const index = batch * kBatch + i;
        int const ow = index / 2;
        float f[2] = {};
        if constexpr (kReads) {
          f[0] = __uint_as_float(v[batch % 2][i].x);
          f[1] = __uint_as_float(v[batch % 2][i].y);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float const sum = sums[ow % 2][accumulator(kFirst + ow / 2, half, index % 2)];
          f[half] = output<kReads>(finish, channels.finish(sum, half, ow % 2), f[half]);
        }
        store_shared(address(index), make_uint2(__float_as_uint(f[0]), __float_as_uint(f[1])));
      }
    });
  }

  /// NDHWC, 16-bit types: the instructions that move matrices of 8 x 8 from and to rows of 16 bytes, in which a thread
  /// has two columns of a row, as it has of the sums. A matrix is eight channels (columns) at the H positions (rows) of
  /// an output, transposed; an access is both outputs of a position along W, first those of the first half of channels.
  template <int kCount, class Source, class Finish>
  CUTLASS_DEVICE static void matrices(uint32_t unit, int lane, Channels const& channels, Source source,
                                      Finish const& finish, int part, SumsOf<kCount> const& sums) {
    constexpr bool kReads = !std::is_same_v<Source, InBias>;
    constexpr int kRowBytes = 32;
    constexpr int kBatch = kCount < kWidth ? 1 : kCount % 4 == 0 ? 4 : 3;
    constexpr int kBatches = kCount / kBatch;
    // The lane's row of a matrix; the swizzle exchanges both halves of the rows in every second 128-byte line.
    int const row = lane % 8, matrix = lane / 8;
    uint32_t const base =
        unit + part * (kCount * 16 * kRowBytes) + (matrix / 2 * 8 + row) * kRowBytes + ((matrix % 2 ^ row / 4) << 4);
    auto address = [&](int batch, int k) { return base + (batch * kBatch + k) * 16 * kRowBytes; };
    uint4 v[2][kBatch];
    auto load = [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        uint32_t const(&flat)[2] = channels.add;
        v[batch % 2][k] =
            in_unit(source) ? load_matrices(address(batch, k)) : make_uint4(flat[0], flat[1], flat[0], flat[1]);
      }
    };
    in_batches<kReads, kBatches>(load, [&](int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        float f[8] = {};
        if constexpr (kReads) Element<T>::unpack(v[batch % 2][k], f);
        CUTLASS_PRAGMA_UNROLL
        for (int o = 0; o < 8; ++o) {
          int const parity = o / 4, half = o / 2 % 2;
          float const sum = sums[parity][accumulator(batch * kBatch + k, half, o % 2)];
          f[o] = output<kReads>(finish, channels.finish(sum, half, parity), f[o]);
        }
        store_matrices(address(batch, k), Element<T>::pack(f));
      }
    });
  }
};

}  // namespace convt3d::sm90::stream
