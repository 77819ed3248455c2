// SPDX-License-Identifier: Apache-2.0
//
// An add whose 16-bit rows start anywhere (NCDHW). Its units hold the aligned words that its rows lie in, since words
// are the least that can be copied asynchronously: an odd row, one that starts in the upper half of a word, is moved on
// by one element, and its 32nd is beyond the last word. The consumers, who have whole rows in their hands, shift them
// back, and read the 32nd element themselves.
#pragma once

#include "sm90/stream/tile.hpp"

namespace convt3d::sm90::stream {

/// Of a consumer thread's two channels: the rows of add that it reads.
template <class T>
struct Shift {
  static constexpr uint32_t kEven = 0x3210, kOdd = 0x5432;
  uint32_t selector[2];  // of __byte_perm: a word and the next one to two elements of the row
  uint32_t last[2][2];   // the 32nd element of an odd row, by channel and H position modulo 2

  CUTLASS_DEVICE static Shift make(StreamParams const& p, Item const& it, int warp, int lane) {
    constexpr int kLast = 2 * kTileW - 1;
    Residues const r = residues(p, it.cls);
    PlainExtent const& e = p.plain.extent;
    int64_t const* stride = p.cold.add_stride;
    int const position = it.h * kTileH + lane % 4 * 2;
    int const d = p.stride_d * (it.d + warp / 4) + r.d;
    int const column = it.w * 2 * kTileW;
    int const rows = d < p.epilogue.out_depth && column + kLast < e.columns.out_width ? e.heights[r.h] - position : 0;
    int64_t const plane = it.n * stride[0] + d * stride[2] + (position * p.stride_h + r.h) * stride[3] + column;
    Shift v{};
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const c = it.channel + row_channel(false, warp % 4 * 16 + half * 8 + lane / 4);
      auto const* const row = static_cast<uint16_t const*>(p.cold.add) + plane + c * stride[1];
      bool const odd = (static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row)) & 2) != 0;
      v.selector[half] = odd ? kOdd : kEven;
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < 2; ++b) {
        if (odd && b < rows && c < e.out_channels) v.last[half][b] = __ldg(row + kLast + b * p.stride_h * stride[3]);
      }
    }
    return v;
  }
};

/// Vectors of words of a row, and the word after them, to elements.
template <int kCount>
CUTLASS_DEVICE void shift(uint4 (&v)[kCount], uint32_t next, uint32_t selector) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    uint32_t const after = i + 1 < kCount ? v[i + 1].x : next;
    v[i] = make_uint4(__byte_perm(v[i].x, v[i].y, selector), __byte_perm(v[i].y, v[i].z, selector),
                      __byte_perm(v[i].z, v[i].w, selector), __byte_perm(v[i].w, after, selector));
  }
}

}  // namespace convt3d::sm90::stream
