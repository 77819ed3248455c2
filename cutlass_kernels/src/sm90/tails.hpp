// SPDX-License-Identifier: Apache-2.0
//
// What the kernels do with a convolution's value besides bias: activation and add.
#pragma once

#include "sm90/params.hpp"

namespace convt3d::sm90 {

// A tail is the activation as the epilogue applies it. kAny: all activations, and add_order may be "after"; otherwise
// it is "before".

/// none, relu and leaky_relu: t above zero and a multiple of t below.
struct LinearTail {
  static constexpr bool kAny = false;
  CUTLASS_DEVICE static float apply(EpilogueParams const& p, float t) {
    float const below = p.activation == CONVT3D_ACT_RELU ? 0.f : t * p.slope_below;  // relu of -inf is 0, not nan
    return t < 0.f ? below : t;
  }
};

/// t * hardswish(t) in three instructions: clamp(t + 3, 0, 6) / 6 is one saturating fma. It differs from the exact
/// value by 2^-25 of t^2 at most, and gives nan for nan and -inf as the plain form does.
struct XHardswishTail {
  static constexpr bool kAny = false;
  CUTLASS_DEVICE static float apply(EpilogueParams const&, float t) {
    return t * (t * __saturatef(fmaf(t, 1.0f / 6.0f, 0.5f)));
  }
};

/// Everything, chosen at run time, once for a unit.
struct AnyTail {
  static constexpr bool kAny = true;
};

/// activation(conv + add), or activation(conv) + add.
template <class Activation>
CUTLASS_DEVICE float in_order(float conv, float add, bool add_after, Activation const& activation) {
  float const t = activation(add_after ? conv : conv + add);
  return add_after ? t + add : t;
}

}  // namespace convt3d::sm90
