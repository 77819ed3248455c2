// SPDX-License-Identifier: Apache-2.0
//
// Units of add and y that the copy engine cannot address: rows that do not start at multiples of 16 bytes, outputs of a
// tile that are apart. Whole warps move them, a row's neighbours in neighbouring lanes, in accesses of 4 bytes, or of 2
// where 16-bit rows start anywhere. The unit looks the same in shared memory, so the consumers do not know.
//
// These warps are bound by the instructions that they issue, and have 48 registers: addresses run along, two lines at a
// time, and an access is itself, a comparison and an addition.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "sm90/stream/tile.hpp"

namespace convt3d::sm90::stream {

template <class T, bool kChannelsLast, int kBytes>
struct PlainUnit {
  static_assert(kBytes == 4 || (kBytes == 2 && sizeof(T) == 2));
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
  /// Bytes from access `i` of a line to the next.
  CUTLASS_DEVICE static int64_t step(int64_t row, int i) { return (Map::row(i + 1) - Map::row(i)) * row; }

  /// Brings a unit of `add` in; the calling lane's arrival at `full` follows its part.
  CUTLASS_DEVICE static void load(StreamParams const& p, UnitPlace const& u, uint32_t unit, uint64_t* full) {
    int const lane = lane_index();
    auto* const add = const_cast<char*>(static_cast<char const*>(p.cold.add));
    PlainWalk const w = plain_walk<sizeof(T), kChannelsLast, kBytes>(p.plain.extent, u, add, p.cold.add_stride, lane);
    if constexpr (kBytes == 4) {
      for_each_line<Map>(w, unit, lane, [&](auto which, char const* from, int rows, uint32_t shared) {
        asm volatile("" : "+l"(from), "+r"(shared));  // no addresses ahead of their use
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccesses; ++i) {
          if (Map::row(i) < rows) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place(shared, which, i)), "l"(from)
                         : "memory");
          }
          from += step(w.row, i);
        }
      });
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cute::cast_smem_ptr_to_uint(full))
                   : "memory");
    } else {
      // The copies above move 4 bytes at least: these pass through registers, a pair of lines at once.
      uint16_t v[2][kAccesses];
      for_each_line<Map>(w, unit, lane, [&](auto which, char const* from, int rows, uint32_t shared) {
        asm volatile("" : "+l"(from));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccesses; ++i) {
          v[which][i] = 0;
          if (Map::row(i) < rows) v[which][i] = __ldg(reinterpret_cast<uint16_t const*>(from));
          from += step(w.row, i);
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

  /// Fetches a unit of `add` into the L2 cache, for what passes through registers: few bytes of it are under way at a
  /// time.
  CUTLASS_DEVICE static void prefetch(StreamParams const& p, UnitPlace const& u) {
    if constexpr (kBytes == 2 && !kChannelsLast) {
      PlainExtent const& e = p.plain.extent;
      int64_t const* stride = p.cold.add_stride;
      int const lane = lane_index();
      int const h = (u.h + lane % 8) * p.stride_h + u.residue_h;
      int64_t const offset =
          u.n * stride[0] + (u.c + lane / 8) * stride[1] + u.d * stride[2] + h * stride[3] + u.column;
      T const* row = static_cast<T const*>(p.cold.add) + offset;
      int const last = min(2 * kTileW, e.columns.out_width - u.column) - 1;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int c = lane / 8; c < Map::kLines && u.c + c < e.out_channels; c += 4) {
        if (h < e.out_height) {
          asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
          asm volatile("prefetch.global.L2 [%0];" ::"l"(row + min(16, last)));
          asm volatile("prefetch.global.L2 [%0];" ::"l"(row + last));
        }
        row += 4 * stride[1];
      }
    }
  }

  /// Writes a finished unit to y: a consumer warp, with registers for a pair of lines.
  CUTLASS_DEVICE static void store(StreamParams const& p, UnitPlace const& u, uint32_t unit, int lane) {
    auto* const y = static_cast<char*>(p.cold.y);
    PlainWalk const w = plain_walk<sizeof(T), kChannelsLast, kBytes>(p.plain.extent, u, y, p.cold.y_stride, lane);
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
        put(w, to - w.second, first_rows, v[0]);
        put(w, to, rows, v[1]);
      }
    });
  }

  CUTLASS_DEVICE static void put(PlainWalk const& w, char* to, int rows, Word const (&v)[kAccesses]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccesses; ++i) {
      if (Map::row(i) < rows) {
        if (Map::kElements == 1 || w.both) {
          *reinterpret_cast<Word*>(to) = v[i];
        } else {
          *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(v[i]);
        }
      }
      to += step(w.row, i);
    }
  }
};

template <class T, bool kChannelsLast>
struct PlainUnits {
  CUTLASS_DEVICE static void load(StreamParams const& p, UnitPlace const& u, uint32_t unit, uint64_t* full) {
    if (sizeof(T) == 4 || p.plain.path.add == Path::kPlain4) {
      PlainUnit<T, kChannelsLast, 4>::load(p, u, unit, full);
    } else if constexpr (sizeof(T) == 2) {
      PlainUnit<T, kChannelsLast, 2>::load(p, u, unit, full);
    }
  }

  CUTLASS_DEVICE static bool prefetches(StreamParams const& p) {
    return sizeof(T) == 2 && !kChannelsLast && p.plain.path.add == Path::kPlain2 &&
           p.plain.extent.columns.output_step == 2 && p.cold.add_stride[4] == 1;
  }
  CUTLASS_DEVICE static void prefetch(StreamParams const& p, UnitPlace const& u) {
    if constexpr (sizeof(T) == 2) PlainUnit<T, kChannelsLast, 2>::prefetch(p, u);
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
