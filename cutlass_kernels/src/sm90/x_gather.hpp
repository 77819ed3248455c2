// SPDX-License-Identifier: Apache-2.0
//
// How the loader threads move x into a slab: the pieces that one thread reads and writes at a time. Both formats use
// 16-byte accesses on either side; for NCDHW a piece is transposed on the way.
//
// A gather has `Piece` (registers of kReads 16-byte reads), `Item` (a piece's place in global and shared memory),
// `item` (the place of piece `index`), `load` and `store`.
#pragma once

#include <type_traits>

#include "sm90/element.hpp"
#include "sm90/params.hpp"

namespace convt3d::sm90 {

/// Read in place of x outside the tensor.
static __device__ const uint4 kZeros = {0, 0, 0, 0};

/// x is read by every class and by neighbouring tiles; add and y stream past it in L2.
CUTLASS_DEVICE uint64_t keep_in_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

CUTLASS_DEVICE uint4 load_vector(void const* at, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at), "l"(policy));
  return v;
}

/// The slab that is being read: position (0, 0) relative to the tile, which may lie outside the tensor.
template <class T>
struct SlabSource {
  T const* corner;
  int h, w;    // its coordinates, h of the slab's first row, w of the tile's first column
  int height;  // end of the rows; zero for planes outside the tensor
  int groups;  // 16-byte groups of channels from the corner to the tensor's last channel
};

/// NCDHW: `vector` channels by `vector` W positions, read along W and written along the channels.
template <class T>
struct TransposingGather {
  static constexpr int kVector = Element<T>::kVector;
  static constexpr int kReads = kVector;                     // 16-byte reads of a piece
  static constexpr int kFastItems = sizeof(T) == 4 ? 3 : 1;  // of a thread, where a slab is one chunk
  static constexpr int kItems = 1;                           // elsewhere
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;

  struct Piece {
    uint4 v[kReads];
  };

  /// A piece's place, (channels, H row, W vector) with W fastest for coalesced reads.
  struct alignas(8) Item {
    int32_t offset;  // elements from the source's corner
    int32_t row;     // H row; far outside if there is no such item
    int16_t w;       // first W position relative to the tile
    int16_t group;   // of channels
    // Where its W positions go: addresses for fp32. SplitFloat: the first one before the swizzle, and a bit for each
    // position that the slab has. 16-bit types, which have eight: the first slab row, and these bits below the channel
    // group.
    uint32_t place[sizeof(T) == 4 && !kSplit ? 4 : 2];
  };

  CUTLASS_DEVICE static Item item(MainloopParams const& p, int index, int items) {
    int rest, group, column, row;
    p.divide_fastest(rest, column, index);
    p.divide_second(group, row, rest);
    return item_at(p, column, row, group, index < items);
  }

