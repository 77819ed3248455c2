// SPDX-License-Identifier: Apache-2.0
//
// The columns of a tile: a matrix product of x and the weight as they lie in memory.
//
// The tensor core's rows are what lies in rows of the sums, its columns what runs along them: of contiguous x, weight
// columns by positions; of channels last, positions by weight columns. So the second operand always has its k dimension
// outermost in memory, and the first one only with channels last has it innermost.
#pragma once

#include "convt3d/numerics.hpp"
#include "dependent_launch.hpp"
#include "sm80/columns/params.hpp"
#include "sm80/instructions.hpp"
#include "sm80/split.hpp"

namespace convt3d::sm80::columns {

/// `Operand`: tfloat32_t, half_t, bfloat16_t, or float for three-product arithmetic.
template <class Operand, bool kChannelsLast>
struct Product {
  static constexpr int kBytes = int(sizeof(Operand));
  static constexpr bool kIeee = std::is_same_v<Operand, float>;
  static constexpr bool kTf32 = std::is_same_v<Operand, cutlass::tfloat32_t>;
  static constexpr int kDepth = kDepthBytes / kBytes;
  static constexpr int kVector = kAccessBytes / kBytes;
  static constexpr int kWords = 32 / kBytes;             // input channels of an instruction
  static constexpr int kInstructions = kDepth / kWords;  // of a step, one after the other
  // Paddings that keep fragments free of bank conflicts. With k outermost, four rows of 32-bit words by eight columns,
  // or eight rows of 16 bytes; innermost, eight rows by four words or 16 bytes.
  static constexpr int kOuterPitch = kTile * kBytes + 32 / (kBytes == 4 ? 1 : 2);
  static constexpr int kInnerPitch = kDepthBytes + 16;
  static constexpr int kOuterBytes = kDepth * kOuterPitch, kInnerBytes = kTile * kInnerPitch;
  static constexpr int kFirstBytes = kChannelsLast ? kInnerBytes : kOuterBytes;
  static constexpr int kStageBytes = kFirstBytes + kOuterBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kWarpTile = 32, kFirst = kWarpTile / 16, kSecond = kWarpTile / 8;
  static constexpr int kCopies = kTile * kDepthBytes / kAccessBytes / kThreads;  // of a thread, operand and step
  // Products that the tensor core adds up by itself: half of what fits the bound of docs/numerics.md even if all have
  // one sign. In ieee mode what it cuts off has to stay far below that.
  static constexpr int kSumInstructions = kIeee ? 2 : 64 / kWords;

  using Sums = float[kFirst][kSecond][4];

  /// A thread's accesses to an operand with k outermost: rows of k, runs of kTile.
  struct Outer {
    Operand const* from[kCopies];
    int64_t row;

    CUTLASS_DEVICE static int k(int i) { return (threadIdx.x + i * kThreads) / (kTile / kVector); }
    CUTLASS_DEVICE static int column(int i) { return (threadIdx.x + i * kThreads) % (kTile / kVector) * kVector; }
    CUTLASS_DEVICE static uint32_t place(int i) { return uint32_t(k(i) * kOuterPitch + column(i) * kBytes); }
    CUTLASS_DEVICE void load(int i, uint32_t to, int64_t step, int channels) const {
      bool const inside = from[i] != nullptr && step * kDepth + k(i) < channels;
      copy_or_zero(to + place(i), inside ? from[i] + step * kDepth * row : nullptr, inside);
    }
  };

  /// The same with k innermost: rows of positions.
  struct Inner {
    Operand const* from[kCopies];

    CUTLASS_DEVICE static int row(int i) { return (threadIdx.x + i * kThreads) / (kDepth / kVector); }
    CUTLASS_DEVICE static int k(int i) { return (threadIdx.x + i * kThreads) % (kDepth / kVector) * kVector; }
    CUTLASS_DEVICE static uint32_t place(int i) { return uint32_t(row(i) * kInnerPitch + k(i) * kBytes); }
    CUTLASS_DEVICE void load(int i, uint32_t to, int64_t step, int channels) const {
      bool const inside = from[i] != nullptr && step * kDepth + k(i) < channels;
      copy_or_zero(to + place(i), inside ? from[i] + step * kDepth : nullptr, inside);
    }
  };

  using X = std::conditional_t<kChannelsLast, Inner, Outer>;

