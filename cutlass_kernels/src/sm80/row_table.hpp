// SPDX-License-Identifier: Apache-2.0
//
// The rows of a thread block's tile, decoded once.
//
// A GEMM row is an output voxel of a residue class. Its address in x, y and add, and which taps stay inside x, are the
// same for every thread that touches the row: a mainloop tile has 4 to 8 loading threads per row and the epilogue 8 to
// 16. CUTLASS's iterators decode it in each of them, which for a class of one to eight taps costs as many instructions
// as the products. Here one thread per row decodes it into shared memory, before the mainloop.
#pragma once

#include <cstdint>

#include "sm80/kernel_params.hpp"

namespace convt3d::sm80 {

// Tap masks: bit t for D, kMaxTapsPerDim + r for H, 2 * kMaxTapsPerDim + s for W.
constexpr int kMaskH = kMaxTapsPerDim;
constexpr int kMaskW = 2 * kMaxTapsPerDim;
static_assert(3 * kMaxTapsPerDim <= 32, "one 32-bit mask per row");

struct alignas(16) Row {
  int64_t x;       // element offset of the voxel that tap 0 reads; outside x where the mask says so
  uint32_t mask;   // taps that stay inside x, per dimension
  int32_t inside;  // 0 for a row past the end
  int64_t y;       // element offsets of channel 0
  int64_t add;
};

template <class Mma>
struct RowCoordinates {
  int n, d, h, w;

  CUTLASS_DEVICE RowCoordinates(ClassParams<Mma> const& cls, int row) {
    int rest;
    cls.iterator_x.dhw_divmod(n, rest, row);
    cls.iterator_x.hw_divmod(d, rest, rest);
    cls.iterator_x.w_divmod(h, w, rest);
  }
};

// Bits [0, taps) where coordinate - tap * step lies in [0, size).
CUTLASS_DEVICE uint32_t tap_mask(int coordinate, int taps, int step, int size) {
  uint32_t mask = 0;
  for (int tap = 0; tap < taps; ++tap, coordinate -= step) {
    mask |= uint32_t(unsigned(coordinate) < unsigned(size)) << tap;
  }
  return mask;
}

template <class Mma>
CUTLASS_DEVICE Row decode_row(ClassParams<Mma> const& cls, int row) {
  if (row >= cls.rows) return {0, 0, 0, 0, 0};
  auto const& size = cls.size;
  RowCoordinates<Mma> const at(cls, row);
  int const z = at.d + size.pad_d, p = at.h + size.pad_h, q = at.w + size.pad_w;
  auto const& stride = cls.iterator_x.layout.stride();
  Row out;
  out.x = int64_t(at.n) * stride[3] + int64_t(z) * stride[2] + int64_t(p) * stride[1] + int64_t(q) * stride[0];
  out.mask = tap_mask(z, size.T, size.dilation_d, size.Z) | tap_mask(p, size.R, size.dilation_h, size.P) << kMaskH |
             tap_mask(q, size.S, size.dilation_w, size.Q) << kMaskW;
  out.inside = 1;
  out.y = cls.y.offset(at.n, at.d, at.h, at.w);
  out.add = cls.add.offset(at.n, at.d, at.h, at.w);
  return out;
}

}  // namespace convt3d::sm80
