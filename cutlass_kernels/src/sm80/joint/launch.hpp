// SPDX-License-Identifier: Apache-2.0
//
// Fills the joint kernel's parameters from a Call and launches it. Included by the instance files alone.
#pragma once

#include <algorithm>
#include <type_traits>

#include "sm80/joint/call.hpp"
#include "sm80/joint/kernel.hpp"

namespace convt3d::sm80::joint {

/// With `overlap` the kernel may start while the one before it is still running; it must wait for it itself.
template <class... Parameters, class... Arguments>
cudaError_t launch_grid(void (*kernel)(Parameters...), dim3 grid, int shared_bytes, cudaStream_t stream, bool overlap,
                        Arguments const&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class Kind>
void fill_taps(Params& params, JointCall const& call) {
  Problem const& p = *call.base.problem;
  constexpr TapList<Kind> list = list_taps<Kind>();
  int64_t begin[kClasses], next = 0;
  for (int cls = 0; cls < kClasses; ++cls) {
    begin[cls] = next;
    next += residue_class(p, cls).taps() * call.base.k_channels * call.base.c_channels;
  }
  for (int j = 0; j < Kind::kTaps; ++j) {
    Tap const& tap = list.v[j];
    TapWeights& to = params.taps[j];
    to.code = tap.cls + kClasses * (tap.delta[0] + 2 * tap.delta[1] + 4 * tap.delta[2]);
    int64_t first = 0, step = 0;
    if (call.weight_in_place) {
      step = p.in_channels == 1 ? 0 : p.weight_stride[0];
      for (int axis = 0; axis < 3; ++axis) first += tap.tap[axis] * p.weight_stride[2 + axis];
    } else {
      ResidueClass const rc = residue_class(p, tap.cls);
      for (int axis = 0; axis < 3; ++axis) {
        first = first * rc.dim[axis].taps + (tap.tap[axis] - rc.dim[axis].first_tap) / rc.dim[axis].tap_step;
      }
      first = begin[tap.cls] + first * call.base.c_channels;
      step = rc.taps() * call.base.c_channels;
    }
    to.first = static_cast<int32_t>(first);
    to.channel_step = static_cast<int32_t>(step);
  }
}

template <class Kernel, class Kind>
Params make_params(JointCall const& call) {
  using Element = typename Kernel::Element;
  Problem const& p = *call.base.problem;
  Size5 const y_sizes = y_shape(p), y_stride = effective_stride(y_sizes, p.y_stride);
  Size5 const add_stride = effective_add_stride(p);
  Params params{};
  params.x = call.base.x;
  for (int i = 0; i < 4; ++i) params.x_stride[i] = call.base.x_stride[i];
  params.weight = call.weight_in_place ? call.weight : call.base.filter;
  fill_taps<Kind>(params, call);
  params.x_channels = static_cast<int>(call.base.k_channels);
  params.weight_channels = static_cast<int>(call.weight_in_place ? p.in_channels : call.base.k_channels);
  params.weight_columns = static_cast<int>(call.weight_in_place ? p.out_channels : call.base.c_channels);
  params.batch = static_cast<int>(p.batch);
  for (int axis = 0; axis < 3; ++axis) {
    params.in_size[axis] = static_cast<int>(p.in_size[axis]);
    params.out_size[axis] = static_cast<int>(y_sizes[2 + axis]);
  }
  params.positions = static_cast<int>(positions(p));
  params.channel_tiles = static_cast<int>(channel_tiles(p));
  params.x_rows = x_rows<Kind>(p.in_size);
  params.divide_d = cutlass::FastDivmod(params.in_size[0]);
  params.divide_h = cutlass::FastDivmod(params.in_size[1]);
  params.divide_w = cutlass::FastDivmod(params.in_size[2]);
  int const step = Kernel::kStepChannels * Kind::kSteps;
  int const stages = (params.x_channels + step - 1) / step;
  params.stages = (stages + splits(p) - 1) / splits(p);
  params.parts = (stages + params.stages - 1) / params.stages;
  params.partial_sums = static_cast<float*>(call.partial_sums);
  // Whole rows of both parities side by side, where they are shorter than a warp.
  while (params.row_log < 5 && (1 << params.row_log) < params.in_size[2]) ++params.row_log;
  params.channels_last = y_stride[1] == 1 && p.out_channels > 1;

  TailParams& tail = params.tail;
  tail.bias = call.base.bias;
  tail.add = call.base.add;
  tail.y = call.base.y;
  tail.bias_stride = p.bias_stride;
  tail.add_channel_stride = add_stride[1];
  tail.y_channel_stride = y_stride[1];
  tail.channels = static_cast<int>(p.out_channels);
  tail.activation = p.activation;
  tail.negative_slope = p.negative_slope;
  tail.add_after = p.add_order == CONVT3D_ADD_AFTER;
  int const axis = params.channels_last ? 1 : 4;
  int const wanted = params.channels_last ? kAccessBytes : 2 * int(sizeof(Element));
  auto const vectors = [&](int64_t const* stride, int alignment) {
    return stride[axis] == 1 && access_bytes(y_sizes, stride, axis, alignment, sizeof(Element)) >= wanted;
  };
  params.vectors = vectors(y_stride.v, p.y_alignment) && (!p.has_add || vectors(add_stride.v, p.add_alignment));
  for (int i = 0; i < 4; ++i) {
    params.y_stride[i] = y_stride[i == 0 ? 0 : 1 + i];
    params.add_stride[i] = add_stride[i == 0 ? 0 : 1 + i];
  }
  return params;
}

template <class Operand, class Element, class Kind>
cudaError_t launch(JointCall const& call, cudaStream_t stream) {
  using Kernel = JointKernel<Operand, Element, Kind>;
  Params const params = make_params<Kernel, Kind>(call);
  auto* const kernel = &joint_kernel<Kernel>;
  int const shared = shared_bytes<Kind>(params.x_rows.rows);
  // The same for all calls: another thread's with another size may come in between.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
  if (error != cudaSuccess) return error;
  auto const tiles = static_cast<unsigned>(position_tiles(*call.base.problem) * params.channel_tiles);
  // After a pre-pass, which lets it start early, or after whatever the caller has enqueued.
  bool const overlap = call.base.overlap && call.pre_pass;
  error = launch_grid(kernel, {tiles, static_cast<unsigned>(params.parts)}, shared, stream, overlap, params);
  if (error != cudaSuccess || params.parts == 1) return error;
  return launch_grid(&finish_kernel<Kernel>, {tiles, kBatches}, table_bytes(params.x_rows.rows), stream,
                     call.base.overlap, params);
}

}  // namespace convt3d::sm80::joint
