// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to the streaming kernel.
#pragma once

#include "prepare/prepare.hpp"
#include "sm90/launch.hpp"
#include "sm90/stream/config.hpp"
#include "sm90/stream/plain_map.hpp"
#include "sm90/stream/rows.hpp"

namespace convt3d::sm90::stream {

/// A class as the device reads it.
struct DeviceClass {
  int32_t first_piece;  // in the channel tile
  int32_t depth_lo, depth_count, height_count, width_count[2];
  int32_t direct;                      // pieces of a tile that are multiplied into its sums
  float factor[2];                     // of the sums of each W parity (sums.hpp)
  int16_t operand_offset[kMaxPieces];  // of each piece of a slab, in 16-byte units
};

/// How add and y are moved.
struct PlainParams {
  Paths path;
  PlainExtent extent;
};

/// For SplitFloat alone.
struct StreamSplit {
  uint32_t* x_largest;       // bits of the largest finite magnitude that each CTA of the scan has seen
  uint32_t* weight_largest;  // likewise, kWeightScanResults for each channel tile
  int32_t* weight_exponent;  // of each channel tile's scale
  SplitState* state;
  uint32_t* tiny_x;   // tiny values of x in each of its planes; from kManyTiny on, any number
  uint32_t products;  // of an output at most
  unsigned long long too_many_bad, too_many_tiny;  // more such values of x than these are the sm80 family's
};

struct StreamParams {
  CUtensorMap x_map;  // over (C, H, W, D, N); boxes are slabs
  MainloopParams x;   // x itself, for the cold path, and its slabs
  int32_t box_bytes;
  EpilogueParams epilogue;
  SchedulerParams scheduler;  // one class; runs are items
  ColdParams cold;
  PlainParams plain;
  StreamSplit split;
  unsigned char const* pieces;
  int32_t tile_pieces;
  int32_t slots;
  int32_t stride_d, stride_h, classes;
  int32_t tile_columns;  // of x, from one tile along W to the next
  int32_t tile_width;    // positions along W: kTileW or kNarrowTileW
  DeviceClass cls[kMaxClasses];
  int32_t class_order[kMaxClasses];           // by the number of products, the longest first
  int32_t first_of_last, places_before_last;  // items from here on, and places before them, are ordered by class
  cutlass::FastDivmod divide_last;            // by the places of these
  cutlass::FastDivmod divide_classes, divide_channels, divide_tiles_d, divide_tiles_h, divide_tiles_w;
  cutlass::FastDivmod divide_pairs, divide_stride_h;  // of a class: pair along W, H residue, D residue
};

/// One tile.
struct Item {
  int cls, channel, n, d, h, w;  // first output channel; tiles along H and W; D position of the first consumer group
};

/// What the pre-kernel does with x beside the weights.
enum class XPass : int32_t { kNone, kTurn, kCopy, kGather };

constexpr int kCopiesPerThread = 4;

struct PieceParams {
  Program program[kMaxClasses];
  int32_t first_piece[kMaxClasses], classes;
  void const* weight;
  int64_t weight_stride[5];
  int32_t in_channels, out_channels, slabs;
  int32_t pairs_channels;
  int32_t channel_tiles, tile_pieces;
  unsigned char* pieces;
  int32_t* counter;
  int32_t* owners;
  int64_t owner_count;
  int32_t piece_ctas, piece_every;  // every so many-th CTA writes pieces, until there are enough
  // x: packed voxels, W fastest, or packed channels last.
  XPass x_pass;
  int32_t x_channels;  // of the copy
  void const* x;
  void* x_out;
  int64_t x_sample_stride, x_channel_stride, voxels, voxel_tiles;  // of 128, per sample
  int64_t x_vectors;                                               // of 16 bytes
  int64_t x_blocks;
  // For SplitFloat alone, which gathers x of any strides here too.
  StreamSplit split;
  ScanParams sample;  // of x
  int32_t head_room;  // that the scale leaves for what the sample has missed
  int32_t batch, in_size[3], kernel[3];
  int64_t x_stride[5];
};

/// Fills the parameters of both kernels, and of the general pre-pass of x for what the pre-kernel does not take
/// (otherwise `x.x_out` is null).
bool fill_params(StreamParams& k, PieceParams& w, prepare::Params& x, Problem const& p, Config const& c,
                 convt3d_tensors const& t, int multiprocessors);
cudaError_t prepare_pieces(PieceParams const& params, convt3d_dtype dtype, cudaStream_t stream);
/// fp32 in ieee mode: finds the scales, then prepares both operands in two parts.
cudaError_t scan_operands(PieceParams const& params, cudaStream_t stream);
cudaError_t prepare_split_pieces(PieceParams const& params, cudaStream_t stream);

using Launch = cudaError_t(StreamParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream);
Launch launch_ncdhw_ieee, launch_ncdhw_tf32, launch_ncdhw_f16, launch_ncdhw_bf16;
Launch launch_ndhwc_ieee, launch_ndhwc_tf32, launch_ndhwc_f16, launch_ndhwc_bf16;

}  // namespace convt3d::sm90::stream
