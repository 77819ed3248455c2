// SPDX-License-Identifier: Apache-2.0
//
// Choice of the tuning parameters: plain host code, apart from the kernel. Shared memory of a CTA holds the weights of
// its class, the stages of x and the ring of add and y, in this order of importance.
#pragma once

#include <cstddef>

#include "sm90/geometry.hpp"

namespace convt3d::sm90 {

constexpr size_t kSharedLimit = 227 * 1024;  // of one CTA on SM90
constexpr size_t kBarrierBytes = 2048;       // SharedStorage of the kernel
constexpr size_t kAlignmentBytes = 1024;     // lost to aligning the tiles
constexpr int kSmallestRing = 8;             // one tile; with half of it the loads of add no longer cover the latency
constexpr int kLargestRing = 24;

struct Config {
  int run_length;  // tiles along D that one CTA computes in a row
  int stages;      // planes of x in shared memory
  int ring;        // units; less than kSmallestRing where the problem does not fit
};

constexpr size_t shared_bytes(Problem const& p, int stages, int ring) {
  return kAlignmentBytes + class_blocks(p) * kWeightBlockBytes + kBarrierBytes +
         static_cast<size_t>(stages) * slab(p).bytes * slab_count(p) + static_cast<size_t>(ring) * kUnitBytes;
}

constexpr Config choose_config(Problem const& p) {
  Config c{};
  // Two planes in a row read three slices of x instead of four; longer runs scatter the tiles that are worked on at
  // one time over more of the tensor (measured on the reference, NCDHW: 1 / 2 / 4 in 0.637 / 0.574 / 0.585 ms). In
  // NDHWC the classes share the lines of a voxel, so that scattering costs more than slices (0.602 / 0.62 to 0.83 /
  // 0.88 ms; fp16 0.313 / 0.318 / 0.333). Short problems keep the CTAs evenly busy instead.
  int64_t const runs_of_two = tiling(p, 2).runs * class_count(p);
  c.run_length = !form(p).channels_last && runs_of_two >= 2048 ? 2 : 1;
  // A tile needs all its slices at once; a spare one only where it costs no ring.
  int const needed = window(p.kernel[0], p.padding[0]).count;
  for (c.stages = needed > 2 ? needed : 2;; --c.stages) {
    size_t const used = shared_bytes(p, c.stages, 0);
    c.ring = used < kSharedLimit ? static_cast<int>((kSharedLimit - used) / kUnitBytes) : 0;
    if (c.ring > kLargestRing) c.ring = kLargestRing;
    if (c.ring >= kSmallestRing || c.stages <= needed) return c;
  }
}

struct Workspace {
  size_t counters, suspects, owners, weights, bytes;  // offsets and the total
};

constexpr int kPrepareThreads = 256;
constexpr int kPrepareCtas = 384;

constexpr Workspace workspace_layout(Problem const& p, Config const& c) {
  constexpr size_t kAlign = 128;
  size_t const classes = class_count(p);
  size_t const owners = classes * static_cast<size_t>(tiling(p, c.run_length).runs) * 4;
  Workspace w{};
  w.counters = 0;
  w.suspects = (classes * 4 + kAlign - 1) / kAlign * kAlign;
  w.owners = w.suspects + kPrepareCtas * 4;
  w.weights = w.owners + (owners + kAlign - 1) / kAlign * kAlign;
  w.bytes = w.weights + classes * class_blocks(p) * kWeightBlockBytes;
  return w;
}

}  // namespace convt3d::sm90
