// SPDX-License-Identifier: Apache-2.0
//
// Which of the family's two kernels computes a problem, and whether the family is worth choosing: by measurement
// (docs/performance-log.md).
#pragma once

#include "sm90/config.hpp"
#include "sm90/copyable.hpp"
#include "sm90/refusal.hpp"
#include "sm90/stream/config.hpp"

namespace convt3d::sm90 {

enum class Mainloop {
  kResident,  // kernel.hpp: the weights of a channel group stay in shared memory
  kStream,    // stream/kernel.hpp: they come in again for every tile
};

inline void want_copyable(Refusal& r, Problem const& p, char const* const (&names)[3], int64_t const* stride,
                          int alignment) {
  visit_copyable(p, stride, alignment, [&](bool good, int which, int64_t value, char const* limit) {
    r.want(good, names[which], value, limit);
  });
}

/// Both kernels move y and a full-size add as boxes.
inline void want_boxes(Refusal& r, Problem const& p) {
  Size3 const out = output_size(p);
  if (!form(p).channels_last) r.want(out[1] >= 4, "output size along H", out[1], "at least 4");
  r.want(out[2] >= 2, "output size along W", out[2], "at least 2");
  want_copyable(r, p, {"alignment of y", "smallest stride of y", "a stride of y"}, p.y_stride, p.y_alignment);
  Size5 const add = effective_add_stride(p);
  bool const per_channel = add[2] == 0 && add[3] == 0 && add[4] == 0;
  if (p.has_add && !per_channel) {
    want_copyable(r, p,
                  {"alignment of a full-size add", "smallest stride of a full-size add", "a stride of a full-size add"},
                  p.add_stride, p.add_alignment);
  }
}

/// What the resident kernel takes of what the family takes.
inline void want_resident(Refusal& r, Problem const& p, int multiprocessors) {
  static constexpr char const* kStrides[3] = {"stride along D", "stride along H", "stride along W"};
  for (int axis = 0; axis < 3; ++axis) {
    r.want(p.stride[axis] == 2, kStrides[axis], p.stride[axis], "2 where it keeps the weights");
  }
  r.want(p.in_channels % 8 == 0, "in_channels", p.in_channels, "multiples of 8");
  r.want(p.out_channels % 8 == 0, "out_channels", p.out_channels, "multiples of 8");
  if (!r.none()) return;
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
  want_boxes(r, p);
  r.want(class_count(p) <= multiprocessors && choose_config(p).ring >= kSmallestRing,
         "shared memory left beside the weights, in 8 KB", choose_config(p).ring, "at least 8");
}

/// Likewise the streaming kernel.
inline void want_streamable(Refusal& r, Problem const& p) {
  want_boxes(r, p);
  // A map of y for each residue of its rows.
  r.want(output_size(p)[1] >= p.stride[1], "output size along H", output_size(p)[1], "at least the stride");
  r.want(stream::tiling(p).items <= (int64_t{1} << 30), "number of tiles", stream::tiling(p).items, "at most 2^30");
  int const ring = stream::choose_config(p).ring;
  r.want(ring >= stream::kSmallestRing, "shared memory left beside x and weights, in 8 KB", ring, "at least 5");
  // The pre-pass counts them in 32 bits.
  int64_t const voxels = p.in_size[0] * p.in_size[1] * p.in_size[2];
  r.want(voxels < (int64_t{1} << 32) || stream::reads_x_in_place(p), "number of voxels of a sample of x", voxels,
         "less than 2^32");
}

/// For a supported problem on a device with that many multiprocessors.
///
/// The resident kernel reads x once for each 64 bytes of output channels, through registers, which hides behind the
/// outputs while x is no more than two slabs (nnU-Net's 64 -> 32 and, in 16-bit types, 128 -> 64; ms, resident /
/// stream, NCDHW: fp32 0.43 / 0.43, 128 -> 64 0.90 / 0.86, 256 -> 128 0.40 / 0.31). Where the streaming kernel reads x
/// in place it wins from two slabs on (fp16, NDHWC, 64 -> 32 0.175 / 0.218, 128 -> 64 0.418 / 0.382, 256 -> 128 0.210 /
/// 0.129).
inline Mainloop choose_mainloop(Problem const& p, int multiprocessors) {
  int const slabs = stream::reads_x_in_place(p) ? 1 : 2;
  if (slab_count(p) > slabs) return Mainloop::kStream;
  Refusal r;
  want_resident(r, p, multiprocessors);
  return r.none() ? Mainloop::kResident : Mainloop::kStream;
}

/// Whether the family is faster than the sm80 one, which has no tiles in space: not where tiles of 16 x 8 positions
/// would be mostly empty (256 -> 128 from 4^3: fp32 0.21 against 0.12 ms; from 8^3, with half-empty tiles, 0.046
/// against 0.049). Tiles of few output channels pay all the same (NCDHW, sm80 / sm90: k3 32 -> 2 from 48^3, fp32 0.288
/// / 0.186, fp16 0.232 / 0.138; 64 -> 14: 0.455 / 0.250, 0.356 / 0.146), and so do few input channels (k4 3 -> 24 from
/// 64^3: 0.747 / 0.532, 0.869 / 0.457).
inline bool worthwhile(Problem const& p, convt3d_device const&) {
  stream::Tiling const t = stream::tiling(p);
  Size3 const out = output_size(p);
  return out[1] * out[2] * 4 > t.tiles[1] * t.tiles[2] * (2 * p.stride[1] * kTileH * kTileW);
}

}  // namespace convt3d::sm90
