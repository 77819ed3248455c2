// SPDX-License-Identifier: Apache-2.0
#include "sm90/launch.hpp"
#include "sm90/most_ctas.hpp"
#include "sm90/product/kernel.hpp"
#include "sm90/product/product.hpp"
#include "sm90/tensor_map.hpp"

namespace convt3d::sm90::product {
namespace {

/// Rows of `inner` elements; or, as parts of rows, `outer` times `inner` of them, a row being as long.
bool encode(CUtensorMap* map, Problem const& p, void const* base, int64_t const (&size)[3], int64_t row, int rank,
            int const (&box_size)[3]) {
  int const bytes = element_bytes(p);
  cuuint64_t dims[3];
  cuuint32_t box[3];
  for (int i = 0; i < 3; ++i) {
    dims[i] = static_cast<cuuint64_t>(size[i]);
    box[i] = static_cast<cuuint32_t>(box_size[i]);
  }
  cuuint64_t const stride[2] = {static_cast<cuuint64_t>(row * bytes), static_cast<cuuint64_t>(size[0] * bytes)};
  cuuint32_t const step[3] = {1, 1, 1};
  // Of fp32 the copy engine makes TF32, to nearest, ties to even.
  CUtensorMapDataType const type = p.dtype == CONVT3D_F32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : kMapTypes[p.dtype];
  return encode_tensor_map(map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(base), dims, stride, box, step,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

bool fill_params(ProductParams& k, Problem const& p, convt3d_tensors const& t, int multiprocessors) {
  int const depth = kStepBytes / element_bytes(p);
  int64_t const columns = column_count(p), channels = p.in_channels;
  k.warpgroups = warpgroups(p, multiprocessors);
  // 128 bytes of a row of the weight, the columns of an access, are a dimension of their own.
  if (!encode(&k.x_map, p, t.x, {channels, positions(p), 1}, x_row(p), 2, {depth, kPositions, 1}) ||
      !encode(&k.weight_map, p, t.weight, {depth, channels, columns / depth}, columns, 3,
              {depth, depth, k.warpgroups * kColumns / depth})) {
    return false;
  }
  auto divide = [](int64_t by) { return cutlass::FastDivmod(static_cast<int>(by)); };
  k.positions = static_cast<int32_t>(positions(p));
  k.columns = static_cast<int32_t>(columns);
  k.steps = static_cast<int32_t>(steps(p));
  int64_t const tiles = position_tiles(p) * column_tiles(p, k.warpgroups);
  k.tiles = static_cast<int32_t>(tiles);
  k.stages = stages(k.warpgroups);
  k.position_tiles = divide(position_tiles(p));
  k.divide_channels = divide(p.out_channels);
  k.divide_w = divide(p.in_size[2]);
  k.divide_h = divide(p.in_size[1]);
  k.divide_d = divide(p.in_size[0]);
  k.divide_kernel_w = divide(p.kernel[2]);
  k.divide_kernel_h = divide(p.kernel[1]);
  Size5 const y_sizes = y_shape(p), y_stride = effective_stride(y_sizes, p.y_stride), add = effective_add_stride(p);
  for (int axis = 0; axis < 5; ++axis) {
    int64_t const stride = axis < 2 ? 1 : p.stride[axis - 2];
    k.y_step[axis] = static_cast<int32_t>(y_stride[axis] * stride);
    k.add_step[axis] = static_cast<int32_t>(add[axis] * stride);
    if (axis < 2) continue;
    k.y_tap[axis - 2] = static_cast<int32_t>(y_stride[axis]);
    k.add_tap[axis - 2] = static_cast<int32_t>(add[axis]);
  }
  k.mainloop.x = t.x;
  Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
  for (int axis = 0; axis < 5; ++axis) k.mainloop.x_stride[axis] = x_stride[axis];
  for (int axis = 0; axis < 3; ++axis) k.mainloop.in_size[axis] = static_cast<int32_t>(p.in_size[axis]);
  fill_epilogue(k.epilogue, p, t, 0);
  fill_cold(k.cold, p, t, nullptr);
  return true;
}

template <class T>
cudaError_t launch_kernel(ProductParams const& k, int blocks, cudaStream_t stream) {
  cudaError_t const error =
      cudaFuncSetAttribute(kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel<T>::kSharedBytes);
  if (error != cudaSuccess) return error;
  size_t const bytes = static_cast<size_t>(k.stages) * stage_bytes(k.warpgroups) + sizeof(typename Kernel<T>::Shared) +
                       1024;  // the last to align the stages
  kernel<T><<<static_cast<unsigned>(blocks), static_cast<unsigned>(k.warpgroups * 128), bytes, stream>>>(k);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(Problem const& p, convt3d_tensors const& t, int multiprocessors, cudaStream_t stream) {
  ProductParams k{};
  if (!fill_params(k, p, t, multiprocessors)) return cudaErrorInvalidValue;
  int const blocks = cta_count(k.tiles, multiprocessors);
  if (p.dtype == CONVT3D_F16) return launch_kernel<__half>(k, blocks, stream);
  if (p.dtype == CONVT3D_BF16) return launch_kernel<__nv_bfloat16>(k, blocks, stream);
  return launch_kernel<float>(k, blocks, stream);
}

}  // namespace convt3d::sm90::product
