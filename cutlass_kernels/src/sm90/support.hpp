// SPDX-License-Identifier: Apache-2.0
//
// What the sm90 family takes. Host code without CUDA, so that it is tested anywhere.
#pragma once

#include "message.hpp"
#include "sm90/choice.hpp"

namespace convt3d::sm90 {

/// Reasons why a problem is not taken: the first that is found becomes the message.
class Refusal {
 public:
  Refusal(Message& message) : message_(message) {}

  /// Whether nothing was refused so far.
  bool none() const { return status_ == CONVT3D_OK; }
  Status status() const { return status_; }

  void want(bool good, char const* what, int64_t value, char const* limit) {
    if (good || !none()) return;
    status_ = message_.fail(CONVT3D_NOT_SUPPORTED, "sm90: %s is %lld, the kernel takes %s", what,
                            static_cast<long long>(value), limit);
  }

 private:
  Message& message_;
  Status status_ = CONVT3D_OK;
};

/// The copy engine moves y and a full-size add: neighbours along W (NCDHW) or C (NDHWC), everything else in steps of
/// 16 bytes.
inline void want_copyable(Refusal& r, Problem const& p, char const* const (&names)[3], int64_t const* stride,
                          int alignment) {
  Form const f = form(p);
  Size5 const shape = y_shape(p);
  int const fast = f.channels_last ? 1 : 4;
  r.want(alignment >= 16, names[0], alignment, "16 bytes");
  r.want(stride[fast] == 1, names[1], stride[fast], "1");
  for (int axis = 0; axis < 5; ++axis) {
    if (axis == fast || shape[axis] == 1) continue;
    bool const good = stride[axis] > 0 && stride[axis] % f.vector() == 0 && stride[axis] < (int64_t{1} << 34);
    r.want(good, names[2], stride[axis], f.element == 4 ? "positive multiples of 4" : "positive multiples of 8");
  }
}

/// OK, or NOT_SUPPORTED with the reason.
inline Status supported(Problem const& p, convt3d_device const& device, Message& message) {
  Refusal r(message);
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
    r.want(p.stride[axis] == 1 || p.stride[axis] == 2, name[0], p.stride[axis], "1 or 2");
    r.want(p.dilation[axis] == 1, name[1], p.dilation[axis], "1");
    r.want(p.kernel[axis] >= p.stride[axis] && p.kernel[axis] <= stream::kMaxKernel, name[2], p.kernel[axis],
           "the stride to 5");
    r.want(p.in_size[axis] <= 32768, name[3], p.in_size[axis], "at most 32768");
    r.want(out[axis] <= 65536, name[4], out[axis], "at most 65536");
    r.want(p.padding[axis] <= 64, name[5], p.padding[axis], "at most 64");
  }
  r.want(p.in_channels % 8 == 0, "in_channels", p.in_channels, "multiples of 8");
  r.want(p.out_channels % 8 == 0, "out_channels", p.out_channels, "multiples of 8");
  r.want(p.in_channels <= 4096, "in_channels", p.in_channels, "at most 4096");
  r.want(p.batch <= 65535, "batch", p.batch, "at most 65535");
  if (!r.none()) return r.status();

  r.want(p.out_channels <= 4096, "out_channels", p.out_channels, "at most 4096");
  r.want(p.batch * p.out_channels <= (int64_t{1} << 30), "batch * out_channels", p.batch * p.out_channels,
         "at most 2^30");
  r.want(p.batch * out[0] <= (int64_t{1} << 30), "batch * output size along D", p.batch * out[0], "at most 2^30");
  r.want(element_count(y_shape(p)) == 0 || tiling(p, 1).runs * class_count(p) <= (int64_t{1} << 30), "number of tiles",
         tiling(p, 1).runs, "at most 2^30 over all channels");
  if (uses_split(p)) {
    bool const resident = choose_mainloop(p, device.multiprocessors) == Mainloop::kResident;
    r.want(resident, "precision of float32", p.precision, "1 (tf32) where the weights do not stay in shared memory");
  }
  // An empty output launches nothing, whatever the rest is.
  if (!r.none() || element_count(y_shape(p)) == 0) return r.status();

  Form const f = form(p);
  Size5 const x_size = x_shape(p);
  int const fast = f.channels_last ? 1 : 4;
  r.want(x_size[fast] == 1 || p.x_stride[fast] == 1, f.channels_last ? "stride of x along C" : "stride of x along W",
         p.x_stride[fast], "1, as of y");
  if (f.channels_last) {
    r.want(p.x_alignment >= 16, "alignment of x", p.x_alignment, "16 bytes");
    for (int axis = 0; axis < 5; ++axis) {
      if (axis == fast || x_size[axis] == 1) continue;
      r.want(p.x_stride[axis] % f.vector() == 0, "a stride of x", p.x_stride[axis],
             f.element == 4 ? "multiples of 4" : "multiples of 8");
    }
  }
  // The loader's offsets within a slab are 32-bit.
  int64_t const reach[5] = {0, 128 / element_bytes(p), 0, kTileH + kMaxWindow, kTileW + kMaxWindow};
  int64_t extent = 0;
  for (int axis = 0; axis < 5; ++axis) extent += x_size[axis] == 1 ? 0 : reach[axis] * p.x_stride[axis];
  r.want(extent < (int64_t{1} << 31), "the extent of a plane's rows of x", extent, "less than 2^31 elements");
  if (!f.channels_last) r.want(out[1] >= 4, "output size along H", out[1], "at least 4");
  r.want(out[2] >= 2, "output size along W", out[2], "at least 2");
  want_copyable(r, p, {"alignment of y", "smallest stride of y", "a stride of y"}, p.y_stride, p.y_alignment);
  Size5 const add = effective_add_stride(p);
  bool const per_channel = add[2] == 0 && add[3] == 0 && add[4] == 0;
  if (p.has_add && !per_channel) {
    want_copyable(r, p,
                  {"alignment of a full-size add", "smallest stride of a full-size add", "a stride of a full-size add"},
                  p.add_stride, p.add_alignment);
  }
  if (choose_mainloop(p, device.multiprocessors) == Mainloop::kStream) {
    int const ring = stream::choose_config(p).ring;
    // A map of y for each residue of its rows.
    r.want(out[1] >= p.stride[1], "output size along H", out[1], "at least the stride");
    r.want(ring >= stream::kSmallestRing, "shared memory left beside x and weights, in 8 KB", ring, "at least 5");
    // The pre-pass counts them in 32 bits.
    int64_t const voxels = p.in_size[0] * p.in_size[1] * p.in_size[2];
    r.want(voxels < (int64_t{1} << 32) || stream::reads_x_in_place(p), "number of voxels of a sample of x", voxels,
           "less than 2^32");
  }
  return r.status();
}

}  // namespace convt3d::sm90
