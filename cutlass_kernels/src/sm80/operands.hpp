// SPDX-License-Identifier: Apache-2.0
//
// Operands of an sm80 run: where the prepared filter and the prepared x lie in the workspace, the pre-pass that fills
// them, and the Call that hands them to a kernel.
#pragma once

#include "prepare/prepare.hpp"
#include "sm80/call.hpp"

namespace convt3d::sm80 {

constexpr int64_t kMaxExtent = int64_t(1) << 20;
constexpr int64_t kMaxChannels = int64_t(1) << 20;
constexpr int64_t kWorkspaceAlignment = 256;

struct OperandLayout {
  int64_t k_channels;  // padded Cin
  int64_t c_channels;  // padded Cout
  int64_t filter_elements;
  bool x_in_place;
  int64_t x_offset;  // of the prepared x in the workspace, in bytes
  int64_t total_bytes;
};

inline OperandLayout operand_layout(Problem const& p) {
  int const bytes = element_bytes(p);
  OperandLayout layout;
  layout.k_channels = padded_channels(p.in_channels, bytes);
  layout.c_channels = padded_channels(p.out_channels, bytes);
  layout.filter_elements = layout.k_channels * layout.c_channels * tap_count(p);
  layout.x_in_place = reads_x_in_place(p);
  layout.x_offset = round_up(layout.filter_elements * bytes, kWorkspaceAlignment);
  int64_t const voxels = p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2];
  layout.total_bytes = layout.x_offset + (layout.x_in_place ? 0 : voxels * layout.k_channels * bytes);
  return layout;
}

// Distance in elements between two samples of x as the mainloop reads it. In place, a sample may span more than its
// own elements, so the largest offset within it counts as well.
inline int64_t prepared_x_sample_stride(Problem const& p) {
  int64_t const k_channels = padded_channels(p.in_channels, element_bytes(p));
  int64_t const packed = p.in_size[0] * p.in_size[1] * p.in_size[2];
  if (!reads_x_in_place(p)) {
    // The caller bounded every extent by 2^20, so three of them stay within 60 bits; the product with the channels
    // might not.
    return packed > kMaxInt ? packed : packed * k_channels;
  }
  Size5 const stride = effective_stride(x_shape(p), p.x_stride);
  int64_t span = stride[0];
  for (int axis = 0; axis < 3; ++axis) {
    if (stride[2 + axis] > kMaxInt) return stride[2 + axis];
    int64_t const reach = stride[2 + axis] * p.in_size[axis];
    span = reach > span ? reach : span;
  }
  return span;
}

// At least the number of blocks that the pre-pass launches.
inline int64_t prepare_blocks_bound(Problem const& p) {
  if (reads_x_in_place(p)) return 1024;
  int64_t const voxel_tiles = p.in_size[0] * p.in_size[1] * p.in_size[2] / 32 + 1;
  int64_t const channel_tiles = p.in_channels / 32 + 1;
  if (p.batch > kMaxInt || voxel_tiles > kMaxInt) return kMaxInt + 1;
  int64_t const per_sample = voxel_tiles * channel_tiles;
  return per_sample > kMaxInt ? per_sample : 1024 + per_sample * p.batch;
}

// The spacing of a sample's voxels where (D, H, W) are one equally spaced run, W fastest; -1 elsewhere.
inline int64_t flat_stride(int64_t const* size, int64_t const* stride) {
  int64_t spacing = 0, expected = -1;
  for (int axis = 2; axis >= 0; --axis) {
    if (size[axis] == 1) continue;
    if (expected == -1) spacing = expected = stride[axis];
    if (stride[axis] != expected) return -1;
    expected *= size[axis];
  }
  return spacing;
}

inline prepare::Params prepare_params(Problem const& p, convt3d_tensors const& tensors) {
  OperandLayout const layout = operand_layout(p);
  prepare::Params params{};
  Size5 const x_sizes = x_shape(p);
  Size5 const x_strides = effective_stride(x_sizes, p.x_stride);
  auto* const workspace = static_cast<char*>(tensors.workspace);
  params.x_in = tensors.x;
  params.x_out = layout.x_in_place ? nullptr : workspace + layout.x_offset;
  for (int axis = 0; axis < 5; ++axis) {
    params.x_size[axis] = x_sizes[axis];
    params.x_stride[axis] = x_strides[axis];
    params.weight_stride[axis] = p.weight_stride[axis];
  }
  params.x_channels_padded = static_cast<int32_t>(layout.k_channels);
  params.x_flat_stride = flat_stride(p.in_size, x_strides.v + 2);
  params.x_dense = is_ndhwc(x_sizes, p.x_stride) && p.in_channels == layout.k_channels && p.x_alignment == kAccessBytes;
  if (params.x_dense) params.x_stride[1] = 1;
  params.weight = tensors.weight;
  params.filter = workspace;
  params.k_channels = static_cast<int32_t>(p.in_channels);
  params.k_channels_padded = static_cast<int32_t>(layout.k_channels);
  params.c_channels = static_cast<int32_t>(p.out_channels);
  params.c_channels_padded = static_cast<int32_t>(layout.c_channels);
  params.class_count = static_cast<int32_t>(residue_class_count(p.stride));
  for (int index = 0; index < params.class_count; ++index) {
    ResidueClass const rc = residue_class(p, index);
    prepare::FilterClass& out = params.classes[index];
    for (int axis = 0; axis < 3; ++axis) {
      out.taps[axis] = static_cast<int32_t>(rc.dim[axis].taps);
      out.first_tap[axis] = static_cast<int32_t>(rc.dim[axis].first_tap);
      out.tap_step[axis] = static_cast<int32_t>(rc.dim[axis].tap_step);
    }
    out.begin = params.filter_size;
    params.filter_size += rc.taps() * layout.k_channels * layout.c_channels;
  }
  return params;
}

inline Call make_call(Problem const& p, convt3d_tensors const& tensors, prepare::Params const& pre_pass) {
  Call call{};
  call.problem = &p;
  call.k_channels = pre_pass.k_channels_padded;
  call.c_channels = pre_pass.c_channels_padded;
  call.filter = pre_pass.filter;
  if (pre_pass.x_out) {
    call.x = pre_pass.x_out;
    call.x_stride[3] = call.k_channels;
    for (int axis = 2; axis >= 0; --axis) call.x_stride[axis] = call.x_stride[axis + 1] * p.in_size[axis];
  } else {
    call.x = tensors.x;
    Size5 const strides = effective_stride(x_shape(p), p.x_stride);
    call.x_stride[0] = strides[0];
    for (int axis = 0; axis < 3; ++axis) call.x_stride[1 + axis] = strides[2 + axis];
  }
  call.bias = p.has_bias ? tensors.bias : nullptr;
  call.add = p.has_add ? tensors.add : nullptr;
  call.y = tensors.y;
  return call;
}

}  // namespace convt3d::sm80
