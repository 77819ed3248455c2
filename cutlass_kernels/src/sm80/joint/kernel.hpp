// SPDX-License-Identifier: Apache-2.0
//
// The joint kernel: a pipelined product of mma.sync instructions, for all residue classes of a tile at once
// (geometry.hpp), and the tail. A stage of shared memory holds one step of input channels of the tile's rows of x and
// of every tap's weights. An instruction's rows of x are fetched by address, so a neighbour is another row, and one
// outside x is a row of zeros.
#pragma once

#include <utility>

#include "dependent_launch.hpp"
#include "sm80/instructions.hpp"
#include "sm80/joint/epilogue.hpp"

namespace convt3d::sm80::joint {

/// Calls f(integral_constant) for 0, 1, ... in order.
template <class F, int... I>
CUTLASS_DEVICE void unroll(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}

template <class Operand_, class Element_, class Kind>
struct JointKernel {
  using Operand = Operand_;
  using Element = Element_;
  static constexpr int kTaps = Kind::kTaps;
  static constexpr int kVector = kAccessBytes / int(sizeof(Operand));      // an access
  static constexpr int kStepChannels = kStepBytes / int(sizeof(Operand));  // input channels of a step
  static constexpr int kNeighbours = Kind::kDeltas * Kind::kDeltas * Kind::kDeltas;
  // A warp has 32 positions and all channels: instructions of 16 and 8. Of the shapes with as many sums this one
  // fetches the least from shared memory.
  static constexpr int kTiles = 2;
  static constexpr int kSides = kChannels / 8;
  // Whether sums are kept short, which operands of one sign want (docs/numerics.md). In 16-bit types what a long sum
  // loses is a twentieth of the rounding of the result.
  static constexpr bool kShortSums = sizeof(Operand) == 4;

  using ClassSums = float[kTiles][kSides][4];
  using Accumulators = ClassSums[kClasses];
  template <int I>
  static constexpr Tap kTap = list_taps<Kind>().v[I];

  struct Shared {
    Place* places;  // kPositions
    float* bias;    // kChannels
    int64_t* rows;  // byte offset of each row of x; -1: none
    int2* taps;     // of each tap: first and channel_step of TapWeights
    unsigned char* stages;
    uint32_t stages_at;  // in shared memory's own addresses
  };

  CUTLASS_DEVICE static Shared carve(Params const& p, unsigned char* memory) {
    Shared s;
    s.places = reinterpret_cast<Place*>(memory);
    s.rows = reinterpret_cast<int64_t*>(s.places + kPositions);
    s.taps = reinterpret_cast<int2*>(s.rows + p.x_rows.rows);
    s.bias = reinterpret_cast<float*>(s.taps + kTapTable);
    s.stages = memory + table_bytes(p.x_rows.rows);
    s.stages_at = static_cast<uint32_t>(__cvta_generic_to_shared(s.stages));
    return s;
  }

  CUTLASS_DEVICE static void fill_places(Params const& p, Place* places, int position_begin) {
    for (int i = threadIdx.x; i < kPositions; i += kThreads) {
      Place place{0, 0, 0};
      if (position_begin + i < p.positions) {
        Position const at(p, position_begin + i);
        int const v[3] = {at.d, at.h, at.w};
        place.flags = kInside;
        place.y = at.n * p.y_stride[0];
        place.add = at.n * p.add_stride[0];
        CUTLASS_PRAGMA_UNROLL
        for (int axis = 0; axis < 3; ++axis) {
          place.y += 2 * v[axis] * p.y_stride[1 + axis];
          place.add += 2 * v[axis] * p.add_stride[1 + axis];
          place.flags |= uint32_t(v[axis] + 1 < p.in_size[axis]) << axis;
          place.flags |= uint32_t(2 * v[axis] + 1 < p.out_size[axis]) << (3 + axis);
        }
      }
      places[i] = place;
    }
  }

  CUTLASS_DEVICE static void fill_bias(Params const& p, float* bias, int column_begin) {
    int const channel = threadIdx.x;
    if (channel >= kChannels) return;
    bool const inside = p.tail.bias != nullptr && column_begin + channel < p.tail.channels;
    auto const* const from = static_cast<Element const*>(p.tail.bias) + (column_begin + channel) * p.tail.bias_stride;
    bias[channel] = inside ? to_float(*from) : 0.f;
  }

