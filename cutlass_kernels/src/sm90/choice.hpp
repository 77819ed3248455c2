// SPDX-License-Identifier: Apache-2.0
//
// Which of the family's kernels computes a problem, and whether the family is worth choosing: by measurement
// (docs/performance-log.md).
#pragma once

#include <cstring>

#include "sm80/estimate.hpp"
#include "sm80/patch/choice.hpp"
#include "sm90/copyable.hpp"
#include "sm90/estimate.hpp"
#include "sm90/product/estimate.hpp"
#include "sm90/refusal.hpp"
#include "sm90/stream/choose.hpp"

namespace convt3d::sm90 {

enum class Mainloop {
  kResident,  // kernel.hpp: the weights of a channel group stay in shared memory
  kStream,    // stream/kernel.hpp: they come in again for every tile
};

/// Whether the resident kernel takes a problem that the family takes: stride 2 and channels in steps of 8, where the
/// copy engine moves y and a full-size add.
inline bool takes_resident(Problem const& p, int multiprocessors) {
  for (int64_t stride : p.stride) {
    if (stride != 2) return false;
  }
  if (p.in_channels % 8 != 0 || p.out_channels % 8 != 0) return false;
  Form const f = form(p);
  Size3 const out = output_size(p);
  Size5 const x_size = x_shape(p);
  int const fast = f.channels_last ? 1 : 4;
  if (x_size[fast] != 1 && p.x_stride[fast] != 1) return false;
  if (f.channels_last) {
    if (p.x_alignment < 16) return false;
    for (int axis = 0; axis < 5; ++axis) {
      if (axis != fast && x_size[axis] != 1 && p.x_stride[axis] % f.vector() != 0) return false;
    }
  }
  // The loader's offsets within a slab are 32-bit.
  int64_t const reach[5] = {0, 128 / element_bytes(p), 0, kTileH + kMaxWindow, kTileW + kMaxWindow};
  int64_t extent = 0;
  for (int axis = 0; axis < 5; ++axis) extent += x_size[axis] == 1 ? 0 : reach[axis] * p.x_stride[axis];
  if (extent >= (int64_t{1} << 31)) return false;
  int const rows = !f.channels_last ? 4 : weights_first(p) ? 2 : 1;  // each residue has a tensor map
  if (out[1] < rows || out[2] < 2) return false;
  if (!copyable(p, p.y_stride, p.y_alignment)) return false;
  Size5 const add = effective_add_stride(p);
  bool const per_channel = add[2] == 0 && add[3] == 0 && add[4] == 0;
  if (p.has_add && !per_channel && !copyable(p, p.add_stride, p.add_alignment)) return false;
  return class_count(p) <= multiprocessors && choose_config(p).ring >= kSmallestRing;
}

/// What the streaming kernel takes of what the family takes.
inline void want_streamable(Refusal& r, Problem const& p) {
  r.want(stream::class_total(p) <= stream::kMaxClasses, "number of classes of outputs", stream::class_total(p),
         "at most 16");
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
/// outputs while x is no more than two slabs of fp32 or one of 16-bit types (nnU-Net's 64 -> 32; ms, resident / stream,
/// NCDHW: fp32 0.43 / 0.43, 128 -> 64 0.90 / 0.86, 256 -> 128 0.40 / 0.31; fp16 128 -> 64 0.473 / 0.441; NDHWC: fp16
/// 64 -> 32 0.175 / 0.218, 128 -> 64 0.418 / 0.382, 256 -> 128 0.210 / 0.129).
inline Mainloop choose_mainloop(Problem const& p, int multiprocessors) {
  int const slabs = p.dtype == CONVT3D_F32 ? 2 : 1;
  if (slab_count(p) > slabs) return Mainloop::kStream;
  return takes_resident(p, multiprocessors) ? Mainloop::kResident : Mainloop::kStream;
}

/// What the family takes by its usual kernels, the resident and the streaming one.
inline void want_usual_kernel(Refusal& r, Problem const& p, int multiprocessors) {
  if (choose_mainloop(p, multiprocessors) == Mainloop::kStream) want_streamable(r, p);
}
inline bool has_usual_kernel(Problem const& p, int multiprocessors) {
  Refusal r;
  want_usual_kernel(r, p, multiprocessors);
  return r.none();
}

/// Where the family has no other kernel, or the product kernel is the faster one by the estimates.
inline bool product_is_best(Problem const& p, int multiprocessors) {
  if (!has_usual_kernel(p, multiprocessors)) return true;
  if (sm80::has_wide_step(p)) return false;
  bool const streams = choose_mainloop(p, multiprocessors) == Mainloop::kStream;
  return product::estimated_microseconds(p, multiprocessors) < estimated_microseconds(p, streams, multiprocessors);
}

/// Whether the product kernel computes a problem that the family takes. Planning a call and its launch ask this several
/// times, and the estimates take a microsecond, so each thread keeps its last answer.
inline bool chooses_product(Problem const& p, int multiprocessors) {
  if (product::nowhere.load(std::memory_order_relaxed)) return false;
  if (product::wherever_possible.load(std::memory_order_relaxed)) return product::takes(p);
  struct Answer {
    Problem p{};
    int multiprocessors = 0;
    bool chosen = false;
  };
  thread_local Answer last;
  static_assert(sizeof(Problem) == 384);  // without bytes between members, which might differ
  if (multiprocessors != last.multiprocessors || std::memcmp(&p, &last.p, sizeof p) != 0) {
    last = {p, multiprocessors, product::takes(p) && product_is_best(p, multiprocessors)};
  }
  return last.chosen;
}

/// Whether warps that move add or y (stream/plain.hpp) find neighbours to move at a time.
inline bool warps_pay(Problem const& p) {
  stream::Paths const path = stream::choose_paths(p);
  int const fast = form(p).channels_last ? 1 : 4;
  if (path.add != stream::Path::kBoxes && effective_add_stride(p)[fast] != 1) return false;
  return path.y == stream::Path::kBoxes || p.y_stride[fast] == 1;
}

/// Microseconds that the sm80 family takes at most for a problem that counts as small: what the estimates were fitted
/// to.
constexpr double kSmall = 700;

/// Whether the family is faster than the sm80 one: for small problems at strides of 1 and 2, and all of the product
/// kernel's, by the estimates of both.
/// Of 2131 measured ones that choice takes 1 % longer than the faster one on average; by the rule below it was 16 %.
///
/// For all others; ms, sm80 / sm90, batch 2, NCDHW unless said.
///
/// Where the kernel is the stride, that one has a kernel for it (sm80/patch/choice.hpp). The sm90 family has tiles in
/// space, the sm80 one has none: not where tiles of 16 x 8 positions would be mostly empty (256 -> 128
/// from 4^3: fp32 0.12 / 0.21; from 8^3, with half-empty tiles, 0.049 / 0.046). Tiles of few channels pay all the same
/// (k3 32 -> 2 from 48^3: fp32 0.288 / 0.186, fp16 0.232 / 0.138; 64 -> 14: 0.455 / 0.250, 0.356 / 0.146; k4 3 -> 24
/// from 64^3: 0.747 / 0.532, 0.869 / 0.457), and so does moving rows that start anywhere by warps (k3 128 -> 64 from
/// 32^3, odd rows: 0.331 / 0.209, 0.301 / 0.142; from 33^3, where tiles are 57 % full, 0.391 / 0.336, 0.346 / 0.206)
/// and strides up to 4 (k = s = (2, 4, 4), 32 -> 16 from 32^3: 0.302 / 0.255, 0.318 / 0.215). In NDHWC a stride of 3 or
/// 4 along W leaves rows of 16 channels alone, which needs many products to hide (32 -> 16: 0.265 / 0.252, 0.217 /
/// 0.234; k = s = (1, 3, 3), 64 -> 32: 0.093 / 0.111, 0.071 / 0.110; (2, 4, 4), 128 -> 64: 0.321 / 0.236, 0.202 /
/// 0.151). In ieee mode the streaming kernel has three products to make and x to look through first: there tiles must
/// be more than half full (320 -> 320 from 8^3, half-full tiles: 0.066 / 0.073, NDHWC 0.051 / 0.067; 256 -> 128 from
/// 4^3: 0.19 / 0.45; with full ones 320 -> 256 from 16^3: 0.257 / 0.109, odd rows of 128 -> 64 from 32^3: 0.567 /
/// 0.325), and strides of 3 and 4 do not pay (the (2, 4, 4) above 0.348 / 0.368, NDHWC 0.327 / 0.374).
inline bool worthwhile(Problem const& p, convt3d_device const& device) {
  if (sm80::patch::faster_than_sm90(p)) return false;
  stream::Tiling const t = stream::tiling(p, kTileW);  // those measured, whatever the tiles are
  Size3 const out = output_size(p);
  int64_t const rows = t.tiles[1] * p.stride[1] * kTileH;
  int64_t const columns = t.tiles[2] * stream::output_step(p) * kTileW;
  if (form(p).channels_last && p.stride[2] > 2 && p.in_channels < 128) return false;
  bool const streams = choose_mainloop(p, device.multiprocessors) == Mainloop::kStream;
  bool const streams_parts = uses_split(p) && streams;
  bool const wide_step = sm80::has_wide_step(p);
  if (streams_parts && (p.stride[1] > 2 || p.stride[2] > 2)) return false;
  if (!warps_pay(p)) return false;
  bool const product = chooses_product(p, device.multiprocessors);
  if (product && wide_step) return false;  // not measured
  if (!wide_step) {
    double const sm80 = sm80::estimated_microseconds(p, device.multiprocessors);
    double const sm90 = product ? product::estimated_microseconds(p, device.multiprocessors)
                                : estimated_microseconds(p, streams, device.multiprocessors);
    if (product || sm80 < kSmall) return sm90 <= 1.05 * sm80;
  }
  return out[1] * out[2] * (streams_parts ? 2 : 4) > rows * columns;
}

}  // namespace convt3d::sm90
