// SPDX-License-Identifier: Apache-2.0
//
// What follows from a problem description: sizes, memory layouts, access widths, residue classes. Pure
// arithmetic on a description that convt3d_validate has accepted, so nothing here can overflow; every layer
// asks here, and no shape is computed twice in two ways.
#pragma once

#include <cstdint>

#include "convt3d/convt3d.h"
#include "convt3d/host_device.hpp"
#include "convt3d/residue.hpp"

namespace convt3d {

using Problem = convt3d_problem;
using Status = convt3d_status;

/// Sizes (D, H, W).
struct Size3 {
  int64_t v[3];
  CONVT3D_HOST_DEVICE constexpr int64_t operator[](int axis) const { return v[axis]; }
};

/// Sizes or strides of a 5-D tensor, ordered (N, C, D, H, W); of the weight, (Cin, Cout, kD, kH, kW).
struct Size5 {
  int64_t v[5];
  CONVT3D_HOST_DEVICE constexpr int64_t operator[](int axis) const { return v[axis]; }
};

/// Output size along one axis: (i - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1.
CONVT3D_HOST_DEVICE constexpr int64_t output_size(Problem const& p, int axis) {
  return (p.in_size[axis] - 1) * p.stride[axis] - 2 * p.padding[axis] + p.dilation[axis] * (p.kernel[axis] - 1) +
         p.output_padding[axis] + 1;
}

CONVT3D_HOST_DEVICE constexpr Size3 output_size(Problem const& p) {
  return {{output_size(p, 0), output_size(p, 1), output_size(p, 2)}};
}

CONVT3D_HOST_DEVICE constexpr Size5 x_shape(Problem const& p) {
  return {{p.batch, p.in_channels, p.in_size[0], p.in_size[1], p.in_size[2]}};
}

/// Also the shape of `add`, whose broadcast dimensions have stride 0.
CONVT3D_HOST_DEVICE constexpr Size5 y_shape(Problem const& p) {
  return {{p.batch, p.out_channels, output_size(p, 0), output_size(p, 1), output_size(p, 2)}};
}

CONVT3D_HOST_DEVICE constexpr Size5 weight_shape(Problem const& p) {
  return {{p.in_channels, p.out_channels / p.groups, p.kernel[0], p.kernel[1], p.kernel[2]}};
}

CONVT3D_HOST_DEVICE constexpr int64_t element_count(Size5 const& shape) {
  // An empty tensor first: the product of its other sizes is bounded by nothing.
  for (int axis = 0; axis < 5; ++axis) {
    if (shape[axis] == 0) return 0;
  }
  return shape[0] * shape[1] * shape[2] * shape[3] * shape[4];
}

/// Number of kernel taps, kD * kH * kW.
CONVT3D_HOST_DEVICE constexpr int64_t tap_count(Problem const& p) { return p.kernel[0] * p.kernel[1] * p.kernel[2]; }

/// Bytes of one element of any tensor of the problem.
CONVT3D_HOST_DEVICE constexpr int element_bytes(Problem const& p) { return p.dtype == CONVT3D_F32 ? 4 : 2; }

/// Whether the multiplications take operands rounded to TF32, one product each.
CONVT3D_HOST_DEVICE constexpr bool uses_tf32(Problem const& p) {
  return p.dtype == CONVT3D_F32 && p.precision == CONVT3D_TF32;
}

/// Whether the multiplications are to have fp32 accuracy.
CONVT3D_HOST_DEVICE constexpr bool uses_ieee(Problem const& p) { return p.dtype == CONVT3D_F32 && !uses_tf32(p); }

/// The most taps of a residue class along a dimension, and in all.
CONVT3D_HOST_DEVICE constexpr int64_t most_taps(Problem const& p, int axis) {
  return most_taps_1d(p.kernel[axis], p.stride[axis], p.dilation[axis]);
}
CONVT3D_HOST_DEVICE constexpr int64_t most_taps(Problem const& p) {
  return most_taps(p, 0) * most_taps(p, 1) * most_taps(p, 2);
}

/// Residue class `index` in [0, residue_class_count(p.stride)).
CONVT3D_HOST_DEVICE constexpr ResidueClass residue_class(Problem const& p, int64_t index) {
  Size3 const out = output_size(p);
  return residue_class(index, out.v, p.kernel, p.stride, p.padding, p.dilation);
}

// ---- memory layouts; the stride of a dimension of size 1 is never used, so it never matters -------------------

/// The strides as an address computation sees them: 0 for a dimension of size 1.
CONVT3D_HOST_DEVICE constexpr Size5 effective_stride(Size5 const& shape, int64_t const* stride) {
  Size5 result{};
  for (int axis = 0; axis < 5; ++axis) result.v[axis] = shape[axis] == 1 ? 0 : stride[axis];
  return result;
}

/// Strides of `add` against the shape of y: 0 wherever it broadcasts, everywhere without an `add`.
CONVT3D_HOST_DEVICE constexpr Size5 effective_add_stride(Problem const& p) {
  return p.has_add ? effective_stride(y_shape(p), p.add_stride) : Size5{};
}

/// Whether the tensor is dense with its dimensions nested in `order`, outermost first.
CONVT3D_HOST_DEVICE constexpr bool is_packed(Size5 const& shape, int64_t const* stride, int const (&order)[5]) {
  int64_t expected = 1;
  for (int i = 4; i >= 0; --i) {
    int const axis = order[i];
    if (shape[axis] != 1 && stride[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

/// Dense, W fastest: PyTorch's contiguous format.
CONVT3D_HOST_DEVICE constexpr bool is_ncdhw(Size5 const& shape, int64_t const* stride) {
  return is_packed(shape, stride, {0, 1, 2, 3, 4});
}

/// Dense, C fastest: PyTorch's channels_last_3d format. (A weight in this format is a packed KTRSC filter.)
CONVT3D_HOST_DEVICE constexpr bool is_ndhwc(Size5 const& shape, int64_t const* stride) {
  return is_packed(shape, stride, {0, 2, 3, 4, 1});
}

/// Neighbouring elements along `axis` are neighbours in memory (or there is one element alone).
CONVT3D_HOST_DEVICE constexpr bool is_unit_stride(Size5 const& shape, int64_t const* stride, int axis) {
  return shape[axis] == 1 || stride[axis] == 1;
}

/// Channels are neighbours in memory, whatever the other strides are.
CONVT3D_HOST_DEVICE constexpr bool has_unit_channel_stride(Size5 const& shape, int64_t const* stride) {
  return is_unit_stride(shape, stride, 1);
}

/// Largest access, in bytes and at most 16, with which runs along `axis` can be read or written at every position:
/// it divides the base address, the run and every other stride. One element where `axis` has no unit stride.
CONVT3D_HOST_DEVICE constexpr int access_bytes(Size5 const& shape, int64_t const* stride, int axis, int alignment,
                                               int element) {
  if (element_count(shape) == 0 || !is_unit_stride(shape, stride, axis)) return element;
  int width = alignment < 16 ? alignment : 16;
  while (width > element && (shape[axis] * element) % width != 0) width /= 2;
  for (int other = 0; other < 5; ++other) {
    if (other == axis || shape[other] == 1) continue;
    while (width > element && (stride[other] * element) % width != 0) width /= 2;
  }
  return width;
}

}  // namespace convt3d