  CUTLASS_DEVICE static void fill_rows(Params const& p, int64_t* rows, int position_begin) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.x_rows.rows; i += kThreads) {
      int64_t const number = int64_t(position_begin) + i + (i < p.x_rows.near ? 0 : p.x_rows.skip);
      int64_t offset = -1;
      if (number < p.positions) {
        Position const at(p, static_cast<int>(number));
        offset = at.n * p.x_stride[0] + at.d * p.x_stride[1] + at.h * p.x_stride[2] + at.w * p.x_stride[3];
        offset *= int64_t(sizeof(Operand));
      }
      rows[i] = offset;
    }
  }

  CUTLASS_DEVICE static void fill_taps(Params const& p, int2* taps) {
    for (int i = threadIdx.x; i < kTapTable; i += kThreads) {
      TapWeights const& tap = p.taps[i < kTaps ? i : 0];
      taps[i] = make_int2(tap.first, tap.channel_step);
    }
  }

  CUTLASS_DEVICE static void clear_zero_rows(Params const& p, Shared const& s) {
    int const step_bytes = stage_bytes<Kind>(p.x_rows.rows) / Kind::kSteps;
    constexpr int kAccesses = kZeroRows * kStepBytes / 16;  // of a step
    for (int i = threadIdx.x; i < kStages * Kind::kSteps * kAccesses; i += kThreads) {
      unsigned char* const rows = s.stages + (i / kAccesses + 1) * step_bytes - kZeroRows * kStepBytes;
      reinterpret_cast<uint4*>(rows)[i % kAccesses] = make_uint4(0, 0, 0, 0);
    }
  }

  // ---- loads -------------------------------------------------------------------------------------------------------

  // Accesses of 16 bytes within a row are swapped in a pattern that lets eight consecutive rows (a matrix) be read
  // without conflicts.
  CUTLASS_DEVICE static constexpr int row_offset(int row, int access) {
    return row * kStepBytes + ((access ^ (row >> 2 & 1)) << 4);
  }
  /// Of the filter: rows are input channels, 16 output channels each. fp32 words are read four rows at a time.
  CUTLASS_DEVICE static constexpr int filter_offset(int row, int access) {
    if (sizeof(Operand) == 2) return row_offset(row, access);
    return row * 64 + ((access ^ (row >> 1 & 1) << 1) << 4);
  }

  /// Asynchronously, the step of input channels from `channel` on.
  CUTLASS_DEVICE static void load_step(Params const& p, Shared const& s, uint32_t at, int channel, int column_begin) {
    int thread = threadIdx.x;
    // What follows from it is worked out anew in every step: there are no registers to keep it in.
    if constexpr (kShortSums) asm volatile("" : "+r"(thread));
    int const warp = thread / 32, lane = thread % 32;
    constexpr int kAccesses = kChannels / kVector;  // of a filter row
    int const row = lane / kAccesses, access = lane % kAccesses;
    int const column = column_begin + access * kVector;
    // Without a branch in between, so that the addresses of all accesses are worked out side by side.
    bool const inside = channel + row < p.weight_channels && column < p.weight_columns;
    auto const* const weight = static_cast<Operand const*>(p.weight) + column;
    uint32_t const filter_at = at + filter_offset(row, access) + warp * kTapStepBytes;
    constexpr int kWarps = kThreads / 32;
    constexpr int kRounds = (kTaps + kWarps - 1) / kWarps;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRounds; ++i) {
      int const tap = i * kWarps + warp;
      int2 const place = s.taps[tap];  // the table is a round longer than there are taps
      copy_or_zero(filter_at + i * kWarps * kTapStepBytes, weight + (place.x + (channel + row) * place.y), inside,
                   (i + 1) * kWarps <= kTaps || tap < kTaps);
    }
    constexpr int kAtOnce = 3;
    uint32_t const x_at = at + kTaps * kTapStepBytes;
    int const x_channel = channel + thread % 2 * kVector;
    auto const* const x = static_cast<char const*>(p.x) + x_channel * int(sizeof(Operand));
