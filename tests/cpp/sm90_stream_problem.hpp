// SPDX-License-Identifier: Apache-2.0
//
// Problems for the tests of the streaming kernel's host code.
#pragma once

#include <vector>

#include "cases.hpp"

namespace convt3d::sm90::stream {

inline Problem make(int in, int out, std::vector<int> size, std::vector<int> kernel, std::vector<int> padding,
                    std::vector<int> output_padding, convt3d_dtype dtype = CONVT3D_F32, bool channels_last = false,
                    std::vector<int> stride = {2, 2, 2}) {
  Problem p = test::cubic_problem(2, in, out, 1, 2, 2, 0, 0);
  for (int i = 0; i < 3; ++i) {
    p.in_size[i] = size[i];
    p.kernel[i] = kernel[i];
    p.stride[i] = stride[i];
    p.padding[i] = padding[i];
    p.output_padding[i] = output_padding[i];
  }
  p.dtype = dtype;
  test::pack(p, channels_last ? test::Layout::kNdhwc : test::Layout::kNcdhw);
  return p;
}

}  // namespace convt3d::sm90::stream
