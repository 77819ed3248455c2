// SPDX-License-Identifier: Apache-2.0
//
// Fills the patch-expansion kernel's parameters and launches it. Included by the instance files alone.
#pragma once

#include <algorithm>

#include "sm80/patch/instances.hpp"
#include "sm80/patch/kernel.hpp"

namespace convt3d::sm80::patch {

inline Side make_side(Problem const& p, void const* base, Size5 const& stride, int alignment) {
  Side side{};
  side.base = const_cast<void*>(base);
  side.position[0] = stride[0];
  for (int axis = 0; axis < 3; ++axis) {
    side.position[1 + axis] = p.stride[axis] * stride[2 + axis];
    side.tap[axis] = stride[2 + axis];
  }
  side.channel = stride[1];
  side.element = channels_last(p) ? stride[1] : stride[4];
  side.access = access(p, stride, alignment);
  return side;
}

inline Params make_params(Problem const& p, convt3d_tensors const& t, convt3d_device const& device) {
  Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
  Params params{};
  params.x = t.x;
  params.x_position[0] = x_stride[0];
  for (int axis = 0; axis < 3; ++axis) params.x_position[1 + axis] = x_stride[2 + axis];
  params.x_channel = x_stride[1];
  int const bytes = element_bytes(p);
  params.x_in_vectors =
      p.x_stride[1] == 1 && access_bytes(x_shape(p), x_stride.v, 1, p.x_alignment, bytes) == kAccessBytes;
  params.weight = t.weight;
  Size5 const weight_stride = effective_stride(weight_shape(p), p.weight_stride);
  std::copy(weight_stride.v, weight_stride.v + 5, params.weight_stride);
  params.prepared = t.workspace;
  params.bias = p.has_bias ? t.bias : nullptr;
  params.bias_stride = p.bias_stride;
  params.y = make_side(p, t.y, effective_stride(y_shape(p), p.y_stride), p.y_alignment);
  params.add = make_side(p, t.add, effective_add_stride(p), p.add_alignment);
  if (!p.has_add) params.add.access = Access::kNone;

  auto const divide = [](int64_t by) { return cutlass::FastDivmod(static_cast<int>(by)); };
  params.in_channels = static_cast<int>(p.in_channels);
  params.out_channels = static_cast<int>(p.out_channels);
  params.positions = static_cast<int>(positions(p));
  params.width = static_cast<int>(p.in_size[2]);
  params.divide_w = divide(p.in_size[2]);
  params.divide_h = divide(p.in_size[1]);
  params.divide_d = divide(p.in_size[0]);
  params.divide_channels = divide(p.out_channels);
  params.divide_kw = divide(p.kernel[2]);
  params.divide_kh = divide(p.kernel[1]);
  Units const u = units(p);
  params.divide_run = divide(u.of_run);
  params.divide_runs = divide(u.taps_w);
  params.last = channels_last(p);
  params.run = static_cast<int>(u.run);
  params.units = static_cast<int>(u.count);
  params.steps = steps(p);
  params.groups = static_cast<int>(group_count(p));
  params.splits = static_cast<int>(splits(p, device.compute_capability));
  params.split_groups = static_cast<int>(split_groups(p, device.compute_capability));
  params.activation = p.activation;
  params.negative_slope = p.negative_slope;
  params.add_after = p.add_order == CONVT3D_ADD_AFTER;
  return params;
}

/// Divides the groups of a tile among warps where whole tiles would leave many without work at the end.
inline void divide_work(Params& params, int workers) {
  params.parts = 1;
  double best = 0;
  for (int parts = 1; parts <= 4 && params.split_groups / parts >= 2; parts *= 2) {
    int64_t const items = int64_t{params.tiles} * parts, rounds = (items + workers - 1) / workers;
    double const busy = double(items) / double(rounds * workers);
    if (busy < best + 0.05) continue;
    best = busy;
    params.parts = parts;
  }
  params.part_groups = (params.split_groups + params.parts - 1) / params.parts;
}

/// A plain launch, or one that may start while the kernel before it is still running.
template <class Kernel>
cudaError_t launch_main(Params const& params, unsigned blocks, int shared_bytes, bool overlap, cudaStream_t stream) {
  auto* const kernel = &patch_kernel<Kernel>;
  if (overlap) {
    return launch_dependent(kernel, blocks, Kernel::kThreads, static_cast<size_t>(shared_bytes), stream, params);
  }
  kernel<<<blocks, Kernel::kThreads, static_cast<size_t>(shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

template <class Kernel>
cudaError_t launch_kernel(PatchCall const& call, cudaStream_t stream) {
  Problem const& p = *call.problem;
  Params params = make_params(p, *call.tensors, call.device);
  params.tiles = (params.positions + Kernel::kTile - 1) / Kernel::kTile;
  constexpr int kWarps = Kernel::kThreads / kLanes;
  int const of_split = std::max(call.device.multiprocessors / params.splits, 1);
  divide_work(params, of_split * kWarps);
  int const needed = static_cast<int>((int64_t{params.tiles} * params.parts + kWarps - 1) / kWarps);
  params.workers = std::min(of_split, needed) * kWarps;
  int64_t const limit = shared_limit(call.device.compute_capability), held = params.split_groups * group_bytes(p);
  // The same for all calls: another thread's with another size may come in between.
  cudaError_t error =
      cudaFuncSetAttribute(&patch_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit));
  if (error != cudaSuccess) return error;
  using F = typename Kernel::F;
  int64_t const lanes = int64_t{params.splits} * params.split_groups * F::kRowBlocks * params.steps * kLanes;
  auto const blocks = static_cast<unsigned>((lanes + kPrepareThreads - 1) / kPrepareThreads);
  prepare_kernel<typename Kernel::Arithmetic, F::kUnit><<<blocks, kPrepareThreads, 0, stream>>>(params);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_main<Kernel>(params, static_cast<unsigned>(params.splits * std::min(of_split, needed)),
                             static_cast<int>(held + kStages * stage_bytes(Kernel::kThreads)), call.overlap, stream);
}

template <class Arithmetic, int kUnit, int kSteps>
cudaError_t launch_steps(PatchCall const& call, cudaStream_t stream) {
  return is_quick(*call.problem) ? launch_kernel<Kernel<Arithmetic, kUnit, kSteps, true>>(call, stream)
                                 : launch_kernel<Kernel<Arithmetic, kUnit, kSteps, false>>(call, stream);
}

/// With the fewer steps of two kernels that do.
template <class Arithmetic, int kUnit, int kFew, int kMany>
cudaError_t launch(PatchCall const& call, cudaStream_t stream) {
  if (steps(*call.problem) <= kFew) return launch_steps<Arithmetic, kUnit, kFew>(call, stream);
  if constexpr (kMany > kFew) return launch_steps<Arithmetic, kUnit, kMany>(call, stream);
  return cudaErrorInvalidValue;
}

}  // namespace convt3d::sm80::patch
