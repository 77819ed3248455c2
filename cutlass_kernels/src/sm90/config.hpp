// SPDX-License-Identifier: Apache-2.0
//
// Choice of the tuning parameters: plain host code, apart from the kernel. Shared memory of a CTA holds the weights of
// its class, the stages of x and the ring of add and y, in this order of importance.
#pragma once

#include <cstddef>

#include "sm90/split.hpp"

namespace convt3d::sm90 {

constexpr size_t kSharedLimit = 227 * 1024;  // of one CTA on SM90
constexpr size_t kBarrierBytes = 2048;       // SharedStorage of the kernel
constexpr size_t kAlignmentBytes = 1024;     // lost to aligning the tiles
constexpr int kSmallestRing = 8;             // one tile; with half of it the loads of add no longer cover the latency
constexpr int kWantedRing = 11;              // more has never helped
constexpr int kLargestRing = 14;
constexpr int kLargestStages = 12;

struct Config {
  int run_length;  // tiles along D that one CTA computes in a row
  bool keep;       // these share their planes of x
  int stages;      // slabs of x in shared memory
  int ring;        // units; less than kSmallestRing where the problem does not fit
};

constexpr size_t shared_bytes(Problem const& p, int stages, int ring) {
  return kAlignmentBytes + class_weight_bytes(p) + kBarrierBytes + static_cast<size_t>(stages) * slab(p).bytes +
         static_cast<size_t>(ring) * kUnitBytes;
}

/// Units that fit beside `stages`.
constexpr int ring_beside(Problem const& p, int stages) {
  size_t const used = shared_bytes(p, stages, 0);
  return used < kSharedLimit ? static_cast<int>((kSharedLimit - used) / kUnitBytes) : 0;
}

constexpr Config choose_config(Problem const& p) {
  Config c{};
  // Two tiles in a row read three planes of x instead of four; longer runs scatter the tiles that are worked on at
  // one time over more of the tensor (measured on the reference, NCDHW: 1 / 2 / 4 in 0.637 / 0.574 / 0.585 ms). In
  // NDHWC the classes share the lines of a voxel, so that scattering costs more than slices (0.602 / 0.62 to 0.83 /
  // 0.88 ms; fp16 0.313 / 0.318 / 0.333); but in ieee mode, where slices are dear, 0.925 / 0.795. Short problems keep
  // the CTAs evenly busy instead, and sharing needs all slabs of a tile at once.
  int const depth = window(p.kernel[0], p.padding[0]).count;
  int const tile_slabs = depth * slab_count(p);
  c.keep = (!form(p).channels_last || uses_split(p)) && depth > 1 && tile_slabs <= kLargestStages &&
           ring_beside(p, tile_slabs) >= kSmallestRing && tiling(p, 2).runs * class_count(p) >= 2048;
  c.run_length = c.keep ? 2 : 1;
  // The ring first, as far as it helps, then stages.
  int const fewest = c.keep && tile_slabs > 2 ? tile_slabs : 2;
  c.stages = fewest;
  while (c.stages < kLargestStages && ring_beside(p, c.stages + 1) >= kWantedRing) ++c.stages;
  c.ring = ring_beside(p, c.stages);
  if (c.ring > kLargestRing) c.ring = kLargestRing;
  return c;
}

struct Workspace {
  // Offsets and the total. The last five are of fp32 in ieee mode alone; behind the total comes the sm80 family's.
  size_t counters, suspects, owners, weights, scans, weight_results, weight_exponents, declined, bytes;
};

constexpr int kPrepareThreads = 256;
constexpr int kPrepareCtas = 384;

/// CTAs of the ieee mode's pre-kernel that look at x; others write weights beside them.
constexpr int kScanCtas = 132;

constexpr Workspace workspace_layout(Problem const& p, Config const& c) {
  constexpr size_t kAlign = 128;
  size_t at = 0;
  auto place = [&](size_t bytes) {
    size_t const offset = at;
    at += (bytes + kAlign - 1) / kAlign * kAlign;
    return offset;
  };
  size_t const classes = class_count(p);
  size_t const blocks = classes * class_blocks(p);
  bool const split = uses_split(p);
  Workspace w{};
  w.counters = place(classes * 4);
  w.suspects = place(kPrepareCtas * 4);
  w.owners = place(classes * static_cast<size_t>(tiling(p, c.run_length).runs) * 4);
  w.weights = place(classes * class_weight_bytes(p));
  w.scans = place(split ? sizeof(ScanResult) * kScanCtas : 0);
  w.weight_results = place(split ? blocks * 4 : 0);
  w.weight_exponents = place(split ? classes * 4 : 0);
  w.declined = place(split ? 4 : 0);
  w.bytes = at;
  return w;
}

}  // namespace convt3d::sm90
