// SPDX-License-Identifier: Apache-2.0
//
// Units of add and y that the copy engine cannot address: rows that do not start at multiples of 16 bytes, outputs of a
// tile that are apart. Whole warps move them, a row's neighbours in neighbouring lanes, in accesses of 4 bytes, or of 2
// where 16-bit rows start anywhere. The unit looks the same in shared memory, so the consumers do not know; but an add
// whose 16-bit rows start anywhere comes as the words that they lie in (shift.hpp).
//
// These warps are bound by the instructions that they issue, and have 48 registers: addresses run along, two lines at a
// time, and an access is itself, a comparison and an addition.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "sm90/stream/tile.hpp"

namespace convt3d::sm90::stream {

template <class T, bool kChannelsLast, int kBytes, bool kShift = false>
struct PlainUnit {
  static_assert(kBytes == 4 || (kBytes == 2 && sizeof(T) == 2));
  static_assert(!kShift || (kBytes == 4 && sizeof(T) == 2 && !kChannelsLast));
  using Map = PlainMap<sizeof(T), kChannelsLast, kBytes>;
  using Word = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
  static constexpr int kAccesses = Map::kAccesses;

  /// From the hardware each time: nothing to keep in a register.
  CUTLASS_DEVICE static int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  CUTLASS_DEVICE static uint32_t place(uint32_t shared, int which, int i) {
    return (shared ^ Map::inverted(which, i)) + Map::common_bytes(which, i);
  }
  /// From an access to the next one, of which there are two kinds. An addition that the compiler leaves alone: it would
  /// derive every address from the line's, with a multiplication.
  struct Steps {
    int64_t of[2];
    CUTLASS_DEVICE explicit Steps(int64_t row)
        : of{(Map::row(1) - Map::row(0)) * row, (Map::row(2) - Map::row(1)) * row} {}
    template <class Pointer>
    CUTLASS_DEVICE void next(Pointer& at, int i) const {
      asm volatile("add.s64 %0, %0, %1;" : "+l"(at) : "l"(of[i % 2]));
    }
  };

  /// Brings a unit of `add` in; the calling lane's arrival at `full` follows its part.
  CUTLASS_DEVICE static void load(StreamParams const& p, UnitPlace const& u, uint32_t unit, uint64_t* full) {
    int const lane = lane_index();
    auto* const add = const_cast<char*>(static_cast<char const*>(p.cold.add));
    PlainWalk w = plain_walk<sizeof(T), kChannelsLast, kBytes>(p.plain.extent, u, add, p.cold.add_stride, lane);
    Steps const steps(w.row);
    if constexpr (kBytes == 4) {
      if constexpr (kShift) w.rows = w.rows_of_tile;
      for_each_line<Map>(w, unit, lane, [&](auto which, char const* from, int rows, uint32_t shared) {
        int bytes = 4;
        if constexpr (kShift) {
          uint32_t const odd = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) & 2;
          bytes = row_word_bytes(w.left, odd != 0);
          from -= odd;
          if (bytes == 0) rows = 0;
        }
        asm volatile("" : "+r"(shared));  // no addresses ahead of their use
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccesses; ++i) {
          if (Map::row(i) < rows) copy_word<kShift>(place(shared, which, i), from, bytes);
          steps.next(from, i);
        }
      });
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cute::cast_smem_ptr_to_uint(full))
                   : "memory");
    } else {
      // The copies above move 4 bytes at least: these pass through registers, a pair of lines at once.
      uint16_t v[2][kAccesses];
      for_each_line<Map>(w, unit, lane, [&](auto which, char const* from, int rows, uint32_t shared) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccesses; ++i) {
          v[which][i] = 0;
          if (Map::row(i) < rows) v[which][i] = __ldg(reinterpret_cast<uint16_t const*>(from));
          steps.next(from, i);
        }
        if constexpr (decltype(which)::value == 1) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2 * kAccesses; ++i) {
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(place(shared, i / kAccesses, i % kAccesses)),
                         "h"(v[i / kAccesses][i % kAccesses])
                         : "memory");
          }
        }
      });
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cute::cast_smem_ptr_to_uint(full)) : "memory");
    }
  }

  /// 4 bytes, or of them `bytes` with zeros behind.
  template <bool kPart>
  CUTLASS_DEVICE static void copy_word(uint32_t to, char const* from, int bytes) {
    if constexpr (kPart) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
    }
  }

  /// Writes a finished unit to y: a consumer warp, with registers for a pair of lines.
  CUTLASS_DEVICE static void store(StreamParams const& p, UnitPlace const& u, uint32_t unit, int lane) {
    auto* const y = static_cast<char*>(p.cold.y);
    PlainWalk const w = plain_walk<sizeof(T), kChannelsLast, kBytes>(p.plain.extent, u, y, p.cold.y_stride, lane);
    Steps const steps(w.row);
    Word v[2][kAccesses];
    int first_rows = 0;
    for_each_line<Map>(w, unit, lane, [&](auto which, char* to, int rows, uint32_t shared) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccesses; ++i) {
        if constexpr (kBytes == 4) {
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[which][i]) : "r"(place(shared, which, i)) : "memory");
        } else {
          asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v[which][i]) : "r"(place(shared, which, i)) : "memory");
        }
      }
      if constexpr (decltype(which)::value == 0) {
        first_rows = rows;
      } else {
        put(w, steps, to - w.second, first_rows, v[0]);
        put(w, steps, to, rows, v[1]);
      }
    });
  }

  CUTLASS_DEVICE static void put(PlainWalk const& w, Steps const& steps, char* to, int rows,
                                 Word const (&v)[kAccesses]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccesses; ++i) {
      if (Map::row(i) < rows) {
        if (Map::kElements == 1 || w.both) {
          *reinterpret_cast<Word*>(to) = v[i];
        } else {
          *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(v[i]);
        }
      }
      steps.next(to, i);
    }
  }
};

template <class T, bool kChannelsLast>
struct PlainUnits {
  CUTLASS_DEVICE static void load(StreamParams const& p, UnitPlace const& u, uint32_t unit, uint64_t* full) {
    if constexpr (sizeof(T) == 2 && !kChannelsLast) {
      if (p.plain.path.add == Path::kShift4) return PlainUnit<T, kChannelsLast, 4, true>::load(p, u, unit, full);
    }
    if (sizeof(T) == 4 || p.plain.path.add == Path::kPlain4) {
      PlainUnit<T, kChannelsLast, 4>::load(p, u, unit, full);
    } else if constexpr (sizeof(T) == 2) {
      PlainUnit<T, kChannelsLast, 2>::load(p, u, unit, full);
    }
  }

  CUTLASS_DEVICE static void store(StreamParams const& p, UnitPlace const& u, uint32_t unit, int lane) {
    if (sizeof(T) == 4 || p.plain.path.y == Path::kPlain4) {
      PlainUnit<T, kChannelsLast, 4>::store(p, u, unit, lane);
    } else if constexpr (sizeof(T) == 2) {
      PlainUnit<T, kChannelsLast, 2>::store(p, u, unit, lane);
    }
  }
};

}  // namespace convt3d::sm90::stream
