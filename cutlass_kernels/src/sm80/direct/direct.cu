// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "convt3d/activation.hpp"
#include "family.hpp"
#include "sm80/direct/direct.hpp"
#include "sm80/scalar.hpp"

namespace convt3d::sm80::direct {
namespace {

using scalar::convert;
using scalar::operand;
using scalar::to_float;

constexpr int kBatch = 4;  // products' operands in flight

// Triples are (D, H, W). Strides are in elements: a small tensor may be a view of a large one.
struct Params {
  void const* x;
  void const* weight;
  void const* bias;  // null: none
  void const* add;   // null: none
  void* y;
  int64_t x_stride[5], weight_stride[5], add_stride[5], y_stride[5], bias_stride;
  int in_channels, out_channels;
  int in_size[3], out_size[3], kernel[3], stride[3], padding[3], dilation[3];
  int batch;
  int activation;
  float negative_slope;
  bool add_after;
};

// Output voxels with one residue modulo the stride: all have the same taps.
struct Class {
  int residue[3];
  int count[3];

  __device__ Class(Params const& p, int index) {
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      residue[axis] = index % p.stride[axis];
      index /= p.stride[axis];
      count[axis] = (p.out_size[axis] - residue[axis] + p.stride[axis] - 1) / p.stride[axis];
    }
  }
};

// One of its voxels; (D, H, W) count within the class.
struct Voxel {
  int n, at[3];
  bool inside;

  __device__ Voxel(Params const& p, Class const& c, int index) {
    inside = index < p.batch * c.count[0] * c.count[1] * c.count[2];
    if (!inside) return;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      at[axis] = index % c.count[axis];
      index /= c.count[axis];
    }
    n = index;
  }

  __device__ int64_t offset(Params const& p, Class const& c, int64_t const (&stride)[5]) const {
    int64_t result = n * stride[0];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) result += (at[axis] * p.stride[axis] + c.residue[axis]) * stride[2 + axis];
    return result;
  }
};

// A tap that reaches a class: the voxel it reads, from the place in the class, and its weights.
struct Tap {
  int from[3];
  int64_t weight;
};

// The taps of a class, in order; returns how many. All threads of the first warp come here.
__device__ int find_taps(Params const& p, Class const& c, Tap* taps) {
  int const lane = threadIdx.x;
  int const all = p.kernel[0] * p.kernel[1] * p.kernel[2];
  int found = 0;
  for (int first = 0; first < all; first += 32) {
    int rest = first + lane;
    bool live = rest < all;
    Tap tap{{}, 0};
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      int const k = rest % p.kernel[axis];
      rest /= p.kernel[axis];
      int const from = c.residue[axis] + p.padding[axis] - k * p.dilation[axis];
      live = live && from % p.stride[axis] == 0;
      tap.from[axis] = from / p.stride[axis];
      tap.weight += k * p.weight_stride[2 + axis];
    }
    unsigned const which = __ballot_sync(~0u, live);
    if (live) taps[found + __popc(which & ((1u << lane) - 1))] = tap;
    found += __popc(which);
  }
  return found;
}