#pragma unroll 1
    for (int begin = thread / 2; begin < p.x_rows.rows; begin += kAtOnce * kThreads / 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const r = begin + i * kThreads / 2;
        bool const live = r < p.x_rows.rows;
        int64_t const offset = s.rows[live ? r : 0];
        copy_or_zero(x_at + row_offset(r, thread % 2), x + offset, offset >= 0 && x_channel < p.x_channels, live);
      }
    }
  }

  CUTLASS_DEVICE static void load_stage(Params const& p, Shared const& s, int slot, int stage, int column_begin) {
    int const bytes = stage_bytes<Kind>(p.x_rows.rows);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Kind::kSteps; ++step) {
      load_step(p, s, s.stages_at + slot * bytes + step * (bytes / Kind::kSteps),
                (stage * Kind::kSteps + step) * kStepChannels, column_begin);
    }
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  /// Where a lane fetches its row of x, for each of a warp's instructions' rows and each neighbour: bytes from x's
  /// place in a step. Two to a register.
  static constexpr int kFetchWords = (kNeighbours + 1) / 2;
  using Fetches = uint32_t[kTiles][kFetchWords];

  static_assert((kSharedLimit / kStages) < 1 << 16, "an offset within a stage takes 16 bits");

  CUTLASS_DEVICE static void find_fetches(Params const& p, Place const* places, Fetches& fetch) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int const zeros = first_zero_row(p.x_rows.rows);
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      int const position = warp * 32 + tile * 16 + lane % 16;
      uint32_t const flags = places[position].flags;
      unroll(std::make_integer_sequence<int, kNeighbours>{}, [&](auto i) {
        constexpr int kD = Kind::kDeltas, kI = decltype(i)::value;
        constexpr int d = kI / kD / kD, h = kI / kD % kD, w = kI % kD;
        constexpr uint32_t wanted = uint32_t(d) | uint32_t(h) << 1 | uint32_t(w) << 2;
        bool const inside = (flags & wanted) == wanted;
        int const row = position + d * p.x_rows.depth + h * p.in_size[2] + w;
        uint32_t const offset = row_offset(inside ? row : zeros + row % kZeroRows, lane / 16);
        fetch[tile][kI / 2] = kI % 2 ? fetch[tile][kI / 2] | offset << 16 : offset;
      });
      // Kept as they are: worked out anew in every step they would take more instructions than the products.
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFetchWords; ++i) asm volatile("" : "+r"(fetch[tile][i]));
    }
  }

  /// Where a lane fetches the weights of a step, but for the tap's place. 16-bit types fetch both sides at once.
  struct FilterFetch {
    uint32_t at[kSides];

    CUTLASS_DEVICE explicit FilterFetch(uint32_t step) {
      int thread = threadIdx.x;
      if constexpr (kShortSums) asm volatile("" : "+r"(thread));  // as in load_step
      int const lane = thread % 32;
      if constexpr (sizeof(Operand) == 2) {
        at[0] = step + filter_offset(lane % 16, lane / 16);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int side = 0; side < kSides; ++side) {
          int const channel = side * 8 + lane / 4;
          at[side] = step + filter_offset(lane % 4, channel / 4) + channel % 4 * 4;
        }
      }
    }

    CUTLASS_DEVICE void load(uint32_t (&b)[2 * kSides], int tap) const {
      int const place = tap * kTapStepBytes;
      if constexpr (sizeof(Operand) == 2) {
        load_matrices_transposed(b, at[0] + place);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kSides; ++i) b[i] = load_word(at[i / 2] + place + i % 2 * 4 * 64);
      }
    }
  };

  using Rows = uint32_t[kTiles][4];

  template <int kNeighbour>
  CUTLASS_DEVICE static void load_rows(Rows& a, uint32_t x_at, Fetches const& fetch) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t const word = fetch[tile][kNeighbour / 2];
      load_matrices(a[tile], x_at + (kNeighbour % 2 ? word >> 16 : word & 0xffff));
    }
  }

  CUTLASS_DEVICE static void multiply_tap(ClassSums& sums, Rows const& a, uint32_t const (&b)[2 * kSides]) {
    CUTLASS_PRAGMA_UNROLL
    for (int side = 0; side < kSides; ++side) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply(Operand{}, sums[tile][side], a[tile], b[2 * side], b[2 * side + 1]);
      }
    }
  }

  CUTLASS_DEVICE static void multiply_step(uint32_t at, Fetches const& fetch, Accumulators& acc) {
    uint32_t const x_at = at + kTaps * kTapStepBytes;
    FilterFetch const filter(at);
    if constexpr (kShortSums) {
      unroll(std::make_integer_sequence<int, Kind::kDeltas>{},
             [&](auto d) { multiply_plane<decltype(d)::value>(filter, x_at, fetch, acc); });
    } else {
      Rows a;
      unroll(std::make_integer_sequence<int, kTaps>{}, [&](auto i) {
        constexpr int kI = decltype(i)::value;
        constexpr Tap tap = kTap<kI>;
        if constexpr (is_first<kI>()) load_rows<neighbour(tap)>(a, x_at, fetch);
        uint32_t b[2 * kSides];
        filter.load(b, kI);
        multiply_tap(acc[tap.cls], a, b);
      });
    }
  }

  /// Neighbours whose rows are in registers: what compiles without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kRowsAtHand = 4;
#else
  static constexpr int kRowsAtHand = 3;
