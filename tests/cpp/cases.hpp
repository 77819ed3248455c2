// SPDX-License-Identifier: Apache-2.0
//
// Problems for the tests: strides for a memory layout, and random geometry of every kind the operator takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>

#include "convt3d/problem.hpp"

namespace convt3d::test {

enum class Layout { kNcdhw, kNdhwc };

/// Seeded source of cases and data: the same everywhere, so a failing seed can be named.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  /// Uniform in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return integer(1, 100) <= percent; }
  /// Uniform in [-1, 1) with 24 bits.
  float uniform() { return static_cast<float>(integer(-(1 << 23), (1 << 23) - 1)) * 0x1p-23f; }

 private:
  std::mt19937_64 engine_;  // its sequence is fixed by the standard, that of the distributions is not
};

/// Strides of a dense tensor; C fastest for kNdhwc. Also those of a weight: kNdhwc is (Cin, kD, kH, kW, Cout).
inline void pack(Size5 const& shape, Layout layout, int64_t (&stride)[5]) {
  constexpr int kNcdhw[5] = {0, 1, 2, 3, 4};
  constexpr int kNdhwc[5] = {0, 2, 3, 4, 1};
  int const* order = layout == Layout::kNcdhw ? kNcdhw : kNdhwc;
  int64_t next = 1;
  for (int i = 4; i >= 0; --i) {
    stride[order[i]] = next;
    next *= std::max<int64_t>(shape[order[i]], 1);
  }
}

/// Dense tensors of one layout, aligned as an allocator aligns them. `weight` keeps PyTorch's default order.
inline void pack(Problem& p, Layout layout) {
  pack(x_shape(p), layout, p.x_stride);
  pack(weight_shape(p), Layout::kNcdhw, p.weight_stride);
  pack(y_shape(p), layout, p.y_stride);
  pack(y_shape(p), layout, p.add_stride);
  p.bias_stride = 1;
  p.x_alignment = p.add_alignment = p.y_alignment = 16;
}

/// Makes x, add and y the first channels of dense tensors with so many.
inline void slice(Problem& p, int64_t in_channels, int64_t out_channels, Layout layout) {
  Problem wide = p;
  wide.in_channels = in_channels;
  wide.out_channels = out_channels;
  wide.groups = 1;
  pack(wide, layout);
  std::copy(wide.x_stride, wide.x_stride + 5, p.x_stride);
  std::copy(wide.y_stride, wide.y_stride + 5, p.y_stride);
  std::copy(wide.add_stride, wide.add_stride + 5, p.add_stride);
}

/// The same kernel, stride, padding, output padding and input size in every dimension; dense, fp32, no tail.
inline Problem cubic_problem(int64_t batch, int64_t in_channels, int64_t out_channels, int64_t in_size, int64_t kernel,
                             int64_t stride, int64_t padding, int64_t output_padding, Layout layout = Layout::kNcdhw) {
  Problem p{};
  p.batch = batch;
  p.in_channels = in_channels;
  p.out_channels = out_channels;
  p.groups = 1;
  for (int axis = 0; axis < 3; ++axis) {
    p.in_size[axis] = in_size;
    p.kernel[axis] = kernel;
    p.stride[axis] = stride;
    p.padding[axis] = padding;
    p.output_padding[axis] = output_padding;
    p.dilation[axis] = 1;
  }
  pack(p, layout);
  return p;
}

/// The reference workload, with `batch` samples (128 in full).
inline Problem reference_problem(int64_t batch, Layout layout = Layout::kNcdhw) {
  Problem p = cubic_problem(batch, 32, 64, 16, 3, 2, 1, 1, layout);
  p.has_bias = p.has_add = 1;
  p.activation = CONVT3D_ACT_X_HARDSWISH;
  return p;
}

/// Bounds of `random_problem`. The defaults stay small enough for a host reference.
struct CaseLimits {
  int64_t batch = 3;
  int64_t channels = 20;
  int64_t in_size = 6;
  int64_t kernel = 5;
  int64_t stride = 4;
  int64_t dilation = 3;
  bool groups = false;
  bool hopper = false;  ///< cases that the sm90 family may take, half of them with rows in steps of 4 outputs and half
                        ///< with rows that start anywhere, any channels, strides up to 4
};

/// Geometry only: sizes, kernel, stride, padding, output padding, dilation; every output size at least 1.
inline void randomize_geometry(Random& random, CaseLimits const& limits, Problem& p) {
  for (int axis = 0; axis < 3; ++axis) {
    do {
      p.in_size[axis] = random.integer(1, limits.in_size);
      p.kernel[axis] = random.integer(1, limits.kernel);
      p.stride[axis] = random.integer(1, limits.stride);
      p.padding[axis] = random.integer(0, p.kernel[axis]);
      p.dilation[axis] = random.chance(70) ? 1 : random.integer(1, limits.dilation);
      p.output_padding[axis] = random.integer(0, std::max(p.stride[axis], p.dilation[axis]) - 1);
    } while (output_size(p, axis) < 1);
  }
}

