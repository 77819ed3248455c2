// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to the sm90 kernel: plain data, filled in fill_params.cu, read-only on the device.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cutlass/fast_math.h"
#include "sm90/config.hpp"
#include "sm90/split.hpp"

namespace convt3d::sm90 {

constexpr int kUnitsPerGroup = 4;  // one for each warp
constexpr int kUnitsPerTile = kGroups * kUnitsPerGroup;
constexpr int kMaxRing = kLargestRing;
constexpr int kMaxStages = kLargestStages;
constexpr int kScheduleSlots = 4;
constexpr int kLoaderWarps = 4;  // bring x into shared memory
constexpr int kStoreWarps = 3;   // store finished units to y

/// The blocks of one group, as the consumer reads them.
struct DeviceProgram {
  int32_t first_byte;        // in the class's weight image
  int32_t live[kMaxWindow];  // whether it multiplies a slice
  int32_t last_live;         // the last of these, -1 if none
  float factor[4];           // of the sums of each (H, W) parity, number 2 h + w (sums.hpp)
};

struct MainloopParams {
  void const* x;
  int64_t x_stride[5];  // N, C, D, H, W in elements
  int32_t in_channels, in_size[3];
  int32_t vectorized;  // x can be read in pieces of 16 bytes
  int32_t window_lo[3];
  int32_t depth_count;  // D planes of x that a tile needs
  int32_t slabs;        // of a plane
  int32_t last_halves;  // 64-byte halves of the last slab's rows that hold channels (of fp32, the whole row is one)
  int32_t slab_pitch, slab_columns, stage_bytes;
  // What the loader fetches of a slab: `groups` of 16 bytes of channels, every H row of the slab, and along W the
  // range [fetch_lo, fetch_lo + fetch_count) relative to the tile; in 16-byte vectors of W positions for NCDHW.
  int32_t groups, rows, fetch_lo, fetch_count;
  // In ieee mode, where a slab is one chunk: a thread's items are those of one column and group, `item_rows` rows
  // apart.
  int32_t item_rows;
  int32_t stages;
  int32_t keep;  // the tiles of a run share planes: a plane stays until the last tile that reads it
  cutlass::FastDivmod divide_fastest, divide_second;  // of an item's index
  unsigned char const* weights;                       // prepared images, one per class
  int32_t weight_bytes;                               // per class, of both groups
  int32_t offsets;                                    // (H, W) offsets
  int32_t block_units[kMaxOffsets];                   // their blocks, and from one slice or channel block to the next,
  int32_t block_step;                                 // in units of 16 bytes; in ieee mode
  int32_t operand_offset[kMaxOffsets];                // 16-byte units from the start of a slab
  DeviceProgram program[kGroups];
};

/// How `add` reaches the epilogue.
enum class AddMode : int32_t {
  kNone = 0,
  kTile = 1,        // full size, through the ring
  kPerChannel = 2,  // one value for each (n, c); a scalar too
};

struct EpilogueParams {
  // Maps whose boxes are units. NCDHW: one over (W, H / 4, N C, D, H mod 4) where the tensor allows it (`merged`),
  // otherwise one over (W, H / 4, C, D, N) for each H mod 4. NDHWC: one over (C, W / 2, H, N D, W mod 2), or two
  // over (C, W / 2, H, D, N); with the weights as A, one over (C, H / 2, W / 2, D, N) for each (H, W) parity.
  CUtensorMap add_map[4];
  CUtensorMap y_map[4];
  int32_t add_merged, y_merged;
  AddMode add_mode;
  void const* add;
  int64_t add_stride[2];  // N, C; for kPerChannel
  void const* bias;
  int64_t bias_stride;
  int32_t has_bias, activation, add_after;
  float negative_slope;
  float slope_below;  // of none, relu and leaky_relu where t is negative
  int32_t ring;       // units
  int32_t out_channels, out_depth;
};

struct SchedulerParams {
  int32_t* counters;  // one per class, zero at start
  int32_t* owners;    // per class and run: 1 + CTA that computes it, 0 before
  int32_t classes, runs;
  int32_t run_length, pairs_d;
  cutlass::FastDivmod divide_tiles_h, divide_tiles_w, divide_runs_d;
};

/// What the cold path needs to recompute an output from the definition.
struct ColdParams {
  void* y;
  void const* add;
  void const* weight;
  int64_t y_stride[5], add_stride[5], weight_stride[5];
  int32_t out_size[3], kernel[3], stride[3], padding[3];
  int32_t in_channels, has_add;
  int32_t const* weight_suspect;  // one per CTA of the weight kernel
  int32_t weight_suspects;
};

/// For SplitFloat alone (split_route.hpp).
struct SplitParams {
  ScanResult* scan;          // kScanCtas of them
  int32_t weight_results;    // per class and block
  int32_t* tiny_weights;     // likewise: how many, kFewTinyWeights and more if one is infinite or nan
  int32_t* weight_exponent;  // per class, of the scale
  int32_t* declined;         // out: whether the sm80 family is to compute the problem
  int64_t too_many;          // more regions of the sample than this are too many small ones
  uint32_t products;         // of an output, at most
  int32_t head_room;         // binades of x's scale beyond the largest magnitude that the scan has found
};

struct KernelParams {
  MainloopParams mainloop;
  EpilogueParams epilogue;
  SchedulerParams scheduler;
  ColdParams cold;
  SplitParams split;
};

}  // namespace convt3d::sm90
