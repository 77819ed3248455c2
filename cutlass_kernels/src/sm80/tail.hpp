// SPDX-License-Identifier: Apache-2.0
//
// The device side of the operator's tail, shared by both epilogues: bias, add and activation in fp32 with one
// rounding at the end, and the recomputation of outputs that came out nan.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"
#include "sm80/activate.hpp"
#include "sm80/row_table.hpp"

namespace convt3d::sm80 {

template <class Element>
CUTLASS_DEVICE float to_float(Element value) {
  return static_cast<float>(value);
}

// A thread block's tile as both epilogues see it; CUTLASS's callbacks get it in place of a problem shape.
template <class Mma>
struct TileContext {
  ClassParams<Mma> const* cls;
  typename Mma::IteratorA::Element const* x;
  TailParams const* tail;
  Row const* rows;  // shared memory, one entry per row of the tile
  int row_begin;    // of the tile in the GEMM
  int column_begin;
};

// act(acc + bias + add), or act(acc + bias) + add, over a fragment.
template <int kCount, class Values, class Bias, class Add>
CUTLASS_DEVICE void apply_tail(TailParams const& tail, Values& acc, Bias const& bias, Add const& add) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) acc[i] += bias[i];
  if (!tail.add_after) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) acc[i] += add[i];
  }
  activate<kCount>(tail.activation, tail.negative_slope, acc);
  if (tail.add_after) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) acc[i] += add[i];
  }
}

// Recomputes one output with plain fp32 multiply-adds over the taps that reach it, and stores it.
//
// The tensor cores return nan where fp32 arithmetic does not: a tap outside x is multiplied as a zero (0 * inf), and
// the split of inf into parts is (inf, nan). Every such case comes out as nan and every activation keeps nan, so it is
// enough to visit the outputs that are nan. This costs finite data nothing.
template <class Mma, class Element>
CUTLASS_DEVICE void recompute_output(ClassParams<Mma> const& cls, typename Mma::IteratorA::Element const* x,
                                     TailParams const& tail, int row, int channel) {
  using Operand = typename Mma::IteratorA::Element;
  auto const& size = cls.size;
  auto const [n, d, h, w] = RowCoordinates<Mma>(cls, row);

  float bias[1] = {0.f};
  float add[1] = {0.f};
  if (tail.bias) bias[0] = to_float(static_cast<Element const*>(tail.bias)[channel * tail.bias_stride]);
  if (tail.add) {
    int64_t const at = cls.add.offset(n, d, h, w) + channel * tail.add_channel_stride;
    add[0] = to_float(static_cast<Element const*>(tail.add)[at]);
  }
  if (bias[0] != bias[0] || add[0] != add[0]) return;  // nan whatever the convolution is

  float acc = 0.f;
  Operand const* filter = cls.filter + channel;
  int64_t const filter_k_stride = int64_t(size.T) * size.R * size.S * size.C;
  for (int t = 0; t < size.T; ++t) {
    int const z = d + size.pad_d - t * size.dilation_d;
    if (z < 0 || z >= size.Z) continue;
    for (int r = 0; r < size.R; ++r) {
      int const p = h + size.pad_h - r * size.dilation_h;
      if (p < 0 || p >= size.P) continue;
      for (int s = 0; s < size.S; ++s) {
        int const q = w + size.pad_w - s * size.dilation_w;
        if (q < 0 || q >= size.Q) continue;
        Operand const* voxel = x + cls.iterator_x.layout({n, z, p, q, 0});
        Operand const* tap = filter + int64_t((t * size.R + r) * size.S + s) * size.C;
#pragma unroll 1
        for (int k = 0; k < size.K; ++k) {
          Operand const value = voxel[k / Mma::Shape::kK * cls.x_block_step + k % Mma::Shape::kK];
          acc = fmaf(to_float(value), to_float(tap[k * filter_k_stride]), acc);
        }
      }
    }
  }

  float value[1] = {acc};
  apply_tail<1>(tail, value, bias, add);
  static_cast<Element*>(tail.y)[cls.y.offset(n, d, h, w) + channel * tail.y_channel_stride] = Element(value[0]);
}

}  // namespace convt3d::sm80
