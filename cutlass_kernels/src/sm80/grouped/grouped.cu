// SPDX-License-Identifier: Apache-2.0
//
// Host side of the kernels for groups of few channels.
#include <algorithm>

#include "sm80/grouped/grouped.hpp"
#include "sm80/grouped/mma_launch.hpp"
#include "sm80/grouped/params.hpp"

namespace convt3d::sm80::grouped {
namespace {

Params make_params(Problem const& p, convt3d_tensors const& t) {
  Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
  Size5 const add_stride = effective_add_stride(p);
  Params params{};
  params.x = t.x;
  params.weight = t.weight;
  params.bias = p.has_bias ? t.bias : nullptr;
  params.add = p.has_add ? t.add : nullptr;
  params.y = t.y;
  params.x_stride_n = x_stride[0];
  params.x_stride_c = x_stride[1];
  for (int i = 0; i < 5; ++i) {
    params.weight_stride[i] = p.weight_stride[i];
    params.add_stride[i] = add_stride[i];
    params.y_stride[i] = p.y_stride[i];
  }
  params.bias_stride = p.bias_stride;
  params.out_channels = static_cast<int>(p.out_channels);
  params.inputs = static_cast<int>(p.in_channels / p.groups);
  params.outputs = static_cast<int>(p.out_channels / p.groups);
  for (int axis = 0; axis < 3; ++axis) {
    int64_t const out = output_size(p, axis);
    params.x_stride[axis] = static_cast<int>(x_stride[2 + axis]);
    params.in_size[axis] = static_cast<int>(p.in_size[axis]);
    params.out_size[axis] = static_cast<int>(out);
    params.kernel[axis] = static_cast<int>(p.kernel[axis]);
    params.stride[axis] = static_cast<int>(p.stride[axis]);
    for (int64_t r = 0; r < p.stride[axis]; ++r) {
      ResidueClass1d const c =
          residue_class_1d(r, out, p.kernel[axis], p.stride[axis], p.padding[axis], p.dilation[axis]);
      params.tap_step[axis] = static_cast<int>(c.tap_step);
      params.input_step[axis] = static_cast<int>(c.input_step);
      params.residues[axis][r] = {static_cast<int>(c.taps), static_cast<int>(c.first_tap), static_cast<int>(c.base),
                                  cutlass::FastDivmod(static_cast<int>(std::max<int64_t>(c.count, 1)))};
    }
  }
  params.row_products = static_cast<int>(most_taps(p, 2));
  params.part_products = static_cast<int>(products_of_part(p));
  params.activation = p.activation;
  params.negative_slope = p.negative_slope;
  params.add_after = p.add_order == CONVT3D_ADD_AFTER;
  int const bytes = element_bytes(p);
  params.y_in_pairs = pairs_are_aligned(y_shape(p), p.y_stride, p.y_alignment, bytes);
  params.add_in_pairs =
      p.has_add && add_stride[4] == 1 && pairs_are_aligned(y_shape(p), add_stride.v, p.add_alignment, bytes);
  return params;
}

// How the gathers divide the problem.
void divide(Problem const& p, Params& params) {
  params.position_tiles = cutlass::FastDivmod(static_cast<int>(position_tiles(p)));
  params.channel_blocks = cutlass::FastDivmod(static_cast<int>(channel_blocks(p)));
  if (takes_cells(p)) {
    auto const squares = [&](int axis) { return (output_size(p, axis) + p.stride[axis] - 1) / p.stride[axis]; };
    int64_t const cells = cells_of_position(p);
    params.columns = cutlass::FastDivmod(static_cast<int>(squares(2)));
    params.row_blocks = cutlass::FastDivmod(static_cast<int>((squares(1) + cells - 1) / cells));
    for (int axis : {1, 2}) {
      params.shift[axis - 1] = static_cast<int>(cell_shift(p.kernel[axis], p.padding[axis]));
    }
  }
}

}  // namespace

Status run(Problem const& p, convt3d_tensors const& t, void* stream_handle, Message& message) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  Params params = make_params(p, t);
  cudaError_t error;
  if (on_tensor_cores(p)) {
    error = mma::launch(p, params, stream);
  } else {
    divide(p, params);
    dim3 const grid(static_cast<unsigned>(position_tiles(p) * channel_blocks(p) * p.batch),
                    static_cast<unsigned>(class_count(p)));
    size_t const shared_bytes = sizeof(float) * static_cast<size_t>(block_weights(p));
    auto const launch = !takes_cells(p)           ? launch_gather
                        : p.dtype == CONVT3D_F16  ? launch_cells<__half, false>
                        : p.dtype == CONVT3D_BF16 ? launch_cells<__nv_bfloat16, false>
                        : uses_tf32(p)            ? launch_cells<float, true>
                                                  : launch_cells<float, false>;
    launch(p, params, grid, shared_bytes, stream);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return CONVT3D_OK;
  cudaGetLastError();  // reported here; the next call must not find it
  return message.fail(CONVT3D_CUDA_ERROR, "sm80: %s", cudaGetErrorString(error));
}

}  // namespace convt3d::sm80::grouped
