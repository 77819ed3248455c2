// SPDX-License-Identifier: Apache-2.0
//
// The activation of several sums of a thread, chosen at run time once for all of them.
#pragma once

#include "convt3d/activation.hpp"

namespace convt3d::sm80 {

/// Out of line: in place, the longer activations would be most of a kernel.
static __device__ __noinline__ float4 activate_four(int code, float4 v, float negative_slope) {
  with_activation(code, [&](auto act) {
    v = make_float4(act(v.x, negative_slope), act(v.y, negative_slope), act(v.z, negative_slope),
                    act(v.w, negative_slope));
  });
  return v;
}

/// The first `kCount` of `values`. `kQuick`: the activation is one of few instructions (patch/geometry.hpp, is_quick);
/// then there is no call, which costs registers.
template <int kCount, bool kQuick = false, class Values>
__device__ __forceinline__ void activate(int code, float negative_slope, Values& values) {
  auto const each = [&](auto act) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = act(values[i], negative_slope);
  };
  switch (code) {
    case CONVT3D_ACT_NONE:
      return;
    case CONVT3D_ACT_RELU:
      return each(activation::Relu{});
    case CONVT3D_ACT_LEAKY_RELU:
      return each(activation::LeakyRelu{});
    case CONVT3D_ACT_HARDSWISH:
      return each(activation::Hardswish{});
    case CONVT3D_ACT_X_HARDSWISH:
      return each(activation::XHardswish{});
    default:
      break;
  }
  if constexpr (!kQuick) {
    auto const at = [&](int i) { return i < kCount ? float(values[i]) : 0.f; };
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float4 const v = activate_four(code, make_float4(at(i), at(i + 1), at(i + 2), at(i + 3)), negative_slope);
      values[i] = v.x;
      if (i + 1 < kCount) values[i + 1] = v.y;
      if (i + 2 < kCount) values[i + 2] = v.z;
      if (i + 3 < kCount) values[i + 3] = v.w;
    }
  }
}

}  // namespace convt3d::sm80
