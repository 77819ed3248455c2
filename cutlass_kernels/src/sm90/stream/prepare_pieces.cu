// SPDX-License-Identifier: Apache-2.0
//
// The pre-kernel: writes the weights, rounded to TF32 where they are fp32, as the pieces that the streaming kernel
// brings in (stream/geometry.hpp), zeroes its counter, and makes the packed channels-last copy of x, likewise rounded,
// where x is not read in place and comes in whole vectors.
#include "dependent_launch.hpp"
#include "sm90/operand_bits.hpp"
#include "sm90/stream/params.hpp"

namespace convt3d::sm90::stream {
namespace {

template <class T>
__device__ void write_pieces(PieceParams const& p) {
  constexpr int kVector = 16 / sizeof(T);
  using Bits = decltype(operand_bits(T{}));
  int64_t const index = static_cast<int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x;
  int64_t const threads = static_cast<int64_t>(p.piece_ctas) * kPrepareThreads;
  if (index == 0) *p.counter = 0;
  for (int64_t i = index; i < p.owner_count; i += threads) p.owners[i] = 0;

  // 16 bytes of channels of one row at a time.
  int64_t const vectors = static_cast<int64_t>(p.channel_tiles) * p.tile_pieces * (kPieceBytes / 16);
  for (int64_t i = index; i < vectors; i += threads) {
    int const group = static_cast<int>(i % 8);
    int const row = static_cast<int>(i / 8 % kTileChannels);
    int64_t const piece_index = i / 8 / kTileChannels;
    int const tile = static_cast<int>(piece_index / p.tile_pieces);
    int rest = static_cast<int>(piece_index % p.tile_pieces);
    int cls = p.classes - 1;
    while (rest < p.first_piece[cls]) --cls;
    Program const& program = p.program[cls];
    rest -= p.first_piece[cls];
    int const pieces = program.pieces();
    int const depth = rest / pieces % program.depth.count;
    int const slab = rest / pieces / program.depth.count;
    Piece const piece = program.piece(depth, rest % pieces);
    int const out_channel = tile * kTileChannels + row_channel(p.channels_last, row);
    int64_t offset = out_channel * p.weight_stride[1];
    for (int axis = 0; axis < 3; ++axis) offset += piece.tap[axis] * p.weight_stride[2 + axis];
    int const first = (slab * 8 + group) * kVector;
    alignas(16) Bits bits[kVector];
    for (int k = 0; k < kVector; ++k) {
      bits[k] = 0;
      if (first + k < p.in_channels && out_channel < p.out_channels) {
        T const value = static_cast<T const*>(p.weight)[offset + (first + k) * p.weight_stride[0]];
        bits[k] = operand_bits(value);
      }
    }
    unsigned char* const image = p.pieces + piece_index * kPieceBytes;
    *reinterpret_cast<uint4*>(image + piece_offset(row, group * 16)) = *reinterpret_cast<uint4 const*>(bits);
  }
}

/// The words of 16 bytes of x as the tensor cores shall read them.
template <class T>
__device__ uint4 operands(uint4 v) {
  if constexpr (sizeof(T) == 4) {
    v = make_uint4(round_bits_to_tf32(v.x), round_bits_to_tf32(v.y), round_bits_to_tf32(v.z), round_bits_to_tf32(v.w));
  }
  return v;
}

constexpr int kTurnVoxels = 128;
constexpr int kTurnBytes = 128 * kTurnVoxels;

/// 128 bytes of channels by 128 voxels of a sample, turned in shared memory: reads run along the voxels, writes along
/// the channels, both 16 bytes a thread. Vector `v` of a channel's row lies at v ^ (channel / vector), so that neither
/// side conflicts.
template <class T>
__device__ void turn_x(PieceParams const& p, int64_t tile) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kChannels = 128 / sizeof(T);
  constexpr int kRowVectors = kTurnVoxels / kVector;
  constexpr int kReads = kChannels * kRowVectors / kPrepareThreads;
  extern __shared__ uint4
      turned[];  // kTurnBytes; dynamic, so that without x the next kernel's CTAs fit beside this one
  int const channel_begin = static_cast<int>(tile % p.slabs) * kChannels;
  int64_t const voxel_begin = tile / p.slabs % p.voxel_tiles * kTurnVoxels;
  int64_t const n = tile / p.slabs / p.voxel_tiles;

