// SPDX-License-Identifier: Apache-2.0
//
// The derivative of each activation, times the gradient of its result: (grad, t, negative_slope) -> grad * act'(t),
// in fp32. One specialisation of Gradient per functor of activation.hpp, so a missing one does not compile; codes,
// names and the dispatch are that table's.
//
// At the kinks, and where t is nan, each is what PyTorch's own backward operator gives: hardswish' is 0 at -3 and 1
// at 3, relu' is 0 at 0. Elsewhere the forms are chosen so that nothing cancels far out: 1 - tanh(t)^2 would.
#pragma once

#include <cmath>

#include "convt3d/activation.hpp"

namespace convt3d {

namespace activation {

/// sigmoid(t) and its derivative, which is sigmoid(t) * sigmoid(-t).
struct SigmoidAndSlope {
  float value;
  float slope;
};

CONVT3D_HOST_DEVICE SigmoidAndSlope sigmoid_and_slope(float t) {
  float const e = expf(-fabsf(t));
  float const r = 1.0f / (1.0f + e);
  return {t < 0.0f ? e * r : r, e * r * r};
}

template <class Act>
struct Gradient;

template <>
struct Gradient<None> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float, float) const { return grad; }
};

/// 0 rather than grad * 0, which is nan where grad is infinite.
template <>
struct Gradient<Relu> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const { return t <= 0.0f ? 0.0f : grad; }
};

template <>
struct Gradient<LeakyRelu> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float negative_slope) const {
    return t > 0.0f ? grad : grad * negative_slope;
  }
};

template <>
struct Gradient<Elu> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const { return t <= 0.0f ? grad * expf(t) : grad; }
};

/// Phi(t) + t * phi(t), with Phi the normal distribution and phi its density.
template <>
struct Gradient<Gelu> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const {
    constexpr float kSqrtHalf = 0.70710678118654752440f;
    constexpr float kDensityAtZero = 0.39894228040143267794f;
    return grad * (0.5f * erfcf(-t * kSqrtHalf) + t * (kDensityAtZero * expf(-0.5f * t * t)));
  }
};

/// Of t * sigmoid(v) with v = 2 sqrt(2 / pi) * (t + 0.044715 t^3).
template <>
struct Gradient<GeluTanh> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const {
    constexpr float kTwoSqrtTwoOverPi = 1.59576912160573071176f;
    constexpr float kCubic = 0.044715f;
    float const square = t * t;
    SigmoidAndSlope const s = sigmoid_and_slope(kTwoSqrtTwoOverPi * (t + kCubic * (square * t)));
    return grad * (s.value + t * s.slope * (kTwoSqrtTwoOverPi * (1.0f + 3.0f * kCubic * square)));
  }
};

template <>
struct Gradient<Silu> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const {
    SigmoidAndSlope const s = sigmoid_and_slope(t);
    return grad * (s.value + t * s.slope);
  }
};

template <>
struct Gradient<Sigmoid> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const { return grad * sigmoid_and_slope(t).slope; }
};

/// tanh(t) is 2 sigmoid(2 t) - 1.
template <>
struct Gradient<Tanh> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const {
    return grad * (4.0f * sigmoid_and_slope(2.0f * t).slope);
  }
};

template <>
struct Gradient<Hardswish> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const {
    if (t <= -3.0f) return 0.0f;
    return t < 3.0f ? grad * (t * (1.0f / 3.0f) + 0.5f) : grad;
  }
};

/// The product rule, hardswish(t) + t * hardswish'(t): t * (t / 2 + 1) between the kinks and 2 t from 3 on. Below -3
/// the product with 0 keeps the nan that minus infinity gives in the forward pass as well.
template <>
struct Gradient<XHardswish> {
  CONVT3D_HOST_DEVICE float operator()(float grad, float t, float) const {
    return grad * (t * (t <= -3.0f ? 0.0f : t >= 3.0f ? 2.0f : 0.5f * t + 1.0f));
  }
};

}  // namespace activation

/// grad * act'(t), chosen per element.
CONVT3D_HOST_DEVICE float apply_activation_gradient(int code, float grad, float t, float negative_slope) {
  float result = grad;
  with_activation(code, [&](auto act) { result = activation::Gradient<decltype(act)>{}(grad, t, negative_slope); });
  return result;
}

}  // namespace convt3d
