// SPDX-License-Identifier: Apache-2.0
//
// Residue classes: a strided transposed convolution as stride^3 independent unit-stride problems.
//
// Along one dimension, output o takes tap k from input i exactly where
//
//     o + padding - k * dilation = stride * i .
//
// Split the outputs by r = o mod stride and write o = r + stride * j. Which taps divide evenly then depends
// on r alone. With g = gcd(stride, dilation), they are the k that solve k * dilation = r + padding (mod stride):
// none unless g divides r + padding, otherwise every (stride / g)-th tap from the first one, k0. Inserting
// k = k0 + t * (stride / g) gives
//
//     i = j + base - t * (dilation / g),     base = (r + padding - k0 * dilation) / stride   (exact),
//
// which is the gather of a unit-stride data gradient, z = d + pad - t * dilation, with
//
//     | CUTLASS dgrad | D     | T    | Z       | pad  | dilation   | filter index t      |
//     | residue class | count | taps | in_size | base | input_step | first_tap + t * tap_step |
//
// No multiply of a class is wasted. `base` may be negative or exceed the kernel; inputs outside [0, in_size)
// count as zero. A class without taps still has outputs: act(bias + add).
#pragma once

#include <cstdint>

#include "convt3d/host_device.hpp"

namespace convt3d {

/// One class along one dimension. All quantities in elements of that dimension.
struct ResidueClass1d {
  int64_t origin;      ///< first output coordinate of the class, in [0, stride)
  int64_t stride;      ///< distance between its outputs: output j sits at origin + j * stride
  int64_t count;       ///< number of outputs; 0 where the output is shorter than the stride
  int64_t taps;        ///< number of live taps T; may be 0
  int64_t first_tap;   ///< kernel index of tap 0
  int64_t tap_step;    ///< kernel index distance between taps
  int64_t base;        ///< input coordinate of (output 0, tap 0); 0 where there are no taps
  int64_t input_step;  ///< tap t reads input j + base - t * input_step

  CONVT3D_HOST_DEVICE constexpr int64_t output(int64_t j) const { return origin + j * stride; }
  CONVT3D_HOST_DEVICE constexpr int64_t tap(int64_t t) const { return first_tap + t * tap_step; }
  CONVT3D_HOST_DEVICE constexpr int64_t input(int64_t j, int64_t t) const { return j + base - t * input_step; }
};

CONVT3D_HOST_DEVICE constexpr int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    int64_t const rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/// The class of the outputs o with o mod stride == residue, of `out_size` outputs in all.
/// Wants residue in [0, stride), kernel, stride, dilation >= 1, padding >= 0, and (kernel - 1) * dilation and
/// stride + padding within int64. Takes O(min(kernel, stride)) steps.
CONVT3D_HOST_DEVICE constexpr ResidueClass1d residue_class_1d(int64_t residue, int64_t out_size, int64_t kernel,
                                                              int64_t stride, int64_t padding, int64_t dilation) {
  int64_t const g = greatest_common_divisor(stride, dilation);
  ResidueClass1d c{residue, stride, 0, 0, 0, stride / g, 0, dilation / g};
  if (out_size > residue) c.count = (out_size - residue - 1) / stride + 1;

  // `rest` is (residue + padding - k * dilation) mod stride, stepped along so that it never overflows.
  int64_t rest = (residue + padding) % stride;
  int64_t const step = dilation % stride;
  for (int64_t k = 0; k < kernel && k < c.tap_step; ++k) {
    if (rest == 0) {
      c.first_tap = k;
      c.taps = (kernel - 1 - k) / c.tap_step + 1;
      c.base = (residue + padding - k * dilation) / stride;
      break;
    }
    rest -= step;
    if (rest < 0) rest += stride;
  }
  return c;
}

/// The most taps that a class has along a dimension: every (stride / g)-th of the kernel's.
CONVT3D_HOST_DEVICE constexpr int64_t most_taps_1d(int64_t kernel, int64_t stride, int64_t dilation) {
  int64_t const tap_step = stride / greatest_common_divisor(stride, dilation);
  return (kernel + tap_step - 1) / tap_step;
}

/// One class in three dimensions, ordered (D, H, W): the product of three 1-D classes.
struct ResidueClass {
  ResidueClass1d dim[3];

  CONVT3D_HOST_DEVICE constexpr int64_t taps() const { return dim[0].taps * dim[1].taps * dim[2].taps; }
  /// Outputs per sample and channel.
  CONVT3D_HOST_DEVICE constexpr int64_t outputs() const { return dim[0].count * dim[1].count * dim[2].count; }
  /// No outputs: nothing to launch. (A class without taps is not empty.)
  CONVT3D_HOST_DEVICE constexpr bool is_empty() const { return outputs() == 0; }
};

/// Number of classes, stride_D * stride_H * stride_W. The caller bounds the strides.
CONVT3D_HOST_DEVICE constexpr int64_t residue_class_count(int64_t const* stride) {
  return stride[0] * stride[1] * stride[2];
}

/// Class `index` in [0, residue_class_count), residue along W fastest. Arguments are triples (D, H, W).
CONVT3D_HOST_DEVICE constexpr ResidueClass residue_class(int64_t index, int64_t const* out_size, int64_t const* kernel,
                                                         int64_t const* stride, int64_t const* padding,
                                                         int64_t const* dilation) {
  ResidueClass c{};
  for (int axis = 2; axis >= 0; --axis) {
    c.dim[axis] = residue_class_1d(index % stride[axis], out_size[axis], kernel[axis], stride[axis], padding[axis],
                                   dilation[axis]);
    index /= stride[axis];
  }
  return c;
}

}  // namespace convt3d
