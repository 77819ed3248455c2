// SPDX-License-Identifier: Apache-2.0
//
// What the emulations of the sm90 kernels' tiles share: the swizzle, small integer operands, and the definition.
#pragma once

#include <cstdint>

#include "convt3d/problem.hpp"

namespace convt3d::sm90 {

/// The copy engine's and wgmma's swizzle: bits of the absolute address.
inline int swizzled(int address, int width) { return address ^ (((address >> 7) & (width / 16 - 1)) << 4); }

/// x at (channel, d, h, w), of any sample.
inline int x_value(int64_t c, int64_t d, int64_t h, int64_t w) {
  return static_cast<int>((c * 7 + d * 5 + h * 3 + w * 11) % 13) - 6;
}

/// The weight of input channel `i`, output channel `o` and tap (a, b, c).
inline int weight_value(int64_t i, int64_t o, int64_t a, int64_t b, int64_t c) {
  return static_cast<int>((i * 3 + o * 5 + a * 7 + b * 11 + c * 2) % 9) - 4;
}

/// An output by the definition; those outside the tensor too, since the copy engine cuts them off.
inline int gather(Problem const& p, int c, int od, int oh, int ow) {
  int sum = 0;
  int const o[3] = {od, oh, ow};
  for (int a = 0; a < p.kernel[0]; ++a) {
    for (int b = 0; b < p.kernel[1]; ++b) {
      for (int e = 0; e < p.kernel[2]; ++e) {
        int const tap[3] = {a, b, e};
        int64_t i[3];
        bool live = true;
        for (int axis = 0; axis < 3; ++axis) {
          int64_t const v = o[axis] + p.padding[axis] - tap[axis];
          i[axis] = v / p.stride[axis];
          live = live && v >= 0 && v % p.stride[axis] == 0 && i[axis] < p.in_size[axis];
        }
        for (int k = 0; live && k < p.in_channels; ++k) {
          sum += x_value(k, i[0], i[1], i[2]) * weight_value(k, c, a, b, e);
        }
      }
    }
  }
  return sum;
}

}  // namespace convt3d::sm90
