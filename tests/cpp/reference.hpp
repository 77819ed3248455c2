// SPDX-License-Identifier: Apache-2.0
//
// The operator from its definition, in double: the scatter that PyTorch documents, and the activations.
// Tensors are dense here, in logical order (N, C, D, H, W), whatever the layout under test is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "convt3d/problem.hpp"

namespace convt3d::test {

using Tensor = std::vector<double>;

/// Calls f(index[5]) for every element, in logical order.
template <class Function>
void for_each_index(Size5 const& shape, Function&& f) {
  int64_t index[5];
  for (index[0] = 0; index[0] < shape[0]; ++index[0])
    for (index[1] = 0; index[1] < shape[1]; ++index[1])
      for (index[2] = 0; index[2] < shape[2]; ++index[2])
        for (index[3] = 0; index[3] < shape[3]; ++index[3])
          for (index[4] = 0; index[4] < shape[4]; ++index[4]) f(index);
}

/// Position of an element in memory, in elements.
inline int64_t offset_of(int64_t const* index, int64_t const* stride) {
  int64_t offset = 0;
  for (int axis = 0; axis < 5; ++axis) offset += index[axis] * stride[axis];
  return offset;
}

/// Elements from the first to the last, both included; 0 for an empty tensor.
inline int64_t span_of(Size5 const& shape, int64_t const* stride) {
  int64_t last = 0;
  for (int axis = 0; axis < 5; ++axis) {
    if (shape[axis] == 0) return 0;
    last += (shape[axis] - 1) * stride[axis];
  }
  return last + 1;
}

/// conv_transpose3d(x, weight) as PyTorch defines it: input i adds weight tap k times x to output
/// i * stride - padding + k * dilation, if that lies inside. `magnitude` receives sum |x| |w| if not null.
inline Tensor scatter_reference(Problem const& p, Tensor const& x, Tensor const& weight, Tensor* magnitude = nullptr) {
  Size5 const xs = x_shape(p), ys = y_shape(p);
  Tensor y(static_cast<size_t>(element_count(ys)), 0.0);
  if (magnitude != nullptr) magnitude->assign(y.size(), 0.0);
  int64_t const cin_group = p.in_channels / p.groups, cout_group = p.out_channels / p.groups;
  size_t x_at = 0;
  for_each_index(xs, [&](int64_t const* i) {
    double const value = x[x_at++];
    int64_t const group = i[1] / cin_group;
    int64_t k[3];
    for (k[0] = 0; k[0] < p.kernel[0]; ++k[0])
      for (k[1] = 0; k[1] < p.kernel[1]; ++k[1])
        for (k[2] = 0; k[2] < p.kernel[2]; ++k[2]) {
          int64_t o[3];
          bool inside = true;
          for (int axis = 0; axis < 3; ++axis) {
            o[axis] = i[2 + axis] * p.stride[axis] - p.padding[axis] + k[axis] * p.dilation[axis];
            inside = inside && o[axis] >= 0 && o[axis] < ys[2 + axis];
          }
          if (!inside) continue;
          for (int64_t c = 0; c < cout_group; ++c) {
            int64_t const w_at =
                (((i[1] * cout_group + c) * p.kernel[0] + k[0]) * p.kernel[1] + k[1]) * p.kernel[2] + k[2];
            int64_t const y_at =
                (((i[0] * ys[1] + group * cout_group + c) * ys[2] + o[0]) * ys[3] + o[1]) * ys[4] + o[2];
            double const product = value * weight[static_cast<size_t>(w_at)];
            y[static_cast<size_t>(y_at)] += product;
            if (magnitude != nullptr) (*magnitude)[static_cast<size_t>(y_at)] += std::abs(product);
          }
        }
  });
  return y;
}

/// The activations from their textbook formulas, in double.
inline double reference_activation(int code, double t, double negative_slope) {
  switch (code) {
    case CONVT3D_ACT_RELU:
      return t < 0 ? 0 : t;
    case CONVT3D_ACT_LEAKY_RELU:
      return t > 0 ? t : negative_slope * t;
    case CONVT3D_ACT_ELU:
      return t > 0 ? t : std::expm1(t);
    case CONVT3D_ACT_GELU:
      return 0.5 * t * std::erfc(-t * std::sqrt(0.5));
    case CONVT3D_ACT_GELU_TANH: {
      double const u = std::sqrt(8 / std::acos(-1.0)) * (t + 0.044715 * t * t * t);
      return t / (1 + std::exp(-u));
    }
    case CONVT3D_ACT_SILU:
      return t / (1 + std::exp(-t));
    case CONVT3D_ACT_SIGMOID:
      return 1 / (1 + std::exp(-t));
    case CONVT3D_ACT_TANH:
      return std::tanh(t);
    case CONVT3D_ACT_HARDSWISH:
      return t * std::min(std::max(t + 3, 0.0), 6.0) / 6;
    case CONVT3D_ACT_X_HARDSWISH:
      return t * (t * std::min(std::max(t + 3, 0.0), 6.0) / 6);
    default:
      return t;
  }
}

/// Largest |act'| within `radius` of t, by differences: how much the activation can magnify an error of t.
inline double activation_slope(int code, double t, double negative_slope, double radius) {
  constexpr int kSteps = 16;
  double slope = 0;
  double const step = 2 * radius / kSteps;
  for (int i = 0; i < kSteps; ++i) {
    double const from = t - radius + i * step;
    double const rise =
        reference_activation(code, from + step, negative_slope) - reference_activation(code, from, negative_slope);
    slope = std::max(slope, std::abs(rise / step));
  }
  return slope;
}

}  // namespace convt3d::test
