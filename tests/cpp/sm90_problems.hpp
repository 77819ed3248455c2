// SPDX-License-Identifier: Apache-2.0
//
// Problems for the tests of the sm90 family's host code.
#pragma once

#include <string>
#include <vector>

#include "sm90/support.hpp"

namespace convt3d::sm90 {

inline Problem make(int batch, int in, int out, std::vector<int> size, std::vector<int> kernel,
                    std::vector<int> padding, std::vector<int> output_padding, convt3d_dtype dtype = CONVT3D_F32,
                    bool channels_last = false) {
  Problem p{};
  p.batch = batch;
  p.in_channels = in;
  p.out_channels = out;
  p.groups = 1;
  for (int i = 0; i < 3; ++i) {
    p.in_size[i] = size[i];
    p.kernel[i] = kernel[i];
    p.stride[i] = 2;
    p.padding[i] = padding[i];
    p.output_padding[i] = output_padding[i];
    p.dilation[i] = 1;
  }
  auto pack = [](int64_t* stride, Size5 const& s, bool last) {
    int const order[2][5] = {{0, 1, 2, 3, 4}, {0, 2, 3, 4, 1}};
    int64_t step = 1;
    for (int i = 4; i >= 0; --i) {
      stride[order[last][i]] = step;
      step *= s[order[last][i]];
    }
  };
  pack(p.x_stride, x_shape(p), channels_last);
  pack(p.y_stride, y_shape(p), channels_last);
  pack(p.add_stride, y_shape(p), channels_last);
  pack(p.weight_stride, weight_shape(p), false);
  p.bias_stride = 1;
  p.x_alignment = p.y_alignment = p.add_alignment = 16;
  p.has_bias = p.has_add = 1;
  p.dtype = dtype;
  p.precision = CONVT3D_TF32;
  return p;
}

inline Problem reference(convt3d_dtype dtype = CONVT3D_F32, bool last = false) {
  return make(128, 32, 64, {16, 16, 16}, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, dtype, last);
}

constexpr convt3d_device kH200{90, 132};

/// What supported() says against it; empty where it takes it.
inline std::string refusal(Problem const& p, convt3d_device const& device = kH200) {
  char text[256];
  Message message(text, sizeof text);
  Status const status = supported(p, device, message);
  return status == CONVT3D_OK ? "" : text;
}

}  // namespace convt3d::sm90