  CUTLASS_DEVICE static Item item_at(MainloopParams const& p, int column, int row, int group, bool exists) {
    Item it;
    it.w = static_cast<int16_t>(column * kVector + p.fetch_lo);
    it.group = static_cast<int16_t>(group);
    it.offset = static_cast<int32_t>(kVector * group * p.x_stride[1] + row * p.x_stride[3]) + it.w;
    it.row = exists ? row : (1 << 30);
    int const slab_column = it.w - p.window_lo[2];
    uint32_t wanted = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kVector; ++j) {
      bool const inside = exists && slab_column + j >= 0 && slab_column + j < p.slab_columns;
      if constexpr (sizeof(T) == 4 && !kSplit) {
        int const slab_row = inside ? (slab_column + j) * p.slab_pitch + row : p.slab_pitch * p.slab_columns;
        it.place[j] = slab_offset(slab_row, group % 8);
      } else {
        wanted |= static_cast<uint32_t>(inside) << j;
      }
    }
    if constexpr (kSplit) {
      it.place[0] = static_cast<uint32_t>(split_slab_address(slab_column * p.slab_pitch + row, group % 8));
      it.place[1] = wanted;
    } else if constexpr (sizeof(T) == 2) {
      it.place[0] = static_cast<uint32_t>(slab_column * p.slab_pitch + row);
      it.place[1] = static_cast<uint32_t>(group) << kVector | wanted;
    }
    return it;
  }

  /// What a thread keeps of its first item, and the item `i` steps of rows further. Lanes run along W and over the rows
  /// of a step: whole lines are read, and stores do not conflict.
  struct Kept {
    int32_t offset;
    uint32_t rest;  // w, row (255 if there is no such item), group and wanted positions in 16, 8, 4 and 4 bits

    /// Called anew for each slab: otherwise the parts would be kept in registers, where there are none to spare.
    CUTLASS_DEVICE Kept unpacked() const {
      Kept kept = *this;
      asm volatile("" : "+r"(kept.rest));
      return kept;
    }
  };

  CUTLASS_DEVICE static Kept first_item(MainloopParams const& p, int thread) {
    int const rest = thread / p.fetch_count;
    int const group = rest / p.item_rows;
    Item const it = item_at(p, thread % p.fetch_count, rest % p.item_rows, group, group < p.groups);
    return {it.offset, static_cast<uint32_t>(it.w) << 16 | static_cast<uint32_t>(min(it.row, 255)) << 8 |
                           static_cast<uint32_t>(it.group) << 4 | it.place[1]};
  }
  CUTLASS_DEVICE static Item further(MainloopParams const& p, Kept const& kept, int i) {
    uint32_t const rest = kept.rest;
    Item it;
    it.w = static_cast<int16_t>(static_cast<int32_t>(rest) >> 16);
    it.row = static_cast<int32_t>(rest >> 8 & 255) + i * p.item_rows;
    it.group = static_cast<int16_t>(rest >> 4 & 15);
    it.offset = kept.offset + i * p.item_rows * static_cast<int32_t>(p.x_stride[3]);
    it.place[0] = static_cast<uint32_t>(split_slab_address((it.w - p.window_lo[2]) * p.slab_pitch + it.row, it.group));
    it.place[1] = it.row < p.rows ? rest & 15 : 0;
    return it;
  }

  CUTLASS_DEVICE static void load(MainloopParams const& p, SlabSource<T> const& from, Item const& it, uint64_t policy,
                                  Piece& piece) {
    bool const live = static_cast<unsigned>(from.h + it.row) < static_cast<unsigned>(from.height) &&
                      static_cast<unsigned>(from.w + it.w) < static_cast<unsigned>(p.in_size[2]) &&
                      it.group < from.groups;
    T const* at = live ? from.corner + it.offset : reinterpret_cast<T const*>(&kZeros);
    int64_t const step = live ? p.x_stride[1] : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kReads; ++c) piece.v[c] = load_vector(at + c * step, policy);
  }

  template <bool kAnyValue>
  CUTLASS_DEVICE static void store(MainloopParams const& p, OperandScale<T> const& scale, uint32_t stage,
                                   Item const& it, Piece const& piece) {
    uint32_t const* v = reinterpret_cast<uint32_t const*>(&piece);
    [[maybe_unused]] uint32_t const dump = p.slab_pitch * p.slab_columns * kSlabRowBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kVector; ++j) {
      uint32_t word[4];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 4; ++c) {
        if constexpr (sizeof(T) == 4) {
          word[c] = v[4 * c + j];
        } else {
          // Channels 2 c and 2 c + 1 of W position j.
          word[c] = __byte_perm(v[8 * c + j / 2], v[8 * c + 4 + j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
        }
      }
      uint4 const out = make_uint4(word[0], word[1], word[2], word[3]);
      if constexpr (kSplit) {
        uint32_t const at = (it.place[1] >> j & 1) != 0 ? it.place[0] + j * p.slab_pitch * kSlabRowBytes : dump;
        Operands<T>::template store<kAnyValue>(scale, swizzled_slab(stage + at), out);
      } else if constexpr (sizeof(T) == 4) {
        Operands<T>::template store<kAnyValue>(scale, stage + it.place[j], out);
      } else if ((it.place[1] >> j & 1) != 0) {
        int const row = static_cast<int>(it.place[0]) + j * p.slab_pitch;
        store_shared(stage + slab_offset(row, static_cast<int>(it.place[1] >> kVector)), out);
      }
    }
  }
};

/// NCDHW, element by element: x that cannot be read in vectors. Reads of a warp run along W.
template <class T>
struct ElementGather {
  static constexpr int kVector = Element<T>::kVector;
  static constexpr int kReads = 1;

  struct Piece {
    uint4 v[1];
  };

  /// (channels, H row, W position).
  struct Item {
    int32_t offset, row;
    int16_t w, group;
    uint32_t address;
  };

  CUTLASS_DEVICE static Item item(MainloopParams const& p, int index, int items) {
    Item it;
    int rest, group, column, row;
    p.divide_fastest(rest, column, index);
    p.divide_second(group, row, rest);
    bool const exists = index < items;
    it.w = static_cast<int16_t>(column + p.fetch_lo);
    it.group = static_cast<int16_t>(group);
    it.offset = static_cast<int32_t>(kVector * group * p.x_stride[1] + row * p.x_stride[3]) + it.w;
    it.row = exists ? row : (1 << 30);
    int const slab_column = it.w - p.window_lo[2];
    it.address = Operands<T>::slab_offset(exists ? slab_column * p.slab_pitch + row : p.slab_pitch * p.slab_columns,
                                          exists ? group : 0);
    return it;
  }

