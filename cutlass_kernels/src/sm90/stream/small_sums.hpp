// SPDX-License-Identifier: Apache-2.0
//
// Tiny values of x in ieee mode. Their parts lack digits (split.hpp), which can matter only to an output that is small
// itself. The pre-kernel counts them plane by plane, and small sums of items that read such a plane become nan, so that
// the cold path computes them again.
#pragma once

#include "sm90/stream/tile.hpp"

namespace convt3d::sm90::stream {

template <bool kChannelsLast, int kWidth>
struct SmallSums {
  /// What lane `lane` knows about the planes that group `group` reads; to be added up over the warp.
  CUTLASS_DEVICE static uint32_t tiny_of_plane(StreamParams const& params, Item const& item, int group, int lane) {
    DeviceClass const& cls = params.cls[item.cls];
    int const plane = item.d + group + cls.depth_lo + lane;
    bool const read = lane < cls.depth_count && plane >= 0 && plane < params.x.in_size[0];
    return read ? __ldca(params.split.tiny_x + item.n * params.x.in_size[0] + plane) : 0;
  }

  /// Makes nan of the sums, at both operands' scale, that `tiny` values may have spoilt. Returns whether there are any
  /// among the outputs; what a tile computes beside them is zero.
  CUTLASS_DEVICE static bool spoil(StreamParams const& params, Item const& item, int group, int warp, int lane,
                                   uint32_t tiny, float (&acc)[2][4 * kWidth]) {
    Residues const r = residues(params, item.cls);
    uint32_t const products = params.split.products;
    float const floor = kTinyFloor * static_cast<float>(tiny < kManyTiny ? min(tiny, products) : products);
    bool const plane = params.stride_d * (item.d + group) + r.d < params.cold.out_size[0];
    float least[2][2];  // of a channel and H position; nothing is below zero
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const c = item.channel + row_channel(kChannelsLast, warp % 4 * 16 + half * 8 + lane / 4);
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < 2; ++b) {
        int const oh = params.stride_h * (item.h * kTileH + lane % 4 * 2 + b) + r.h;
        bool const inside = plane && c < params.epilogue.out_channels && oh < params.cold.out_size[1];
        least[half][b] = inside ? floor : 0.f;
      }
    }
    Columns const& columns = params.plain.extent.columns;
    bool found = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kWidth; ++i) {
      bool const inside = columns.at(item.w * 2 * kWidth + i, r.pair).inside;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        float& sum = acc[i % 2][i / 2 * 4 + k];
        bool const small = inside && fabsf(sum) < least[k / 2][k % 2];
        found = found || small;
        sum = small ? __int_as_float(0x7fffffff) : sum;
      }
    }
    return found;
  }
};

}  // namespace convt3d::sm90::stream
