// SPDX-License-Identifier: Apache-2.0
//
// What the sm90 family takes. Host code without CUDA, so that it is tested anywhere.
#pragma once

#include "message.hpp"
#include "sm90/choice.hpp"

namespace convt3d::sm90 {

/// OK, or NOT_SUPPORTED with the reason.
inline Status supported(Problem const& p, convt3d_device const& device, Message& message) {
  Refusal r(&message);
  r.want(device.compute_capability == 90, "compute capability", device.compute_capability, "90");
  r.want(p.groups == 1, "groups", p.groups, "1");
  if (!r.none()) return r.status();

  static constexpr char const* kAxis[3][6] = {{"stride along D", "dilation along D", "kernel size along D",
                                               "input size along D", "output size along D", "padding along D"},
                                              {"stride along H", "dilation along H", "kernel size along H",
                                               "input size along H", "output size along H", "padding along H"},
                                              {"stride along W", "dilation along W", "kernel size along W",
                                               "input size along W", "output size along W", "padding along W"}};
  Size3 const out = output_size(p);
  for (int axis = 0; axis < 3; ++axis) {
    char const* const* name = kAxis[axis];
    r.want(p.stride[axis] >= 1 && p.stride[axis] <= stream::kMaxStride, name[0], p.stride[axis], "1 to 4");
    r.want(p.dilation[axis] == 1, name[1], p.dilation[axis], "1");
    r.want(p.kernel[axis] >= p.stride[axis] && p.kernel[axis] <= stream::kMaxKernel, name[2], p.kernel[axis],
           "the stride to 5");
    r.want(p.in_size[axis] <= 32768, name[3], p.in_size[axis], "at most 32768");
    r.want(out[axis] <= 65536, name[4], out[axis], "at most 65536");
    r.want(p.padding[axis] <= 64, name[5], p.padding[axis], "at most 64");
  }
  r.want(p.in_channels <= 4096, "in_channels", p.in_channels, "at most 4096");
  r.want(p.batch <= 65535, "batch", p.batch, "at most 65535");
  if (!r.none()) return r.status();

  r.want(p.out_channels <= 4096, "out_channels", p.out_channels, "at most 4096");
  r.want(p.batch * p.out_channels <= (int64_t{1} << 30), "batch * out_channels", p.batch * p.out_channels,
         "at most 2^30");
  r.want(p.batch * out[0] <= (int64_t{1} << 30), "batch * output size along D", p.batch * out[0], "at most 2^30");
  r.want(element_count(y_shape(p)) == 0 || tiling(p, 1).runs * class_count(p) <= (int64_t{1} << 30), "number of tiles",
         tiling(p, 1).runs, "at most 2^30 over all channels");
  // An empty output launches nothing, whatever the rest is.
  if (!r.none() || element_count(y_shape(p)) == 0) return r.status();

  if (!chooses_product(p, device.multiprocessors)) want_usual_kernel(r, p, device.multiprocessors);
  return r.status();
}

}  // namespace convt3d::sm90
