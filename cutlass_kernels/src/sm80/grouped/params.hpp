// SPDX-License-Identifier: Apache-2.0
//
// What the kernels for groups of few channels share: parameters, operands, and the operator's tail.
#pragma once

#include <cuda_runtime.h>

#include "convt3d/activation.hpp"
#include "cutlass/fast_math.h"
#include "sm80/grouped/grouped.hpp"
#include "sm80/scalar.hpp"

namespace convt3d::sm80::grouped {

using scalar::convert;
using scalar::operand;
using scalar::to_float;

// Outputs along one dimension with one residue modulo its stride (convt3d/residue.hpp).
struct Residue {
  int taps, first_tap, base;
  cutlass::FastDivmod count;  // outputs; 1 where there are none
};

// Triples are (D, H, W), strides are in elements.
struct Params {
  void const* x;
  void const* weight;
  void const* bias;  // null: none
  void const* add;   // null: none
  void* y;
  int64_t x_stride_n, x_stride_c, weight_stride[5], add_stride[5], y_stride[5], bias_stride;
  int x_stride[3];
  int out_channels, inputs, outputs;  // the latter two of one group
  int in_size[3], out_size[3], kernel[3], stride[3];
  int tap_step[3], input_step[3];
  int row_products, part_products;  // of a row of taps, and of what the general kernel sums up by itself, at most
  Residue residues[3][kMaxStride];
  cutlass::FastDivmod position_tiles, channel_blocks;
  cutlass::FastDivmod columns, row_blocks;  // of cells
  int shift[2];                             // of cells, in H and W
  int activation;
  float negative_slope;
  bool add_after, add_in_pairs, y_in_pairs;
};

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T v[2];
};

// The weights of `kChannels` output channels from `first_channel` on into shared memory: (input, tap, channel).
template <bool kTf32, int kChannels, class T>
__device__ void load_weights(Params const& p, int first_channel, float* to) {
  T const* const from = static_cast<T const*>(p.weight);
  int const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  int const all = p.inputs * taps * kChannels;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int const channel = first_channel + i % kChannels;
    int rest = i / kChannels;
    int const w = rest % p.kernel[2];
    rest /= p.kernel[2];
    int const h = rest % p.kernel[1];
    rest /= p.kernel[1];
    int const d = rest % p.kernel[0];
    int const group = channel / p.outputs;
    int64_t const offset = (group * p.inputs + rest / p.kernel[0]) * p.weight_stride[0] +
                           (channel - group * p.outputs) * p.weight_stride[1] + d * p.weight_stride[2] +
                           h * p.weight_stride[3] + w * p.weight_stride[4];
    to[i] = channel < p.out_channels ? operand<kTf32>(from + offset) : 0.f;
  }
}

// A thread's channel and sample.
template <class T>
struct Plane {
  T const* x;  // the first of the group's input channels
  T const* add;
  T* y;
  float bias;

  __device__ Plane(Params const& p, int n, int channel)
      : x(static_cast<T const*>(p.x) + n * p.x_stride_n + channel / p.outputs * p.inputs * p.x_stride_c),
        add(static_cast<T const*>(p.add)),
        y(static_cast<T*>(p.y) + n * p.y_stride[0] + channel * p.y_stride[1]),
        bias(p.bias == nullptr ? 0.f : to_float(static_cast<T const*>(p.bias)[channel * p.bias_stride])) {
    if (add != nullptr) add += n * p.add_stride[0] + channel * p.add_stride[1];
  }
};

// act(sum + bias + add) for the `kCount` (1 or 2) outputs from (d, h, w) on along W, those past the row left out.
template <int kCount, class T>
__device__ void finish(Params const& p, Plane<T> const& plane, float const* sum, int d, int h, int w) {
  float add[kCount] = {};
  bool const whole = w + kCount <= p.out_size[2];
  if (plane.add != nullptr) {
    T const* const from = plane.add + d * p.add_stride[2] + h * p.add_stride[3] + w * p.add_stride[4];
    if (kCount == 2 && whole && p.add_in_pairs) {
      Pair<T> const pair = *reinterpret_cast<Pair<T> const*>(from);
#pragma unroll
      for (int j = 0; j < kCount; ++j) add[j] = to_float(pair.v[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (w + j < p.out_size[2]) add[j] = to_float(from[j * p.add_stride[4]]);
      }
    }
  }
  Pair<T> result;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    float value = sum[j] + plane.bias;
    if (!p.add_after) value += add[j];
    value = apply_activation(p.activation, value, p.negative_slope);
    if (p.add_after) value += add[j];
    convert(result.v[j], value);
  }
  T* const to = plane.y + d * p.y_stride[2] + h * p.y_stride[3] + w * p.y_stride[4];
  if (kCount == 2 && whole && p.y_in_pairs) {
    *reinterpret_cast<Pair<T>*>(to) = result;
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (w + j < p.out_size[2]) to[j * p.y_stride[4]] = result.v[j];
    }
  }
}

// `grid` and shared memory are those of grouped.cu.
void launch_gather(Problem const& p, Params const& params, dim3 grid, size_t shared_bytes, cudaStream_t stream);

// For problems that takes_cells(): one file for each type.
template <class T, bool kTf32>
void launch_cells(Problem const& p, Params const& params, dim3 grid, size_t shared_bytes, cudaStream_t stream);

}  // namespace convt3d::sm80::grouped
