// SPDX-License-Identifier: Apache-2.0
#include "sm90/launch.hpp"
#include "sm90/most_ctas.hpp"
#include "sm90/product/kernel.hpp"
#include "sm90/product/product.hpp"
#include "sm90/tensor_map.hpp"

namespace convt3d::sm90::product {
namespace {

/// A map whose boxes hold 128 bytes of the fastest dimension; strides in elements, from the second dimension on.
template <int kRank>
bool encode(CUtensorMap* map, Problem const& p, void const* base, int64_t const (&size)[kRank],
            int64_t const (&stride)[kRank - 1], int64_t const (&box_size)[kRank]) {
  int const bytes = element_bytes(p);
  cuuint64_t dims[kRank], strides[kRank - 1];
  cuuint32_t box[kRank], step[kRank];
  for (int i = 0; i < kRank; ++i) {
    dims[i] = static_cast<cuuint64_t>(size[i]);
    box[i] = static_cast<cuuint32_t>(box_size[i]);
    step[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(stride[i - 1] * bytes);
  }
  // Of fp32 the copy engine makes TF32, to nearest, ties to even.
  CUtensorMapDataType const type = p.dtype == CONVT3D_F32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : kMapTypes[p.dtype];
  return encode_tensor_map(map, type, kRank, const_cast<void*>(base), dims, strides, box, step,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

cutlass::FastDivmod divide(int64_t by) { return cutlass::FastDivmod(static_cast<int>(by)); }

bool encode_x(ProductParams& k, Problem const& p, void const* x, Boxes const& boxes) {
  int const depth = kStepBytes / element_bytes(p);
  if (takes_rows(p)) {
    return encode<2>(&k.x_map, p, x, {p.in_channels, positions(p)}, {x_row(p)}, {depth, kPositions});
  }
  Size5 const shape = x_shape(p);
  // Steps that are no multiples of each other, and boxes that overlap, do as well; of a single voxel any does.
  auto stride = [&](int axis) { return shape[axis] == 1 ? int64_t{16} / element_bytes(p) : p.x_stride[axis]; };
  auto const& box = boxes.size.size;
  return encode<5>(&k.x_map, p, x, {shape[1], shape[4], shape[3], shape[2], shape[0]},
                   {stride(4), stride(3), stride(2), stride(0)}, {depth, box[3], box[2], box[1], box[0]});
}

void fill_boxes(ProductParams& k, Problem const& p, Tiling const& tiles) {
  BoxParams& b = k.boxes;
  Boxes const& boxes = tiles.boxes;
  b.box = boxes.size;
  b.rows = boxes.size.rows();
  for (int axis = 0; axis < 4; ++axis) {
    b.divide_box[axis] = divide(boxes.size.size[axis]);
    b.divide_tiles[axis] = divide(boxes.tiles.size[axis]);
  }
  b.divide_columns = divide(tiles.columns(k.warpgroups));
  Classes const classes = classes_by_taps(p);
  for (int rank = 0; rank < class_total(p); ++rank) {
    for (int axis = 0; axis < 3; ++axis) {
      ResidueClass1d const& of = classes.v[rank].dim[axis];
      b.cls[rank].residue[axis] = static_cast<int32_t>(of.origin);
      b.cls[rank].outputs[axis] = static_cast<int32_t>(of.count);
      b.cls[rank].taps[axis] = static_cast<int32_t>(of.taps);
      b.cls[rank].first_tap[axis] = static_cast<int32_t>(of.first_tap);
      b.cls[rank].base[axis] = static_cast<int32_t>(of.base);
    }
  }
}

/// Positions and columns, and how far apart they are in y and add: of rows the voxels of x, each with the stride's
/// outputs; of boxes the outputs themselves, of which the samples are counted here and the rest in the classes.
void fill_steps(ProductParams& k, Problem const& p) {
  bool const rows = takes_rows(p);
  k.positions = static_cast<int32_t>(rows ? positions(p) : p.batch);
  k.columns = static_cast<int32_t>(rows ? weight_columns(p) : p.out_channels);
  k.divide_channels = divide(p.out_channels);
  k.divide_w = divide(p.in_size[2]);
  k.divide_h = divide(p.in_size[1]);
  k.divide_d = divide(p.in_size[0]);
  k.divide_kernel_w = divide(p.kernel[2]);
  k.divide_kernel_h = divide(p.kernel[1]);
  Size5 const y_sizes = y_shape(p), y_stride = effective_stride(y_sizes, p.y_stride), add = effective_add_stride(p);
  for (int axis = 0; axis < 5; ++axis) {
    int64_t const stride = axis < 2 || !rows ? 1 : p.stride[axis - 2];
    k.y_step[axis] = static_cast<int32_t>(y_stride[axis] * stride);
    k.add_step[axis] = static_cast<int32_t>(add[axis] * stride);
    if (axis < 2) continue;
    k.y_tap[axis - 2] = static_cast<int32_t>(y_stride[axis]);
    k.add_tap[axis - 2] = static_cast<int32_t>(add[axis]);
  }
}

bool fill_params(ProductParams& k, Problem const& p, convt3d_tensors const& t, int multiprocessors) {
  int const depth = kStepBytes / element_bytes(p);
  int64_t const columns = weight_columns(p), channels = p.in_channels;
  Tiling const tiles = tiling(p);
  k.warpgroups = warpgroups(tiles, multiprocessors);
  // 128 bytes of a row of the weight, the columns of an access, are a dimension of their own.
  if (!encode_x(k, p, t.x, tiles.boxes) ||
      !encode<3>(&k.weight_map, p, t.weight, {depth, channels, columns / depth}, {columns, depth},
                 {depth, depth, k.warpgroups * kColumns / depth})) {
    return false;
  }
  k.steps = steps(p);
  k.tiles = static_cast<int32_t>(tiles.tiles(k.warpgroups));
  k.stages = stages(k.warpgroups);
  k.position_tiles = divide(tiles.position_tiles);
  fill_steps(k, p);
  if (!takes_rows(p)) fill_boxes(k, p, tiles);
  k.mainloop.x = t.x;
  Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
  for (int axis = 0; axis < 5; ++axis) k.mainloop.x_stride[axis] = x_stride[axis];
  for (int axis = 0; axis < 3; ++axis) k.mainloop.in_size[axis] = static_cast<int32_t>(p.in_size[axis]);
  fill_epilogue(k.epilogue, p, t, 0);
  fill_cold(k.cold, p, t, nullptr);
  return true;
}

template <class T, template <class> class Walk, int kBlocks>
cudaError_t launch_kernel(ProductParams const& k, int blocks, cudaStream_t stream) {
  using Of = Kernel<T, Walk<T>, kBlocks>;
  auto* const function = kernel<T, Walk, kBlocks>;
  cudaError_t const error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Of::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>((k.warpgroups + 1) * 128));
  config.dynamicSmemBytes = static_cast<size_t>(k.stages) * stage_bytes(k.warpgroups) + sizeof(typename Of::Shared) +
                            (kBlocks > 1 ? cluster_bytes(kBlocks) : 0) + 1024;  // the last to align the stages
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kBlocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, function, k);
}

template <template <class> class Walk, int kBlocks>
cudaError_t launch_type(int32_t dtype, ProductParams const& k, int blocks, cudaStream_t stream) {
  if (dtype == CONVT3D_F16) return launch_kernel<__half, Walk, kBlocks>(k, blocks, stream);
  if (dtype == CONVT3D_BF16) return launch_kernel<__nv_bfloat16, Walk, kBlocks>(k, blocks, stream);
  return launch_kernel<float, Walk, kBlocks>(k, blocks, stream);
}

}  // namespace

cudaError_t launch(Problem const& p, convt3d_tensors const& tensors, int multiprocessors, cudaStream_t stream) {
  convt3d_tensors t = tensors;
  if (reinterpret_cast<uintptr_t>(t.weight) % 16 != 0) {  // the copy engine wants that; not known before
    t.weight = t.workspace;
    cudaError_t const error =
        cudaMemcpyAsync(t.workspace, tensors.weight, workspace_bytes(p), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  ProductParams k{};
  if (!fill_params(k, p, t, multiprocessors)) return cudaErrorInvalidValue;
  int const of_cluster = cluster_blocks(p, k.tiles, k.warpgroups, cta_count(INT_MAX, multiprocessors));
  int const blocks = of_cluster > 1 ? k.tiles * of_cluster : cta_count(k.tiles, multiprocessors);
  if (takes_rows(p)) return launch_type<WalkRows, 1>(p.dtype, k, blocks, stream);
  if (of_cluster == 4) return launch_type<WalkBoxes, 4>(p.dtype, k, blocks, stream);
  if (of_cluster == 2) return launch_type<WalkBoxes, 2>(p.dtype, k, blocks, stream);
  return launch_type<WalkBoxes, 1>(p.dtype, k, blocks, stream);
}

}  // namespace convt3d::sm90::product
