// SPDX-License-Identifier: Apache-2.0
//
// What the sm90 family takes. Host code without CUDA, so that it is tested anywhere.
#pragma once

#include "message.hpp"
#include "sm90/config.hpp"

namespace convt3d::sm90 {

/// OK, or NOT_SUPPORTED with the reason.
inline Status supported(Problem const& p, convt3d_device const& device, Message& message) {
  auto no = [&](char const* reason) { return message.fail(CONVT3D_NOT_SUPPORTED, "sm90: %s", reason); };
  if (device.compute_capability != 90) return no("made for compute capability 9.0");
  if (!uses_tf32(p)) return no("takes float32 in tf32 mode only");
  if (p.groups != 1) return no("groups must be 1");
  Size3 const out = output_size(p);
  for (int axis = 0; axis < 3; ++axis) {
    if (p.stride[axis] != 2) return no("stride must be 2");
    if (p.dilation[axis] != 1) return no("dilation must be 1");
    if (p.kernel[axis] < 2 || p.kernel[axis] > 4) return no("kernel sizes must be 2, 3 or 4");
    if (p.in_size[axis] > 32768 || out[axis] > 65536) return no("a spatial size is too large");
    if (p.padding[axis] > 64) return no("padding is too large");
  }
  if (p.in_channels % 8 != 0 || p.out_channels % 8 != 0) return no("channel counts must be multiples of 8");
  if (p.in_channels > 4096 || class_count(p.out_channels) > device.multiprocessors) return no("too many channels");
  if (p.batch > 65535 || p.batch * p.out_channels > (int64_t{1} << 30)) return no("the batch is too large");
  if (tiling(p, 1).runs > (int64_t{1} << 30)) return no("the problem is too large");

  Size5 const x = effective_stride(x_shape(p), p.x_stride);
  if (x_shape(p)[4] != 1 && x[4] != 1) return no("x must be contiguous along W");
  // The copy engine moves y and add: 16-byte aligned rows of neighbouring outputs.
  auto rows = [&](int64_t const* stride, int alignment) {
    if (alignment < 16 || stride[4] != 1) return false;
    for (int axis = 0; axis < 4; ++axis) {
      int64_t const step = y_shape(p)[axis] == 1 ? 4 : stride[axis];
      if (step <= 0 || step % 4 != 0 || step >= (int64_t{1} << 36)) return false;
    }
    return true;
  };
  if (out[1] < 4) return no("fewer than 4 output rows");
  if (out[2] < 2) return no("fewer than 2 outputs per row");
  if (!rows(p.y_stride, p.y_alignment)) return no("rows of y must be 16-byte aligned and contiguous along W");
  Size5 const add = effective_add_stride(p);
  bool const flat = add[2] == 0 && add[3] == 0 && add[4] == 0;
  if (p.has_add && !flat && !rows(p.add_stride, p.add_alignment)) {
    return no("add must be one value per channel, or full-size with 16-byte aligned rows contiguous along W");
  }
  if (group_program(p, 0).count > kMaxBlocks || group_program(p, 1).count > kMaxBlocks ||
      choose_config(p).ring < kSmallestRing) {
    return no("the weights of 16 output channels do not fit into shared memory");
  }
  return CONVT3D_OK;
}

}  // namespace convt3d::sm90