#endif

  /// The tap of a class that reads a neighbour; -1: none.
  static constexpr int tap_of(int cls, int wanted) {
    for (int i = 0; i < kTaps; ++i) {
      TapList<Kind> const list = list_taps<Kind>();
      if (list.v[i].cls == cls && neighbour(list.v[i]) == wanted) return i;
    }
    return -1;
  }

  /// The taps whose neighbour is `kD` voxels further along D. Class by class, so that each one's products can have an
  /// accumulator of their own before they are added to the others by fp32 instructions, which round.
  ///
  /// With three of the plane's four neighbours at hand the last one takes the place of the second when the first class
  /// that reads all four has used that; the other such class, in the first plane, begins with it and fetches the second
  /// anew.
  template <int kD>
  CUTLASS_DEVICE static void multiply_plane(FilterFetch const& filter, uint32_t x_at, Fetches const& fetch,
                                            Accumulators& acc) {
    static_assert(Kind::kDeltas == 2, "the order of neighbours below");
    Rows a[kRowsAtHand];
    unroll(std::make_integer_sequence<int, kClasses>{}, [&](auto i) {
      constexpr int kI = decltype(i)::value;
      constexpr int kClass = kRowsAtHand == 3 ? kI % 2 * 4 + kI / 2 : kI;
      constexpr int kResidues = kClass % 4;  // along H and W
      if constexpr (Kind::live(kClass / 4, kD)) {
        constexpr bool kFirst = kClass / 4 == kD;
        __syncwarp();  // holds loads back for which there are no registers yet
        ClassSums sums = {};
        unroll(std::make_integer_sequence<int, 4>{}, [&](auto j) {
          constexpr int kInOrder = decltype(j)::value;
          constexpr int kBackwards = kInOrder == 0 ? 3 : kInOrder == 1 ? 2 : kInOrder - 2;
          constexpr int kNeighbour = kRowsAtHand == 3 && kResidues == 3 && !kFirst ? kBackwards : kInOrder;
          constexpr int kTapIndex = tap_of(kClass, kD * 4 + kNeighbour);
          if constexpr (kTapIndex >= 0) {
            constexpr int kPlace = kNeighbour == kRowsAtHand ? 1 : kNeighbour;
            constexpr bool kAnew = kRowsAtHand == 3 && kResidues == 3 && kNeighbour == 1;
            constexpr bool kFetch = kFirst ? kNeighbour == kResidues : kAnew;
            if constexpr (kFetch) load_rows<kD * 4 + kNeighbour>(a[kPlace], x_at, fetch);
            uint32_t b[2 * kSides];
            filter.load(b, kTapIndex);
            multiply_tap(sums, a[kPlace], b);
          }
        });
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kTiles * kSides * 4; ++n) {
          acc[kClass][n / 4 / kSides][n / 4 % kSides][n % 4] += sums[n / 4 / kSides][n / 4 % kSides][n % 4];
        }
      }
    });
  }

  static constexpr int neighbour(Tap const& tap) {
    return (tap.delta[0] * Kind::kDeltas + tap.delta[1]) * Kind::kDeltas + tap.delta[2];
  }

  /// Whether tap I is the first that reads its neighbour.
  template <int I>
  static constexpr bool is_first() {
    if constexpr (I == 0) {
      return true;
    } else {
      constexpr Tap a = kTap<I>, b = kTap<I - 1>;
      return a.delta[0] != b.delta[0] || a.delta[1] != b.delta[1] || a.delta[2] != b.delta[2];
    }
  }

  CUTLASS_DEVICE static void multiply_all(Params const& p, Shared const& s, int first, int stages, int column_begin,
                                          Accumulators& acc) {
    Fetches fetch;
    find_fetches(p, s.places, fetch);
    int const bytes = stage_bytes<Kind>(p.x_rows.rows);
    int slot = 0;
    // Loads run kStages - 1 ahead: one piece of code brings in the first stages and the later ones, since code that
    // runs once is fetched from memory at the pace of its latency.
#pragma unroll 1
    for (int i = 1 - kStages; i < stages; ++i) {
      if (i >= 0) {
        wait_for_copies<kStages - 2>();
        __syncthreads();  // the stage has arrived for all, and all are done with the one before it
      }
      int const ahead = i + kStages - 1;
      if (ahead < stages) load_stage(p, s, ahead % kStages, first + ahead, column_begin);
      commit_copies();
      if (i < 0) {
        if (i == -1 && p.parts == 1) prefetch_add(p, s, column_begin);
        continue;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < Kind::kSteps; ++step) {
        multiply_step(s.stages_at + slot * bytes + step * (bytes / Kind::kSteps), fetch, acc);
      }
      slot = slot == kStages - 1 ? 0 : slot + 1;
    }
    wait_for_copies<0>();
  }

  /// f(class, channel, position, sum) for each sum that a thread holds.
  template <class F>
  CUTLASS_DEVICE static void for_each_sum(Accumulators const& acc, F&& f) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int cls = 0; cls < kClasses; ++cls) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTiles * kSides * 4; ++i) {
        int const tile = i / 4 / kSides, side = i / 4 % kSides, at = i % 4;
        f(cls, side * 8 + lane % 4 * 2 + at % 2, warp * 32 + tile * 16 + at / 2 * 8 + lane / 4,
          acc[cls][tile][side][at]);
      }
    }
  }

  // ---- the two kernels ---------------------------------------------------------------------------------------------

  /// Block (tile, part).
  CUTLASS_DEVICE static void run(Params const& p, unsigned char* memory) {
    Shared const s = carve(p, memory);
    int const tile = blockIdx.x, part = blockIdx.y;
    int const column_begin = tile % p.channel_tiles * kChannels;
    int const position_begin = tile / p.channel_tiles * kPositions;
    if (p.parts > 1) let_next_kernel_start();
    fill_places(p, s.places, position_begin);
    fill_rows(p, s.rows, position_begin);
    fill_taps(p, s.taps);
    fill_bias(p, s.bias, column_begin);
    clear_zero_rows(p, s);
    wait_for_previous_kernel();  // prepared x and weights; and the memory of y may have been another's until then
    __syncthreads();

    Accumulators acc = {};
    int const first = part * p.stages;
    int const all = (p.x_channels + kStepChannels * Kind::kSteps - 1) / (kStepChannels * Kind::kSteps);
    multiply_all(p, s, first, min(p.stages, all - first), column_begin, acc);
    if (p.parts > 1) {
      float* const to = p.partial_sums + (int64_t(tile) * p.parts + part) * kPartFloats;
      for_each_sum(acc, [&](int cls, int channel, int position, float sum) {
        to[(cls * kChannels + channel) * kPositions + position] = sum;
      });
      return;
    }
    __syncthreads();  // the stages share this memory
    auto* const sums = reinterpret_cast<float*>(s.stages);
    for_each_sum(acc,
                 [&](int cls, int channel, int position, float sum) { sums[sum_index(cls, channel, position)] = sum; });
    __syncthreads();
    finish_tile(p, s, position_begin, column_begin, 0, kBatches, TileSums{sums});
  }

  /// The sums of parts, added in order, and the tail. Block (tile, batch).
  CUTLASS_DEVICE static void run_finish(Params const& p, unsigned char* memory) {
    Shared const s = carve(p, memory);
    int const tile = blockIdx.x;
    int const column_begin = tile % p.channel_tiles * kChannels;
    int const position_begin = tile / p.channel_tiles * kPositions;
    fill_places(p, s.places, position_begin);
    fill_bias(p, s.bias, column_begin);
    wait_for_previous_kernel();
    __syncthreads();
    float const* const from = p.partial_sums + int64_t(tile) * p.parts * kPartFloats;
    finish_tile(p, s, position_begin, column_begin, blockIdx.y, blockIdx.y + 1, PartSums{from, p.parts});
  }

  CUTLASS_DEVICE static void prefetch_add(Params const& p, Shared const& s, int column_begin) {
    if (p.tail.add == nullptr || !p.vectors) return;
#pragma unroll 1
    for (int index = 0; index < kBatches; ++index) {
      if (p.channels_last) {
        Batch<Element, true>(p, s.places, column_begin, index).prefetch_add(p);
      } else {
        Batch<Element, false>(p, s.places, column_begin, index).prefetch_add(p);
      }
    }
  }

  template <class Sums>
  CUTLASS_DEVICE static void finish_tile(Params const& p, Shared const& s, int position_begin, int column_begin,
                                         int first, int last, Sums const& sums) {
    if (p.channels_last) {
      finish<Operand, Element, true>(p, kTaps, s.places, s.bias, position_begin, column_begin, first, last, sums);
    } else {
      finish<Operand, Element, false>(p, kTaps, s.places, s.bias, position_begin, column_begin, first, last, sums);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 2) joint_kernel(__grid_constant__ Params const params) {
  extern __shared__ __align__(16) unsigned char shared[];
  Kernel::run(params, shared);
}

// Told no number of blocks, ptxas spills for the sake of more of them.
template <class Kernel>
__global__ void __launch_bounds__(kThreads, 2) finish_kernel(__grid_constant__ Params const params) {
  extern __shared__ __align__(16) unsigned char shared[];
  Kernel::run_finish(params, shared);
}

}  // namespace convt3d::sm80::joint
