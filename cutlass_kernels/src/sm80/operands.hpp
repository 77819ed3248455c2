// SPDX-License-Identifier: Apache-2.0
//
// Operands of an sm80 run: where the prepared filter and the prepared x lie in the workspace, the pre-pass that fills
// them, and the Call that hands them to a kernel.
#pragma once

#include "prepare/prepare.hpp"
#include "sm80/call.hpp"
#include "sm80/joint/geometry.hpp"

namespace convt3d::sm80 {

constexpr int64_t kMaxChannels = int64_t(1) << 20;
constexpr int64_t kWorkspaceAlignment = 256;

// Channels that a row of the prepared x has together. The mainloop fetches the neighbouring voxels of a tile, 64 bytes
// of each: as one run of memory these are half as many cache lines, and each line takes the path to shared memory for
// itself. The joint kernel fetches other pieces. A last block in part must not make a sample too large.
inline int64_t x_block(Problem const& p) {
  int const bytes = element_bytes(p);
  int64_t const channels = padded_channels(p.in_channels, bytes), block = kStepBytes / bytes;
  int64_t const voxels = p.in_size[0] * p.in_size[1] * p.in_size[2];
  bool const fits = voxels <= kMaxInt / round_up(channels, block);
  return joint::chosen(p) || channels < block || !fits ? channels : block;
}

struct OperandLayout {
  int64_t k_channels;  // padded Cin
  int64_t c_channels;  // padded Cout
  int64_t filter_elements;
  bool x_in_place;
  int64_t x_block;   // channels of the prepared x that lie together: all, or those of one iteration
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
  layout.x_block = x_block(p);
  layout.x_offset = round_up(layout.filter_elements * bytes, kWorkspaceAlignment);
  int64_t const voxels = p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2];
  int64_t const channels = round_up(layout.k_channels, layout.x_block);
  layout.total_bytes = layout.x_offset + (layout.x_in_place ? 0 : voxels * channels * bytes);
  return layout;
}

// Strides (N, D, H, W) in elements of x as the mainloop reads it: in place, or packed by the pre-pass. The caller has
// bounded every extent and the channels by 2^20 each; a product that leaves 31 bits is cut to kMaxInt + 1.
struct XStrides {
  int64_t v[4];
};

inline XStrides x_strides(Problem const& p) {
  XStrides out{};
  auto const cut = [](int64_t stride) { return stride > kMaxInt ? kMaxInt + 1 : stride; };
  if (reads_x_in_place(p)) {
    Size5 const stride = effective_stride(x_shape(p), p.x_stride);
    out.v[0] = cut(stride[0]);
    for (int axis = 0; axis < 3; ++axis) out.v[1 + axis] = cut(stride[2 + axis]);
  } else {
    int64_t const block = x_block(p), blocks = (p.in_channels + block - 1) / block;
    out.v[3] = block;
    for (int axis = 2; axis >= 0; --axis) out.v[axis] = cut(out.v[axis + 1] * p.in_size[axis]);
    out.v[0] = cut(out.v[0] * blocks);
  }
  return out;
}

// The largest distance, in elements, that CUTLASS's iterator parameters hold in 32 bits: between two samples, across a
// dimension, and from a class's first tap to its last.
inline int64_t largest_step(Problem const& p, XStrides const& stride) {
  int64_t largest = stride.v[0];
  for (int axis = 0; axis < 3; ++axis) {
    int64_t const g = greatest_common_divisor(p.stride[axis], p.dilation[axis]);
    int64_t const taps_span = (p.kernel[axis] - 1) * p.dilation[axis] / p.stride[axis] + p.dilation[axis] / g;
    int64_t const reach = taps_span > p.in_size[axis] ? taps_span : p.in_size[axis];
    int64_t const step = stride.v[1 + axis] * reach;
    largest = step > largest ? step : largest;
  }
  return largest;
}

// At least the number of blocks that the pre-pass launches.
inline int64_t prepare_blocks_bound(Problem const& p) {
  constexpr int64_t kFilterBlocks = 1 << 20;
  if (reads_x_in_place(p)) return kFilterBlocks;
  int64_t const voxel_tiles = p.in_size[0] * p.in_size[1] * p.in_size[2] / 32 + 1;
  int64_t const channel_tiles = p.in_channels / 32 + 1;
  if (p.batch > kMaxInt || voxel_tiles > kMaxInt) return kMaxInt + 1;
  int64_t const per_sample = voxel_tiles * channel_tiles;
  return per_sample > kMaxInt ? per_sample : kFilterBlocks + per_sample * p.batch;
}

inline prepare::Params prepare_params(Problem const& p, convt3d_tensors const& tensors) {
  OperandLayout const layout = operand_layout(p);
  prepare::Params params{};
  auto* const workspace = static_cast<char*>(tensors.workspace);
  prepare::set_x(params, p, tensors.x, layout.x_in_place ? nullptr : workspace + layout.x_offset, layout.k_channels);
  for (int axis = 0; axis < 5; ++axis) params.weight_stride[axis] = p.weight_stride[axis];
  bool const blocks = !layout.x_in_place && layout.x_block < layout.k_channels;
  params.x_block = static_cast<int32_t>(blocks ? layout.x_block : 0);
  params.x_dense =
      is_ndhwc(x_shape(p), p.x_stride) && p.in_channels == layout.k_channels && p.x_alignment == kAccessBytes;
  params.weight = tensors.weight;
  params.filter = workspace;
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
  call.x = pre_pass.x_out ? pre_pass.x_out : tensors.x;
  XStrides const strides = x_strides(p);
  for (int i = 0; i < 4; ++i) call.x_stride[i] = strides.v[i];
  call.x_block_step = kStepBytes / element_bytes(p);
  if (pre_pass.x_block != 0) call.x_block_step = strides.v[3] * p.in_size[0] * p.in_size[1] * p.in_size[2];
  call.bias = p.has_bias ? tensors.bias : nullptr;
  call.add = p.has_add ? tensors.add : nullptr;
  call.y = tensors.y;
  return call;
}

}  // namespace convt3d::sm80