  auto const* x = static_cast<T const*>(p.x) + n * p.x_sample_stride;
  uint4 v[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    int const index = i * kPrepareThreads + threadIdx.x;
    int const channel = channel_begin + index / kRowVectors;
    int64_t const voxel = voxel_begin + index % kRowVectors * kVector;
    v[i] = make_uint4(0, 0, 0, 0);
    if (channel < p.in_channels && voxel < p.voxels) {
      v[i] = __ldcs(reinterpret_cast<uint4 const*>(x + channel * p.x_channel_stride + voxel));
    }
  }
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    int const index = i * kPrepareThreads + threadIdx.x;
    int const row = index / kRowVectors;
    turned[row * kRowVectors + (index % kRowVectors ^ (row / kVector))] = operands<T>(v[i]);
  }
  __syncthreads();

  auto* const out = static_cast<T*>(p.x_out) + n * p.voxels * p.x_channels;
  uint32_t const* const words = reinterpret_cast<uint32_t const*>(turned);
  // A thread turns 4 / sizeof(T) voxels (a word of each row) by 16 bytes of channels at a time.
  constexpr int kPerWord = 4 / sizeof(T);
  constexpr int kTurns = kTurnVoxels / kPerWord * 8 / kPrepareThreads;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    int const index = i * kPrepareThreads + threadIdx.x;
    int const group = index % 8;
    int const word = index / 8;  // of a row
    uint32_t w[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      w[c] = words[(group * kVector + c) * kRowVectors * 4 + (word / 4 ^ group) * 4 + word % 4];
    }
    int const channel = channel_begin + group * kVector;
    int64_t const voxel = voxel_begin + static_cast<int64_t>(word) * kPerWord;
    if (channel >= p.x_channels || voxel >= p.voxels) continue;
    auto* const to = reinterpret_cast<uint4*>(out + voxel * p.x_channels + channel);
    if constexpr (sizeof(T) == 4) {
      *to = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      auto pair = [&](int c, uint32_t halves) { return __byte_perm(w[c], w[c + 1], halves); };
      *to = make_uint4(pair(0, 0x5410), pair(2, 0x5410), pair(4, 0x5410), pair(6, 0x5410));
      auto* const next = reinterpret_cast<uint4*>(out + (voxel + 1) * p.x_channels + channel);
      *next = make_uint4(pair(0, 0x7632), pair(2, 0x7632), pair(4, 0x7632), pair(6, 0x7632));
    }
  }
}

/// x is packed channels last already: rounded.
template <class T>
__device__ void copy_x(PieceParams const& p, int64_t block) {
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    int64_t const at = (block * kCopiesPerThread + i) * kPrepareThreads + threadIdx.x;
    if (at >= p.x_vectors) return;
    static_cast<uint4*>(p.x_out)[at] = operands<T>(__ldcs(static_cast<uint4 const*>(p.x) + at));
  }
}

template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ PieceParams const p) {
  let_next_kernel_start();
  if (static_cast<int>(blockIdx.x) < p.piece_ctas) {
    write_pieces<T>(p);
  } else if (p.x_pass == XPass::kTurn) {
    turn_x<T>(p, static_cast<int64_t>(blockIdx.x) - p.piece_ctas);
  } else {
    copy_x<T>(p, static_cast<int64_t>(blockIdx.x) - p.piece_ctas);
  }
}

}  // namespace

cudaError_t prepare_pieces(PieceParams const& params, convt3d_dtype dtype, cudaStream_t stream) {
  auto const kernel = dtype == CONVT3D_F16    ? prepare_kernel<__half>
                      : dtype == CONVT3D_BF16 ? prepare_kernel<__nv_bfloat16>
                                              : prepare_kernel<float>;
  kernel<<<static_cast<unsigned>(params.piece_ctas + params.x_blocks), kPrepareThreads,
           params.x_pass == XPass::kTurn ? kTurnBytes : 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace convt3d::sm90::stream
