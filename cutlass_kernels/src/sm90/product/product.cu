// SPDX-License-Identifier: Apache-2.0
#include "prepare/prepare.hpp"
#include "sm90/launch.hpp"
#include "sm90/most_ctas.hpp"
#include "sm90/product/launch.hpp"
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
void fill_steps(ProductParams& k, Operands const& of) {
  Problem const& p = of.p;
  bool const rows = of.in_rows();
  k.positions = static_cast<int32_t>(rows ? positions(p) : p.batch);
  k.columns = static_cast<int32_t>(rows ? weight_columns(p) : of.tap_columns);
  k.channels = static_cast<int32_t>(p.out_channels);
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

/// All that depends on the operands as they are read.
bool fill_params(ProductParams& k, Operands const& of, void const* x, void const* weight, int multiprocessors) {
  Problem const& p = of.p;
  int const depth = kStepBytes / element_bytes(p);
  int64_t const columns = of.tap_columns * tap_count(p), channels = p.in_channels;
  Tiling const tiles = tiling(p);
  k.warpgroups = warpgroups(tiles, multiprocessors);
  // 128 bytes of a row of the weight, the columns of an access, are a dimension of their own.
  if (!encode_x(k, p, x, tiles.boxes) ||
      !encode<3>(&k.weight_map, p, weight, {depth, channels, columns / depth}, {columns, depth},
                 {depth, depth, k.warpgroups * kColumns / depth})) {
    return false;
  }
  k.steps = steps(p);
  k.tiles = static_cast<int32_t>(tiles.tiles(k.warpgroups));
  k.stages = stages(k.warpgroups);
  k.position_tiles = divide(tiles.position_tiles);
  fill_steps(k, of);
  if (!of.in_rows()) fill_boxes(k, p, tiles);
  return true;
}

/// What else y is made of, and what a nan is computed again from: the tensors themselves.
void fill_rest(ProductParams& k, Problem const& p, convt3d_tensors const& t) {
  k.mainloop.x = t.x;
  Size5 const x_stride = effective_stride(x_shape(p), p.x_stride);
  for (int axis = 0; axis < 5; ++axis) k.mainloop.x_stride[axis] = x_stride[axis];
  for (int axis = 0; axis < 3; ++axis) k.mainloop.in_size[axis] = static_cast<int32_t>(p.in_size[axis]);
  fill_epilogue(k.epilogue, p, t, 0);
  fill_cold(k.cold, p, t, nullptr);
}

/// x and the weight that the kernel reads: copies that are made here, in one launch, or the tensors themselves.
cudaError_t copy_operands(Operands const& of, Problem const& p, convt3d_tensors const& t, void const*& x,
                          void const*& weight, cudaStream_t stream) {
  auto* const workspace = static_cast<unsigned char*>(t.workspace);
  if (!of.copies_weight && reinterpret_cast<uintptr_t>(t.weight) % 16 != 0) {
    weight = workspace;  // the copy engine wants that; not known before
    auto const bytes = static_cast<size_t>(element_count(weight_shape(p)) * element_bytes(p));
    cudaError_t const error = cudaMemcpyAsync(workspace, t.weight, bytes, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  if (!of.copies_x && !of.copies_weight) return cudaSuccess;
  prepare::Params copies{};
  if (of.copies_x) x = workspace + x_copy_offset(p);
  prepare::set_x(copies, p, t.x, of.copies_x ? workspace + x_copy_offset(p) : nullptr, copied_channels(p));
  if (of.copies_weight) {
    weight = copies.filter = workspace;
    copies.weight = t.weight;
    for (int axis = 0; axis < 5; ++axis) copies.weight_stride[axis] = p.weight_stride[axis];
    copies.c_channels = static_cast<int32_t>(p.out_channels);
    copies.c_channels_padded = static_cast<int32_t>(of.tap_columns);
    copies.filter_size = copied_channels(p) * of.tap_columns * tap_count(p);
    copies.class_count = 1;  // all taps, as they come
    for (int axis = 0; axis < 3; ++axis) {
      copies.classes[0].taps[axis] = static_cast<int32_t>(p.kernel[axis]);
      copies.classes[0].tap_step[axis] = 1;
    }
  }
  // The copy engine rounds to TF32 on the way, as it does with the tensors themselves.
  return prepare::launch(copies, element_bytes(p), false, stream);
}

}  // namespace

cudaError_t launch(Problem const& p, convt3d_tensors const& t, int multiprocessors, cudaStream_t stream) {
  Operands const of = operands(p);
  void const *x = t.x, *weight = t.weight;
  cudaError_t const error = copy_operands(of, p, t, x, weight, stream);
  if (error != cudaSuccess) return error;
  ProductParams k{};
  if (!fill_params(k, of, x, weight, multiprocessors)) return cudaErrorInvalidValue;
  fill_rest(k, p, t);
  Launch launch{p.dtype, of.in_rows(), 0, 0};
  launch.of_cluster = cluster_blocks(of.p, k.tiles, k.warpgroups, cta_count(INT_MAX, multiprocessors));
  launch.blocks = launch.of_cluster > 1 ? k.tiles * launch.of_cluster : cta_count(k.tiles, multiprocessors);
  return of.moves_pairs() ? launch_pairs(launch, k, stream) : launch_apart(launch, k, stream);
}

}  // namespace convt3d::sm90::product
