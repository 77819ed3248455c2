// SPDX-License-Identifier: Apache-2.0
//
// The activations, computed in fp32 on the sum t = conv + bias (+ add). One functor and one line of the table
// below per activation; codes, names, the run-time switch and the compile-time dispatch follow from the table.
//
// Each equals PyTorch's definition in exact arithmetic and its behaviour on inf and nan. Where the usual fp32
// formula loses digits (1 + erf, 1 + tanh near -1; 1 + exp(-t) past its overflow), an equal form that does not
// is used, so that every result is within a few units in the last place of the exact one. nan in gives nan out.
#pragma once

#include <cmath>

#include "convt3d/convt3d.h"
#include "convt3d/elementary.hpp"
#include "convt3d/host_device.hpp"

namespace convt3d {

namespace activation {

/// 1 / (1 + exp(-t)). The exponential never overflows and nothing cancels, on either side.
CONVT3D_HOST_DEVICE float stable_sigmoid(float t) {
  float const e = expf(-fabsf(t));
  return quotient(t < 0.0f ? e : 1.0f, 1.0f + e);
}

/// t
struct None {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return t; }
};

/// max(t, 0), written so that nan stays (fmaxf would drop it).
struct Relu {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return t < 0.0f ? 0.0f : t; }
};

/// t where t > 0, negative_slope * t elsewhere.
struct LeakyRelu {
  CONVT3D_HOST_DEVICE float operator()(float t, float negative_slope) const {
    return t > 0.0f ? t : t * negative_slope;
  }
};

/// t where t >= 0, exp(t) - 1 elsewhere (alpha = 1).
struct Elu {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return t >= 0.0f ? t : expm1_of_negative(t); }
};

/// t * (1 + erf(t / sqrt(2))) / 2, the exact form, without its cancellation below zero.
struct Gelu {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return t * normal_distribution(t); }
};

/// t * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (t + 0.044715 t^3); equal to t * sigmoid(2 u).
struct GeluTanh {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const {
    constexpr float kTwoSqrtTwoOverPi = 1.59576912160573071176f;
    constexpr float kCubic = 0.044715f;
    return t * stable_sigmoid(kTwoSqrtTwoOverPi * (t + kCubic * (t * t * t)));
  }
};

/// t * sigmoid(t)
struct Silu {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return t * stable_sigmoid(t); }
};

/// 1 / (1 + exp(-t))
struct Sigmoid {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return stable_sigmoid(t); }
};

/// tanh(t)
struct Tanh {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const { return tanhf(t); }
};

/// t * min(max(t + 3, 0), 6) / 6. fminf and fmaxf drop a nan, but the factor t brings it back. The clamped term
/// is scaled first: 6 * (1 / 6) rounds to exactly 1, so large t passes unchanged instead of overflowing.
struct Hardswish {
  CONVT3D_HOST_DEVICE float operator()(float t, float) const {
    constexpr float kOneSixth = 1.0f / 6.0f;
    return t * (fminf(fmaxf(t + 3.0f, 0.0f), 6.0f) * kOneSixth);
  }
};

/// t * hardswish(t)
struct XHardswish {
  CONVT3D_HOST_DEVICE float operator()(float t, float negative_slope) const {
    return t * Hardswish{}(t, negative_slope);
  }
};

}  // namespace activation

/// The table: ENTRY(enumerator of convt3d_activation, name, functor), in the order of the codes.
#define CONVT3D_ACTIVATIONS(ENTRY)                       \
  ENTRY(CONVT3D_ACT_NONE, "none", None)                  \
  ENTRY(CONVT3D_ACT_RELU, "relu", Relu)                  \
  ENTRY(CONVT3D_ACT_LEAKY_RELU, "leaky_relu", LeakyRelu) \
  ENTRY(CONVT3D_ACT_ELU, "elu", Elu)                     \
  ENTRY(CONVT3D_ACT_GELU, "gelu", Gelu)                  \
  ENTRY(CONVT3D_ACT_GELU_TANH, "gelu_tanh", GeluTanh)    \
  ENTRY(CONVT3D_ACT_SILU, "silu", Silu)                  \
  ENTRY(CONVT3D_ACT_SIGMOID, "sigmoid", Sigmoid)         \
  ENTRY(CONVT3D_ACT_TANH, "tanh", Tanh)                  \
  ENTRY(CONVT3D_ACT_HARDSWISH, "hardswish", Hardswish)   \
  ENTRY(CONVT3D_ACT_X_HARDSWISH, "x_hardswish", XHardswish)

/// Calls `function` with the functor of `code`: the switch stands outside the caller's inner loop, which is
/// compiled once per activation. Functors take (t, negative_slope). A code out of range acts as none;
/// convt3d_validate has refused it before.
CONVT3D_NO_EXEC_CHECK
template <class Function>
CONVT3D_HOST_DEVICE void with_activation(int code, Function&& function) {
  switch (code) {
#define CONVT3D_CASE(enumerator, name, functor) \
  case enumerator:                              \
    function(activation::functor{});            \
    return;
    CONVT3D_ACTIVATIONS(CONVT3D_CASE)
#undef CONVT3D_CASE
    default:
      function(activation::None{});
  }
}

/// act(t), chosen per element. `negative_slope` is read by leaky_relu alone.
CONVT3D_HOST_DEVICE float apply_activation(int code, float t, float negative_slope) {
  switch (code) {
#define CONVT3D_CASE(enumerator, name, functor) \
  case enumerator:                              \
    return activation::functor{}(t, negative_slope);
    CONVT3D_ACTIVATIONS(CONVT3D_CASE)
#undef CONVT3D_CASE
    default:
      return t;
  }
}

/// Whether an activation is t above zero and a multiple of t below.
CONVT3D_HOST_DEVICE constexpr bool is_linear(int code) {
  return code == CONVT3D_ACT_NONE || code == CONVT3D_ACT_RELU || code == CONVT3D_ACT_LEAKY_RELU;
}

/// Name of an activation, or null for a code out of range.
constexpr char const* activation_name(int code) {
  switch (code) {
#define CONVT3D_CASE(enumerator, name, functor) \
  case enumerator:                              \
    return name;
    CONVT3D_ACTIVATIONS(CONVT3D_CASE)
#undef CONVT3D_CASE
    default:
      return nullptr;
  }
}

namespace activation {
// The table lists every code of convt3d.h once, in order.
#define CONVT3D_CODE(enumerator, name, functor) enumerator,
constexpr int kCodes[] = {CONVT3D_ACTIVATIONS(CONVT3D_CODE)};
#undef CONVT3D_CODE
constexpr bool codes_are_consecutive() {
  for (int i = 0; i < CONVT3D_ACT_COUNT; ++i) {
    if (kCodes[i] != i) return false;
  }
  return true;
}
static_assert(sizeof(kCodes) / sizeof(kCodes[0]) == CONVT3D_ACT_COUNT, "activation.hpp and convt3d.h disagree");
static_assert(codes_are_consecutive(), "activation.hpp and convt3d.h disagree on the order of the activations");
}  // namespace activation

}  // namespace convt3d
