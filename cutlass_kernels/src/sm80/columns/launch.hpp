// SPDX-License-Identifier: Apache-2.0
//
// Fills the parameters of the product and of the gather from a problem and launches them. Included by the instance
// files alone.
#pragma once

#include <algorithm>

#include "sm80/columns/gather.hpp"
#include "sm80/columns/instances.hpp"
#include "sm80/columns/product.hpp"

namespace convt3d::sm80::columns {

inline ProductParams product_params(Problem const& p, convt3d_tensors const& t) {
  auto const as_int = [](int64_t value) { return static_cast<int>(value); };
  ProductParams params{};
  params.x = t.x;
  params.weight = t.weight;
  params.x_sample = p.batch > 1 ? p.x_stride[0] : 0;
  params.x_row = x_channels_last(p) ? voxel_step(p) : p.in_channels > 1 ? p.x_stride[1] : 0;
  params.weight_row = p.in_channels > 1 ? p.weight_stride[0] : 0;
  params.channels = as_int(p.in_channels);
  params.positions = as_int(positions(p));
  params.columns = as_int(column_count(p));
  params.volume = cutlass::FastDivmod(as_int(p.in_size[0] * p.in_size[1] * p.in_size[2]));
  params.position_tiles = cutlass::FastDivmod(as_int(tiles_of(positions(p))));
  params.steps = as_int(steps(p));
  params.steps_of_part = as_int(steps_of_part(p));
  params.sums = static_cast<float*>(t.workspace);
  params.pitch = pitch(p);
  params.part_floats = part_floats(p);
  return params;
}

inline Axis gather_axis(Problem const& p, int axis) {
  int64_t const inner[3] = {p.in_size[1] * p.in_size[2], p.in_size[2], 1};
  int64_t const step = column_steps(p).tap[axis];
  Axis to{};
  to.stride = cutlass::FastDivmod(static_cast<int>(p.stride[axis]));
  to.in_size = static_cast<int32_t>(p.in_size[axis]);
  to.input_floats = static_cast<int32_t>(inner[axis]);
  for (int64_t r = 0; r < p.stride[axis]; ++r) {
    ResidueClass1d const c =
        residue_class_1d(r, output_size(p, axis), p.kernel[axis], p.stride[axis], p.padding[axis], p.dilation[axis]);
    to.taps[r] = static_cast<int32_t>(c.taps);
    to.base[r] = static_cast<int32_t>(c.base);
    to.first_tap[r] = static_cast<int32_t>(c.first_tap);
    to.tap_distance = static_cast<int32_t>(c.tap_step);
    to.input_step = static_cast<int32_t>(c.input_step);
  }
  to.tap_columns = static_cast<int32_t>(step);
  return to;
}

template <class Element>
GatherParams gather_params(Problem const& p, convt3d_tensors const& t) {
  auto const as_int = [](int64_t value) { return static_cast<int>(value); };
  Size5 const y_sizes = y_shape(p), y_stride = effective_stride(y_sizes, p.y_stride);
  Size5 const add_stride = effective_add_stride(p), x_stride = effective_stride(x_shape(p), p.x_stride);
  Size5 const weight_stride = effective_stride(weight_shape(p), p.weight_stride);
  GatherParams params{};
  params.sums = static_cast<float const*>(t.workspace);
  params.parts = as_int(parts(p));
  params.part_floats = as_int(part_floats(p));
  params.position_floats = as_int(x_channels_last(p) ? pitch(p) : 1);
  params.column_floats = as_int(x_channels_last(p) ? 1 : pitch(p));
  params.channel_step = as_int(column_steps(p).channel);
  params.volume = as_int(p.in_size[0] * p.in_size[1] * p.in_size[2]);
  for (int axis = 0; axis < 3; ++axis) params.axis[axis] = gather_axis(p, axis);
  int64_t const groups = (p.out_channels + kGroup - 1) / kGroup;
  params.outputs = as_int(p.batch * groups * y_sizes[2] * y_sizes[3] * y_sizes[4]);
  params.divide_groups = cutlass::FastDivmod(as_int(groups));
  params.divide_d = cutlass::FastDivmod(as_int(y_sizes[2]));
  params.divide_h = cutlass::FastDivmod(as_int(y_sizes[3]));
  params.divide_w = cutlass::FastDivmod(as_int(y_sizes[4]));
  constexpr int kVectorBytes = kGroup * int(sizeof(Element));
  auto const whole = [&](int64_t const* stride, int alignment) {
    return stride[1] == 1 && access_bytes(y_sizes, stride, 1, alignment, sizeof(Element)) >= kVectorBytes;
  };
  params.vector_y = whole(y_stride.v, p.y_alignment);
  params.vector_add = p.has_add && whole(add_stride.v, p.add_alignment);
  params.vector_sums = params.channel_step * params.column_floats == 1 && p.out_channels % kGroup == 0;
  for (int axis = 0; axis < 5; ++axis) {
    params.y_stride[axis] = y_stride[axis];
    params.add_stride[axis] = add_stride[axis];
    params.x_stride[axis] = x_stride[axis];
    params.weight_stride[axis] = weight_stride[axis];
  }
  params.x = t.x;
  params.weight = t.weight;
  params.in_channels = as_int(p.in_channels);
  params.tail.bias = p.has_bias ? t.bias : nullptr;
  params.tail.add = p.has_add ? t.add : nullptr;
  params.tail.y = t.y;
  params.tail.bias_stride = p.bias_stride;
  params.tail.channels = as_int(p.out_channels);
  params.tail.activation = p.activation;
  params.tail.negative_slope = p.negative_slope;
  params.tail.add_after = p.add_order == CONVT3D_ADD_AFTER;
  return params;
}

template <class Operand, bool kChannelsLast>
cudaError_t launch_product(ColumnsCall const& call, cudaStream_t stream) {
  using Kernel = Product<Operand, kChannelsLast>;
  Problem const& p = *call.problem;
  auto* const kernel = &product_kernel<Kernel>;
  cudaError_t const error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (error != cudaSuccess) return error;
  dim3 const grid(static_cast<unsigned>(tiles(p)), static_cast<unsigned>(parts(p)));
  kernel<<<grid, kThreads, Kernel::kSharedBytes, stream>>>(product_params(p, *call.tensors));
  return cudaGetLastError();
}

template <class Element, bool kTf32, bool kChannelsLast, bool kOverlap>
cudaError_t launch_gather(ColumnsCall const& call, cudaStream_t stream) {
  using Kernel = Gather<Element, kTf32, kChannelsLast, kOverlap>;
  auto* const kernel = &gather_kernel<Kernel>;
  GatherParams const params = gather_params<Element>(*call.problem, *call.tensors);
  auto const blocks = static_cast<unsigned>((params.outputs + kGatherThreads - 1) / kGatherThreads);
  if (call.overlap) return launch_dependent(kernel, blocks, kGatherThreads, 0, stream, params);
  kernel<<<blocks, kGatherThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class Operand, class Element>
cudaError_t launch(ColumnsCall const& call, cudaStream_t stream) {
  Problem const& p = *call.problem;
  cudaError_t const error =
      x_channels_last(p) ? launch_product<Operand, true>(call, stream) : launch_product<Operand, false>(call, stream);
  if (error != cudaSuccess) return error;
  constexpr bool kTf32 = std::is_same_v<Operand, cutlass::tfloat32_t>;
  bool const last = p.y_stride[1] == 1 && p.out_channels > 1, overlap = most_taps(p) > 1;
  return last      ? overlap ? launch_gather<Element, kTf32, true, true>(call, stream)
                             : launch_gather<Element, kTf32, true, false>(call, stream)
              : overlap ? launch_gather<Element, kTf32, false, true>(call, stream)
                   : launch_gather<Element, kTf32, false, false>(call, stream);
}

}  // namespace convt3d::sm80::columns