  CUTLASS_DEVICE static void find(ProductParams const& p, int position_begin, int column_begin, X& x, Outer& weight) {
    weight.row = p.weight_row;
    if constexpr (!kChannelsLast) x.row = p.x_row;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      int const column = column_begin + Outer::column(i);
      bool const inside = column < p.columns;
      weight.from[i] = inside ? static_cast<Operand const*>(p.weight) + Outer::k(i) * p.weight_row + column : nullptr;
      int position = position_begin, sample, voxel;
      if constexpr (kChannelsLast) {
        position += Inner::row(i);
      } else {
        position += Outer::column(i);
      }
      p.volume(sample, voxel, position);
      auto const* at = static_cast<Operand const*>(p.x) + sample * p.x_sample;
      if constexpr (kChannelsLast) {
        at += voxel * p.x_row + Inner::k(i);
      } else {
        at += Outer::k(i) * p.x_row + voxel;
      }
      x.from[i] = position < p.positions ? at : nullptr;
    }
  }

  /// Rounds an access in place; bits that the tensor core ignores may be anything. An infinity, a nan, or what would
  /// become one is rare enough for a branch.
  CUTLASS_DEVICE static void round_access(uint32_t at) {
    uint32_t v[4], rounded[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at)
                 : "memory");
    constexpr float kRoundsToInfinity = 0x1.ffep127f;
    bool usual = true;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      usual = usual && fabsf(bits_to_float(v[i])) < kRoundsToInfinity;
      rounded[i] = v[i] + 0xfffu + (v[i] >> 13 & 1u);
    }
    if (!usual) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) rounded[i] = round_bits_to_tf32(v[i]);
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(rounded[0]), "r"(rounded[1]),
                 "r"(rounded[2]), "r"(rounded[3])
                 : "memory");
  }

  // ---- fragments of an instruction ------------------------------------------------------------------------------

  CUTLASS_DEVICE static void load_first(uint32_t (&a)[kFirst][4], uint32_t stage, int row, int instruction) {
    int const lane = threadIdx.x % 32, k = instruction * kWords;
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kFirst; ++tile) {
      int const r = row + tile * 16;
      if constexpr (kBytes == 4) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const at_row = r + lane / 4 + i % 2 * 8, at_k = k + lane % 4 + i / 2 * 4;
          a[tile][i] = load_word(
              stage + uint32_t(kChannelsLast ? at_row * kInnerPitch + at_k * 4 : at_k * kOuterPitch + at_row * 4));
        }
      } else {
        int const matrix = lane / 8, at_row = r + matrix % 2 * 8, at_k = k + matrix / 2 * 8;
        if constexpr (kChannelsLast) {
          load_matrices(a[tile], stage + uint32_t((at_row + lane % 8) * kInnerPitch + at_k * 2));
        } else {
          load_matrices_transposed(a[tile], stage + uint32_t((at_k + lane % 8) * kOuterPitch + at_row * 2));
        }
      }
    }
  }

  CUTLASS_DEVICE static void load_second(uint32_t (&b)[kSecond][2], uint32_t stage, int column, int instruction) {
    int const lane = threadIdx.x % 32, k = instruction * kWords;
    if constexpr (kBytes == 4) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kSecond; ++tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const at_k = k + lane % 4 + i * 4, at_column = column + tile * 8 + lane / 4;
          b[tile][i] = load_word(stage + uint32_t(at_k * kOuterPitch + at_column * 4));
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int pair = 0; pair < kSecond / 2; ++pair) {
        int const matrix = lane / 8, at_k = k + matrix % 2 * 8 + lane % 8, at = column + pair * 16 + matrix / 2 * 8;
        uint32_t both[4];
        load_matrices_transposed(both, stage + uint32_t(at_k * kOuterPitch + at * 2));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) b[pair * 2 + i / 2][i % 2] = both[i];
      }
    }
  }

  template <class Tag>
  CUTLASS_DEVICE static void multiply_tiles(Sums& sums, uint32_t const (&a)[kFirst][4],
                                            uint32_t const (&b)[kSecond][2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFirst; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kSecond; ++j) multiply(Tag{}, sums[i][j], a[i], b[j][0], b[j][1]);
    }
  }

  template <int kCount>
  CUTLASS_DEVICE static void split(uint32_t (&high)[kCount], uint32_t (&low)[kCount]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      Tf32Split const at = split_for_tensor_core(bits_to_float(high[i]));
      high[i] = float_to_bits(at.high);
      low[i] = float_to_bits(at.low);
    }
  }

  CUTLASS_DEVICE static void multiply_instruction(Sums& part, uint32_t first, uint32_t second, int row, int column,
                                                  int instruction) {
    uint32_t a[kFirst][4], b[kSecond][2];
    load_first(a, first, row, instruction);
    load_second(b, second, column, instruction);
    if constexpr (kIeee) {
      // Small products first: the sum is still small where they are cut off.
      uint32_t a_low[kFirst][4], b_low[kSecond][2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFirst; ++i) split(a[i], a_low[i]);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kSecond; ++j) split(b[j], b_low[j]);
      multiply_tiles<cutlass::tfloat32_t>(part, a, b_low);
      multiply_tiles<cutlass::tfloat32_t>(part, a_low, b);
      multiply_tiles<cutlass::tfloat32_t>(part, a, b);
    } else {
      multiply_tiles<Operand>(part, a, b);
    }
  }

  /// Block (tile, part).
  CUTLASS_DEVICE static void run(ProductParams const& p, unsigned char* memory) {
    let_next_kernel_start();
    auto const shared = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    int position_tile, column_tile;
    p.position_tiles(column_tile, position_tile, int(blockIdx.x));
    int const position_begin = position_tile * kTile, column_begin = column_tile * kTile;
    X x;
    Outer weight;
    find(p, position_begin, column_begin, x, weight);
    // In a stage, the tensor core's first operand comes first.
    constexpr int kXAt = kChannelsLast ? 0 : kFirstBytes, kWeightAt = kFirstBytes - kXAt;

    int const first = blockIdx.y * p.steps_of_part, count = min(p.steps_of_part, p.steps - first);
    int const warp = threadIdx.x / 32, row = warp / 2 * kWarpTile, column = warp % 2 * kWarpTile;
    Sums total = {}, part = {};
    // Each thread rounds what it has brought in itself, a step ahead of the products.
    constexpr int kAhead = kTf32 ? 1 : 0;
#pragma unroll 1
    for (int i = 1 - kStages; i < count; ++i) {
      if (i >= -kAhead) wait_for_copies<kStages - 2 - kAhead>();
      if (i >= 0) __syncthreads();  // the step has arrived for all, and all are done with the one before it
      int const ahead = i + kStages - 1;
      if (ahead < count) {
        uint32_t const stage = shared + ahead % kStages * kStageBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int copy = 0; copy < kCopies; ++copy) {
          x.load(copy, stage + kXAt, first + ahead, p.channels);
          weight.load(copy, stage + kWeightAt, first + ahead, p.channels);
        }
      }
      commit_copies();
      if (kTf32 && i >= -kAhead && i + 1 < count) {
        uint32_t const stage = shared + (i + 1) % kStages * kStageBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int copy = 0; copy < kCopies; ++copy) {
          round_access(stage + kXAt + X::place(copy));
          round_access(stage + kWeightAt + Outer::place(copy));
        }
      }
      if (i < 0) continue;
      uint32_t const stage = shared + i % kStages * kStageBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int instruction = 0; instruction < kInstructions; ++instruction) {
        multiply_instruction(part, stage, stage + kFirstBytes, row, column, instruction);
        if constexpr (kSumInstructions <= kInstructions) {
          if ((instruction + 1) % kSumInstructions == 0) add_part(total, part);
        }
      }
      if constexpr (kSumInstructions > kInstructions) {
        if ((i + 1) % (kSumInstructions / kInstructions) == 0) add_part(total, part);
      }
    }
    add_part(total, part);
    wait_for_copies<0>();
    store(p, total, (kChannelsLast ? position_begin : column_begin) + row,
          (kChannelsLast ? column_begin : position_begin) + column);
  }

  CUTLASS_DEVICE static void add_part(Sums& total, Sums& part) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFirst * kSecond * 4; ++i) {
      float& sum = part[i / 4 / kSecond][i / 4 % kSecond][i % 4];
      total[i / 4 / kSecond][i / 4 % kSecond][i % 4] += sum;
      sum = 0.f;
    }
  }

  /// A row's last access may go into its padding, with sums of zeros.
  CUTLASS_DEVICE static void store(ProductParams const& p, Sums const& sums, int row, int column) {
    int const lane = threadIdx.x % 32, rows = kChannelsLast ? p.positions : p.columns;
    float* const to = p.sums + blockIdx.y * p.part_floats;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFirst * kSecond * 2; ++i) {
      int const tile = i / 2 / kSecond, side = i / 2 % kSecond, half = i % 2;
      int const at_row = row + tile * 16 + half * 8 + lane / 4, at = column + side * 8 + lane % 4 * 2;
      if (at_row >= rows || at >= p.pitch) continue;
      *reinterpret_cast<float2*>(to + at_row * p.pitch + at) =
          make_float2(sums[tile][side][half * 2], sums[tile][side][half * 2 + 1]);
    }
  }
};

template <class Product>
__global__ void __launch_bounds__(kThreads, 3) product_kernel(__grid_constant__ ProductParams const params) {
  extern __shared__ __align__(16) unsigned char shared[];
  Product::run(params, shared);
}

}  // namespace convt3d::sm80::columns