/// A whole case: dense tensors in either layout, any tail. dtype and precision are left fp32, ieee.
inline Problem random_problem(Random& random, CaseLimits const& limits = {}) {
  Problem p{};
  p.batch = random.integer(1, limits.batch);
  p.groups = limits.groups && random.chance(40) ? random.integer(2, 3) : 1;
  p.in_channels = p.groups * random.integer(1, limits.channels);
  p.out_channels = p.groups * random.integer(1, limits.channels);
  randomize_geometry(random, limits, p);
  p.has_bias = random.chance(60);
  p.has_add = random.chance(60);
  p.activation = static_cast<int32_t>(random.integer(0, CONVT3D_ACT_COUNT - 1));
  p.add_order = static_cast<int32_t>(random.integer(0, 1));
  p.negative_slope = 0.01f * static_cast<float>(random.integer(0, 100));
  if (limits.hopper) {
    p.in_channels = 8 * random.integer(1, random.chance(50) ? 4 : 12);
    p.out_channels = 8 * random.integer(1, 5);
    for (int axis = 0; axis < 3; ++axis) {
      p.in_size[axis] = random.integer(axis == 0 ? 1 : 3, 12);
      p.stride[axis] = random.chance(75) ? 2 : 1;
      p.kernel[axis] = random.integer(p.stride[axis], random.chance(75) ? 3 : 5);
      p.dilation[axis] = 1;
      p.padding[axis] = random.integer(0, 1);
      p.output_padding[axis] = random.integer(0, p.stride[axis] - 1);
      if (output_size(p, axis) < 1) p.padding[axis] = 0;
    }
    // One size in two makes rows of 4 n outputs.
    p.kernel[2] = random.chance(50) ? 2 : 4;
    p.padding[2] = p.kernel[2] == 2 ? 0 : 1;
    p.output_padding[2] = 0;
    p.in_size[2] = 2 * random.integer(1, 10);
    p.stride[2] = 2;
    if (random.chance(25)) {
      p.stride[2] = 1;
      p.kernel[2] = random.chance(50) ? 1 : 3;
      p.padding[2] = p.kernel[2] / 2;
      p.in_size[2] *= 2;
    }
    if (random.chance(50)) {
      p.in_channels = random.integer(1, 40);
      p.out_channels = random.integer(1, 80);
      p.in_size[2] = random.integer(3, 20);
      for (int axis = 0; axis < 3; ++axis)
        p.stride[axis] = random.chance(80) ? 2 : random.integer(1, axis == 0 ? 2 : 4);
      for (int axis = 0; axis < 3; ++axis) {
        p.kernel[axis] = random.integer(p.stride[axis], 5);
        p.padding[axis] = random.integer(0, (p.kernel[axis] - 1) / 2);
        p.output_padding[axis] = random.integer(0, p.stride[axis] - 1);
      }
    }
  }
  pack(p, random.chance(50) ? Layout::kNcdhw : Layout::kNdhwc);
  if (p.has_add && random.chance(25)) {  // `add` broadcasts along some dimensions
    for (int axis = 0; axis < 5; ++axis) {
      if (random.chance(50)) p.add_stride[axis] = 0;
    }
  }
  return p;
}

/// One line that is enough to build the case again.
inline std::string describe(Problem const& p) {
  auto const triple = [](int64_t const* v) {
    return "(" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + ")";
  };
  return "N" + std::to_string(p.batch) + " C" + std::to_string(p.in_channels) + "->" + std::to_string(p.out_channels) +
         " groups " + std::to_string(p.groups) + " in " + triple(p.in_size) + " k" + triple(p.kernel) + " s" +
         triple(p.stride) + " p" + triple(p.padding) + " op" + triple(p.output_padding) + " d" + triple(p.dilation) +
         (is_ncdhw(y_shape(p), p.y_stride)   ? " NCDHW"
          : is_ndhwc(y_shape(p), p.y_stride) ? " NDHWC"
                                             : " strided") +
         " bias " + std::to_string(p.has_bias) + " add " + std::to_string(p.has_add) + " order " +
         std::to_string(p.add_order) + " act " + std::to_string(p.activation) + " dtype " + std::to_string(p.dtype) +
         " precision " + std::to_string(p.precision);
}

}  // namespace convt3d::test