  CUTLASS_DEVICE static void load(MainloopParams const& p, SlabSource<T> const& from, Item const& it, uint64_t,
                                  Piece& piece) {
    bool const live = static_cast<unsigned>(from.h + it.row) < static_cast<unsigned>(from.height) &&
                      static_cast<unsigned>(from.w + it.w) < static_cast<unsigned>(p.in_size[2]) &&
                      it.group < from.groups;
    uint32_t words[4] = {0, 0, 0, 0};
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kVector; ++c) {
      uint32_t const bits = live ? Element<T>::bits(load_constant(from.corner + it.offset + c * p.x_stride[1])) : 0;
      words[c * sizeof(T) / 4] |= bits << (c * sizeof(T) % 4 * 8);
    }
    piece.v[0] = make_uint4(words[0], words[1], words[2], words[3]);
  }

  template <bool kAnyValue>
  CUTLASS_DEVICE static void store(MainloopParams const&, OperandScale<T> const& scale, uint32_t stage, Item const& it,
                                   Piece const& piece) {
    Operands<T>::template store<kAnyValue>(scale, stage + it.address, piece.v[0]);
  }
};

/// NDHWC: 16 bytes of channels of one position, read and written alike.
template <class T>
struct RowGather {
  static constexpr int kVector = Element<T>::kVector;
  static constexpr int kReads = 1;
  static constexpr int kFastItems = sizeof(T) == 4 ? 9 : 5;
  static constexpr int kItems = 4;

  struct Piece {
    uint4 v[1];
  };

  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;

  /// (H row, W position, channels) with channels fastest.
  struct Item {
    int32_t offset;  // elements from the source's corner
    int16_t row, w;  // as above
    uint32_t place;  // address; of SplitFloat before the swizzle
  };

  CUTLASS_DEVICE static Item item(MainloopParams const& p, int index, int items) {
    Item it;
    int rest, group, column, row;
    p.divide_fastest(rest, group, index);
    p.divide_second(row, column, rest);
    bool const exists = index < items;
    it.w = static_cast<int16_t>(column + p.fetch_lo);
    it.row = static_cast<int16_t>(exists ? row : -100);
    it.offset = static_cast<int32_t>(kVector * group + row * p.x_stride[3] + it.w * p.x_stride[4]);
    int const slab_column = it.w - p.window_lo[2];
    int const place = kPositionsFirst<T, true> ? row * p.slab_pitch + slab_column : slab_column * p.slab_pitch + row;
    int const slab_row = exists ? place : p.slab_pitch * p.slab_columns;
    if constexpr (kSplit) {
      it.place = static_cast<uint32_t>(split_slab_address(slab_row, exists ? group : 0));
    } else {
      it.place = static_cast<uint32_t>(slab_offset(slab_row, exists ? group : 0));
    }
    return it;
  }

  /// A thread's first item, and the one `i` steps of rows further.
  struct Kept : Item {
    CUTLASS_DEVICE Kept const& unpacked() const { return *this; }
  };
  CUTLASS_DEVICE static Kept first_item(MainloopParams const& p, int thread) {
    Kept it{item(p, thread, p.item_rows * p.groups * p.fetch_count)};
    if (it.row < 0) it.row = 1 << 14;  // none of the further ones exists either
    return it;
  }
  CUTLASS_DEVICE static Item further(MainloopParams const& p, Item it, int i) {
    it.row = static_cast<int16_t>(it.row + i * p.item_rows);
    it.offset += i * p.item_rows * static_cast<int32_t>(p.x_stride[3]);
    it.place += i * p.item_rows * kSlabRowBytes;
    if (it.row >= p.rows) it.place = p.slab_pitch * p.slab_columns * kSlabRowBytes;
    return it;
  }

  /// Of an item's channels.
  CUTLASS_DEVICE static int group_of(Item const& it) {
    if constexpr (kSplit) {
      return static_cast<int>(it.place % kSlabRowBytes / 8);
    } else {
      return slab_group(static_cast<int>(it.place));
    }
  }

  CUTLASS_DEVICE static void load(MainloopParams const& p, SlabSource<T> const& from, Item const& it, uint64_t policy,
                                  Piece& piece) {
    bool const live = it.row >= 0 && static_cast<unsigned>(from.h + it.row) < static_cast<unsigned>(from.height) &&
                      static_cast<unsigned>(from.w + it.w) < static_cast<unsigned>(p.in_size[2]) &&
                      group_of(it) < from.groups;
    T const* at = live ? from.corner + it.offset : reinterpret_cast<T const*>(&kZeros);
    piece.v[0] = load_vector(at, policy);
  }

  template <bool kAnyValue>
  CUTLASS_DEVICE static void store(MainloopParams const&, OperandScale<T> const& scale, uint32_t stage, Item const& it,
                                   Piece const& piece) {
    uint32_t const at = stage + it.place;
    Operands<T>::template store<kAnyValue>(scale, kSplit ? swizzled_slab(at) : at, piece.v[0]);
  }
};

}  // namespace convt3d::sm90
