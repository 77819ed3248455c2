// SPDX-License-Identifier: Apache-2.0
//
// Which of the family's two kernels computes a problem, and whether the family is worth choosing: by measurement
// (docs/performance-log.md).
#pragma once

#include "sm90/config.hpp"
#include "sm90/stream/config.hpp"

namespace convt3d::sm90 {

enum class Mainloop {
  kResident,  // kernel.hpp: the weights of a channel group stay in shared memory
  kStream,    // stream/kernel.hpp: they come in again for every tile
};

/// For a supported problem on a device with that many multiprocessors.
///
/// The resident kernel reads x once for each 64 bytes of output channels, through registers, which hides behind the
/// outputs while x is no more than two slabs (nnU-Net's 64 -> 32 and, in 16-bit types, 128 -> 64; ms, resident /
/// stream, NCDHW: fp32 0.43 / 0.43, 128 -> 64 0.90 / 0.86, 256 -> 128 0.40 / 0.31). Where the streaming kernel reads x
/// in place it wins from two slabs on (fp16, NDHWC, 64 -> 32 0.175 / 0.218, 128 -> 64 0.418 / 0.382, 256 -> 128 0.210 /
/// 0.129).
inline Mainloop choose_mainloop(Problem const& p, int multiprocessors) {
  int const slabs = stream::reads_x_in_place(p) ? 1 : 2;
  // The resident kernel knows stride 2 alone.
  if (p.stride[0] != 2 || p.stride[1] != 2 || p.stride[2] != 2) return Mainloop::kStream;
  bool const fits = class_count(p) <= multiprocessors && choose_config(p).ring >= kSmallestRing;
  return fits && slab_count(p) <= slabs ? Mainloop::kResident : Mainloop::kStream;
}

/// Whether the family is faster than the sm80 one, which has no tiles in space: not where tiles of 16 x 8 positions
/// would be mostly empty (256 -> 128 from 4^3: fp32 0.21 against 0.12 ms; from 8^3, with half-empty tiles, 0.046
/// against 0.049).
inline bool worthwhile(Problem const& p, convt3d_device const&) {
  stream::Tiling const t = stream::tiling(p);
  Size3 const out = output_size(p);
  return out[1] * out[2] * 4 > t.tiles[1] * t.tiles[2] * (2 * p.stride[1] * kTileH * kTileW);
}

}  // namespace convt3d::sm90
