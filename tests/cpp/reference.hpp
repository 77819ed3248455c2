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
/// Works on channels-last copies, so that the innermost loop runs over neighbours: the GPU tests wait for this
/// reference, so it must be quick.
inline Tensor scatter_reference(Problem const& p, Tensor const& x, Tensor const& weight, Tensor* magnitude = nullptr) {
  Size5 const ys = y_shape(p), ws = weight_shape(p);
  int64_t const cin_group = p.in_channels / p.groups, cout_group = p.out_channels / p.groups;
  Tensor filter(weight.size());  // (Cin, taps, Cout / groups)
  size_t next = 0;
  for_each_index(ws, [&](int64_t const* i) {
    int64_t const tap = (i[2] * ws[3] + i[3]) * ws[4] + i[4];
    filter[static_cast<size_t>((i[0] * tap_count(p) + tap) * ws[1] + i[1])] = weight[next++];
  });

  size_t const count = static_cast<size_t>(element_count(ys));
  Tensor sums(count, 0.0), sizes(magnitude != nullptr ? count : 0, 0.0);  // (N, D, H, W, Cout)
  next = 0;
  for_each_index(x_shape(p), [&](int64_t const* i) {
    double const value = x[next++];
    int64_t const first_channel = i[1] / cin_group * cout_group;
    for_each_index({{1, 1, ws[2], ws[3], ws[4]}}, [&](int64_t const* k) {
      int64_t o[3];
      for (int axis = 0; axis < 3; ++axis) {
        o[axis] = i[2 + axis] * p.stride[axis] - p.padding[axis] + k[2 + axis] * p.dilation[axis];
        if (o[axis] < 0 || o[axis] >= ys[2 + axis]) return;
      }
      int64_t const tap = (k[2] * ws[3] + k[3]) * ws[4] + k[4];
      int64_t const target = ((i[0] * ys[2] + o[0]) * ys[3] + o[1]) * ys[4] + o[2];
      double const* const from = filter.data() + (i[1] * tap_count(p) + tap) * cout_group;
      double* const to = sums.data() + target * ys[1] + first_channel;
      for (int64_t c = 0; c < cout_group; ++c) to[c] += value * from[c];
      if (magnitude == nullptr) return;
      double* const size = sizes.data() + target * ys[1] + first_channel;
      for (int64_t c = 0; c < cout_group; ++c) size[c] += std::abs(value * from[c]);
    });
  });

  Tensor y;
  y.reserve(count);
  if (magnitude != nullptr) magnitude->clear();
  for_each_index(ys, [&](int64_t const* i) {
    size_t const at = static_cast<size_t>((((i[0] * ys[2] + i[2]) * ys[3] + i[3]) * ys[4] + i[4]) * ys[1] + i[1]);
    y.push_back(sums[at]);
    if (magnitude != nullptr) magnitude->push_back(sizes[at]);
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
  constexpr int kSteps = 4;
  double const step = 2 * radius / kSteps;
  double slope = 0;
  double left = reference_activation(code, t - radius, negative_slope);
  for (int i = 1; i <= kSteps; ++i) {
    double const right = reference_activation(code, t - radius + i * step, negative_slope);
    slope = std::max(slope, std::abs(right - left) / step);
    left = right;
  }
  return slope;
}

}  // namespace convt3d::test