// Grid: (32 voxels of a class, class, four output channels). A warp sums one slice of the input channels for all of
// them; its lanes read x along W and share every weight.
template <class T, bool kTf32>
__global__ void __launch_bounds__(32 * kSlices, 2) direct_kernel(__grid_constant__ Params const p) {
  __shared__ float partial[kSlices][kChannels][kVoxels];
  __shared__ Tap taps[kMaxTaps];
  __shared__ int tap_count;
  Class const c(p, blockIdx.y);
  int const lane = threadIdx.x % 32, slice = threadIdx.x / 32;
  int const first_channel = blockIdx.z * kChannels;
  if (slice == 0) {
    int const count = find_taps(p, c, taps);
    if (lane == 0) tap_count = count;
  }
  Voxel const voxel(p, c, blockIdx.x * kVoxels + lane);
  __syncthreads();

  float sum[kChannels] = {};
  if (voxel.inside) {
    int64_t column[kChannels];  // channels past the last one repeat it, and are not stored
#pragma unroll
    for (int j = 0; j < kChannels; ++j) column[j] = min(first_channel + j, p.out_channels - 1) * p.weight_stride[1];
    T const* const x = static_cast<T const*>(p.x) + voxel.n * p.x_stride[0];
    T const* const weight = static_cast<T const*>(p.weight);
    // (tap, input channel), the channel fastest: every kSlices-th is this warp's.
    int tap = slice / p.in_channels, channel = slice % p.in_channels;
    int const tap_step = kSlices / p.in_channels, channel_step = kSlices % p.in_channels;
    while (tap < tap_count) {
      float value[kBatch] = {}, factor[kBatch][kChannels] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tap < tap_count) {
          Tap const& at = taps[tap];
          int const z = voxel.at[0] + at.from[0], h = voxel.at[1] + at.from[1], w = voxel.at[2] + at.from[2];
          // A tap outside x is no product with zero, since its weight may be infinite: both stay zero.
          if (unsigned(z) < unsigned(p.in_size[0]) && unsigned(h) < unsigned(p.in_size[1]) &&
              unsigned(w) < unsigned(p.in_size[2])) {
            value[i] =
                operand<kTf32>(x + channel * p.x_stride[1] + z * p.x_stride[2] + h * p.x_stride[3] + w * p.x_stride[4]);
            T const* const row = weight + channel * p.weight_stride[0] + at.weight;
#pragma unroll
            for (int j = 0; j < kChannels; ++j) factor[i][j] = operand<kTf32>(row + column[j]);
          }
        }
        tap += tap_step;
        channel += channel_step;
        if (channel >= p.in_channels) {
          channel -= p.in_channels;
          ++tap;
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int j = 0; j < kChannels; ++j) sum[j] = fmaf(value[i], factor[i][j], sum[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kChannels; ++j) partial[slice][j][lane] = sum[j];
  __syncthreads();

  // Then a thread for each output, in the order in which these lie in memory.
  if (threadIdx.x >= kVoxels * kChannels) return;
  bool const channels_last = p.y_stride[1] == 1;
  int const row = channels_last ? threadIdx.x / kChannels : threadIdx.x % kVoxels;
  int const j = channels_last ? threadIdx.x % kChannels : threadIdx.x / kVoxels;
  int const channel = first_channel + j;
  Voxel const target(p, c, blockIdx.x * kVoxels + row);
  if (!target.inside || channel >= p.out_channels) return;
  float value = 0.f;
#pragma unroll
  for (int i = 0; i < kSlices; ++i) value += partial[i][j][row];
  float const addend =
      p.add == nullptr
          ? 0.f
          : to_float(static_cast<T const*>(p.add)[target.offset(p, c, p.add_stride) + channel * p.add_stride[1]]);
  if (p.bias != nullptr) value += to_float(static_cast<T const*>(p.bias)[channel * p.bias_stride]);
  if (!p.add_after) value += addend;
  value = apply_activation(p.activation, value, p.negative_slope);
  if (p.add_after) value += addend;
  convert(static_cast<T*>(p.y)[target.offset(p, c, p.y_stride) + channel * p.y_stride[1]], value);
}

Status run(Problem const& p, convt3d_plan const&, convt3d_tensors const& t, void* stream, Message& message) {
  Size5 const add_stride = effective_add_stride(p);
  Params params{};
  params.x = t.x;
  params.weight = t.weight;
  params.bias = p.has_bias ? t.bias : nullptr;
  params.add = p.has_add ? t.add : nullptr;
  params.y = t.y;
  for (int i = 0; i < 5; ++i) {
    params.x_stride[i] = p.x_stride[i];
    params.weight_stride[i] = p.weight_stride[i];
    params.add_stride[i] = add_stride[i];
    params.y_stride[i] = p.y_stride[i];
  }
  params.bias_stride = p.bias_stride;
  params.in_channels = static_cast<int>(p.in_channels);
  params.out_channels = static_cast<int>(p.out_channels);
  int64_t voxels = p.batch, classes = 1;
  for (int axis = 0; axis < 3; ++axis) {
    int64_t const out = output_size(p, axis);
    params.in_size[axis] = static_cast<int>(p.in_size[axis]);
    params.out_size[axis] = static_cast<int>(out);
    params.kernel[axis] = static_cast<int>(p.kernel[axis]);
    params.stride[axis] = static_cast<int>(p.stride[axis]);
    params.padding[axis] = static_cast<int>(p.padding[axis]);
    params.dilation[axis] = static_cast<int>(p.dilation[axis]);
    voxels *= (out + p.stride[axis] - 1) / p.stride[axis];  // of the largest class
    classes *= p.stride[axis];
  }
  params.batch = static_cast<int>(p.batch);
  params.activation = p.activation;
  params.negative_slope = p.negative_slope;
  params.add_after = p.add_order == CONVT3D_ADD_AFTER;

  dim3 const grid(static_cast<unsigned>((voxels + kVoxels - 1) / kVoxels), static_cast<unsigned>(classes),
                  static_cast<unsigned>((p.out_channels + kChannels - 1) / kChannels));
  auto const kernel = p.dtype == CONVT3D_F16    ? direct_kernel<__half, false>
                      : p.dtype == CONVT3D_BF16 ? direct_kernel<__nv_bfloat16, false>
                      : uses_tf32(p)            ? direct_kernel<float, true>
                                                : direct_kernel<float, false>;
  kernel<<<grid, 32 * kSlices, 0, static_cast<cudaStream_t>(stream)>>>(params);
  cudaError_t const error = cudaGetLastError();
  if (error == cudaSuccess) return CONVT3D_OK;
  return message.fail(CONVT3D_CUDA_ERROR, "sm80: %s", cudaGetErrorString(error));
}

// Asked beside the usual form, which says what is wrong with a problem.
Status supported(Problem const& p, convt3d_device const& device, Message& message) {
  if (device.compute_capability >= 80 && p.groups == 1 && takes(p)) return CONVT3D_OK;
  return message.fail(CONVT3D_NOT_SUPPORTED, "sm80: not a small problem");
}

constexpr Family kFamily{CONVT3D_KERNEL_SM80, supported,
                         [](Problem const&, convt3d_device const&) -> size_t { return 0; }, run};

}  // namespace
}  // namespace convt3d::sm80::direct

convt3d::Family const* convt3d::sm80_small_family() { return &convt3d::sm80::direct::kFamily; }
