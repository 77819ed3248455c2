// SPDX-License-Identifier: Apache-2.0
//
// The pre-kernel: writes the weights, rounded to TF32 where they are fp32, as the pieces that the streaming kernel
// brings in (stream/geometry.hpp), zeroes its counter, and makes the packed channels-last copy of x, likewise rounded,
// where x is not read in place and comes in whole vectors. In ieee mode both are written in two parts, 64 bytes of hi
// and 64 of lo for 32 channels, and x may have any strides.
#include <type_traits>

#include "dependent_launch.hpp"
#include "sm90/operand_bits.hpp"
#include "sm90/stream/params.hpp"
#include "sm90/stream/parts.hpp"

namespace convt3d::sm90::stream {
namespace {

template <class T>
constexpr bool kSplit = std::is_same_v<T, SplitFloat>;

/// The exponents of the scales in ieee mode, from what the scan found. In shared memory.
struct Exponents {
  uint32_t warp_largest[kPrepareThreads / 32];
  int32_t weights[kMaxSplitTiles];
};

/// Called by the whole CTA; returns that of x. Those of the weights are found where `of_weights`.
__device__ int find_exponents(PieceParams const& p, bool of_weights, Exponents& e) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t largest = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kScanResults; i += kPrepareThreads) {
    largest = max(largest, __ldcg(p.split.x_largest + i));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) e.warp_largest[warp] = largest;
  if (of_weights) {
    for (int tile = warp; tile < p.channel_tiles; tile += kPrepareThreads / 32) {
      uint32_t const of_tile =
          __reduce_max_sync(0xffffffffu, __ldcg(p.split.weight_largest + tile * kWeightScanResults + lane));
      if (lane != 0) continue;
      e.weights[tile] = split_exponent(of_tile);
      if (blockIdx.x == 0) p.split.weight_exponent[tile] = e.weights[tile];
    }
  }
  __syncthreads();
  largest = 0;
  for (uint32_t of_warp : e.warp_largest) largest = max(largest, of_warp);
  int const exponent = split_exponent(largest) - p.head_room;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.split.state->x_exponent = exponent;
  return exponent;
}

template <class T>
struct Scale {};
template <>
struct Scale<SplitFloat> : OperandScale<SplitFloat> {
  uint32_t overflow;  // magnitudes from these bits on become nan
};

__device__ Scale<SplitFloat> operand_scale(int exponent) {
  return {{__uint_as_float(power_of_two_bits(exponent)), 2 * smallest_split(exponent)}, overflow_bits(exponent)};
}

/// Four channels in two parts.
__device__ void store_parts(Scale<SplitFloat> const& scale, uint4 const& v, void* hi, void* lo) {
  uint2 const ab = Operands<SplitFloat>::pair(scale, v.x, v.y);
  uint2 const cd = Operands<SplitFloat>::pair(scale, v.z, v.w);
  *static_cast<uint2*>(hi) = make_uint2(ab.x, cd.x);
  *static_cast<uint2*>(lo) = make_uint2(ab.y, cd.y);
}

/// The same by all lanes of a warp, of which lane `i` has group `i` mod 8 of a row and stores 16 bytes where `inside`:
/// an even lane the hi parts of its own and the next one's channels, an odd lane the lo parts.
__device__ void store_parts_by_warp(Scale<SplitFloat> const& scale, uint4 const& v, unsigned char* row, bool inside) {
  uint2 const ab = Operands<SplitFloat>::pair(scale, v.x, v.y);
  uint2 const cd = Operands<SplitFloat>::pair(scale, v.z, v.w);
  bool const low = threadIdx.x % 2 != 0;
  uint2 const kept = low ? make_uint2(ab.y, cd.y) : make_uint2(ab.x, cd.x);
  uint2 got = low ? make_uint2(ab.x, cd.x) : make_uint2(ab.y, cd.y);
  got.x = __shfl_xor_sync(0xffffffffu, got.x, 1);
  got.y = __shfl_xor_sync(0xffffffffu, got.y, 1);
  uint4 const both = low ? make_uint4(got.x, got.y, kept.x, kept.y) : make_uint4(kept.x, kept.y, got.x, got.y);
  unsigned char* const to = row + parts_offset(static_cast<int>(threadIdx.x % 8) & ~1) + (low ? kLowPart : 0);
  if (inside) *reinterpret_cast<uint4*>(to) = both;
}

/// Whether parts hold one of them badly: too large, not finite, or tiny.
__device__ bool any_odd(Scale<SplitFloat> const& scale, uint4 const& v) {
  auto odd = [&](uint32_t bits) { return 2 * bits - 1 < scale.limit - 1 || (bits & 0x7fffffffu) >= scale.overflow; };
  return odd(v.x) || odd(v.y) || odd(v.z) || odd(v.w);
}

/// Values of x that parts hold badly, as a thread has met them.
struct OddValues {
  int bad = 0, tiny = 0;

  /// Four of plane `plane()`, counted over samples.
  template <class Plane>
  __device__ void see(PieceParams const& p, Scale<SplitFloat> const& scale, uint4 const& v, Plane&& plane) {
    if (!any_odd(scale, v)) return;
    auto is_bad = [&](uint32_t bits) { return (bits & 0x7fffffffu) >= scale.overflow ? 1 : 0; };
    bad += is_bad(v.x) + is_bad(v.y) + is_bad(v.z) + is_bad(v.w);
    unsigned const found = scale.count_tiny(v);
    if (found == 0) return;
    tiny += static_cast<int>(found);
    // Where all are tiny, atomics to few places would take long; these need no more than kManyTiny.
    uint32_t* const of_plane = p.split.tiny_x + plane();
    if (__ldcg(of_plane) < kManyTiny) atomicAdd(of_plane, found);
  }

  /// Called by whole warps.
  __device__ void report(SplitState& state) const {
    auto add = [](unsigned long long& total, int count) {
      count = __reduce_add_sync(0xffffffffu, count);
      if (count != 0 && threadIdx.x % 32 == 0) atomicAdd(&total, static_cast<unsigned long long>(count));
    };
    add(state.bad_x, bad);
    add(state.tiny_x, tiny);
  }
};

template <class T>
__device__ void write_pieces(PieceParams const& p, int64_t block, int32_t const* exponents) {
  constexpr int kVector = 16 / sizeof(T);
  using Stored = std::conditional_t<kSplit<T>, float, T>;
  using Bits = decltype(operand_bits(Stored{}));
  bool bad = false;
  int64_t const index = block * kPrepareThreads + threadIdx.x;
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
    Piece const piece = program.piece(rest);
    int const out_channel = tile * kTileChannels + row_channel(p.pairs_channels, row);
    int64_t offset = out_channel * p.weight_stride[1];
    for (int axis = 0; axis < 3; ++axis) offset += piece.tap[axis] * p.weight_stride[2 + axis];
    int const first = (piece.slab * 8 + group) * kVector;
    alignas(16) Bits bits[kVector];
    for (int k = 0; k < kVector; ++k) {
      bits[k] = 0;
      if (first + k < p.in_channels && out_channel < p.out_channels) {
        Stored const value = static_cast<Stored const*>(p.weight)[offset + (first + k) * p.weight_stride[0]];
        if constexpr (kSplit<T>) {
          bits[k] = __float_as_uint(value);
        } else {
          bits[k] = operand_bits(value);
        }
      }
    }
    unsigned char* const image = p.pieces + piece_index * kPieceBytes;
    uint4 const vector = *reinterpret_cast<uint4 const*>(bits);
    if constexpr (kSplit<T>) {
      int const byte = parts_offset(group);
      Scale<SplitFloat> const scale = operand_scale(exponents[tile]);
      store_parts(scale, vector, image + piece_offset(row, byte), image + piece_offset(row, byte + kLowPart));
      bad = bad || any_odd(scale, vector);
    } else {
      *reinterpret_cast<uint4*>(image + piece_offset(row, group * 16)) = vector;
    }
  }
  if constexpr (kSplit<T>) {
    if (bad) atomicOr(&p.split.state->bad_weights, 1);
  }
}

/// The words of 16 bytes of x as the tensor cores shall read them, unless that is in parts.
template <class T>
__device__ uint4 operands(uint4 v) {
  if constexpr (std::is_same_v<T, float>) {
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
__device__ void turn_x(PieceParams const& p, int64_t tile, Scale<T> const& scale, OddValues& odd) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kChannels = 128 / sizeof(T);
  constexpr int kRowVectors = kTurnVoxels / kVector;
  constexpr int kReads = kChannels * kRowVectors / kPrepareThreads;
  extern __shared__ uint4 turned[];  // dynamic, so that without x the next kernel's CTAs fit beside this one
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
    bool const inside = channel < p.x_channels && voxel < p.voxels;
    if constexpr (kSplit<T>) {
      auto* const row = reinterpret_cast<unsigned char*>(out + voxel * p.x_channels + channel_begin);
      uint4 const four = make_uint4(w[0], w[1], w[2], w[3]);
      store_parts_by_warp(scale, four, row, inside);
      if (inside) odd.see(p, scale, four, [&] { return n * p.in_size[0] + voxel / (p.in_size[1] * p.in_size[2]); });
    }
    if (kSplit<T> || !inside) continue;
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

/// Where vector `at` of a packed copy goes in parts.
__device__ unsigned char* parts_of(PieceParams const& p, int64_t at) {
  return static_cast<unsigned char*>(p.x_out) + at / 8 * 128 + parts_offset(static_cast<int>(at % 8));
}

/// x is packed channels last already.
template <class T>
__device__ void copy_x(PieceParams const& p, int64_t block, Scale<T> const& scale, OddValues& odd) {
  auto place = [&](int i) { return (block * kCopiesPerThread + i) * kPrepareThreads + threadIdx.x; };
  uint4 v[kCopiesPerThread];
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    v[i] = place(i) < p.x_vectors ? __ldcs(static_cast<uint4 const*>(p.x) + place(i)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kCopiesPerThread; ++i) {
    int64_t const at = place(i);
    bool const inside = at < p.x_vectors;
    if constexpr (kSplit<T>) {
      store_parts_by_warp(scale, v[i], static_cast<unsigned char*>(p.x_out) + at / 8 * 128, inside);
      if (inside) odd.see(p, scale, v[i], [&] { return at / (p.x_channels / 4) / (p.in_size[1] * p.in_size[2]); });
    } else if (inside) {
      static_cast<uint4*>(p.x_out)[at] = operands<T>(v[i]);
    }
  }
}

/// x of any strides, a vector of the copy for each thread.
__device__ void gather_x(PieceParams const& p, int64_t block, Scale<SplitFloat> const& scale, OddValues& odd) {
  int64_t const index = block * kPrepareThreads + threadIdx.x;
  if (index >= p.x_vectors) return;
  // Neighbouring threads read neighbours: channels, or voxels of one vector of channels.
  int const vectors = p.x_channels / 4;  // of a voxel
  int64_t const voxels = p.voxels * p.batch;
  bool const along_channels = p.x_stride[1] == 1;
  int64_t const voxel = along_channels ? index / vectors : index % voxels;
  int const first = 4 * static_cast<int>(along_channels ? index % vectors : index / voxels);
  int64_t rest = voxel;
  int64_t offset = rest % p.in_size[2] * p.x_stride[4];
  rest /= p.in_size[2];
  offset += rest % p.in_size[1] * p.x_stride[3];
  rest /= p.in_size[1];
  offset += rest % p.in_size[0] * p.x_stride[2] + rest / p.in_size[0] * p.x_stride[0];
  uint32_t bits[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i >= p.in_channels) continue;
    bits[i] = __float_as_uint(__ldg(static_cast<float const*>(p.x) + offset + (first + i) * p.x_stride[1]));
  }
  unsigned char* const hi = parts_of(p, voxel * vectors + first / 4);
  uint4 const four = make_uint4(bits[0], bits[1], bits[2], bits[3]);
  store_parts(scale, four, hi, hi + kLowPart);
  odd.see(p, scale, four, [&] { return voxel / (p.in_size[1] * p.in_size[2]); });
}

template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ PieceParams const p) {
  let_next_kernel_start();
  // CTAs that write pieces wait for memory, those of x keep it busy: they take turns.
  int const turn = static_cast<int>(blockIdx.x) / p.piece_every;
  bool const of_weights = turn * p.piece_every == static_cast<int>(blockIdx.x) && turn < p.piece_ctas;
  int64_t const block = of_weights ? turn : static_cast<int64_t>(blockIdx.x) - min(turn + 1, p.piece_ctas);
  Scale<T> scale{};
  int32_t const* exponents = nullptr;
  if constexpr (kSplit<T>) {
    __shared__ Exponents e;
    wait_for_previous_kernel();
    scale = operand_scale(find_exponents(p, of_weights, e));
    exponents = e.weights;
  }
  OddValues odd;
  if (of_weights) {
    write_pieces<T>(p, block, exponents);
  } else if (p.x_pass == XPass::kTurn) {
    turn_x<T>(p, block, scale, odd);
  } else if (p.x_pass == XPass::kCopy) {
    copy_x<T>(p, block, scale, odd);
  } else if constexpr (kSplit<T>) {
    gather_x(p, block, scale, odd);
  }
  if constexpr (kSplit<T>) odd.report(*p.split.state);
}

unsigned prepare_ctas(PieceParams const& p) { return static_cast<unsigned>(p.piece_ctas + p.x_blocks); }
size_t prepare_bytes(PieceParams const& p) { return p.x_pass == XPass::kTurn ? kTurnBytes : 0; }

}  // namespace

cudaError_t prepare_pieces(PieceParams const& params, convt3d_dtype dtype, cudaStream_t stream) {
  auto const kernel = dtype == CONVT3D_F16    ? prepare_kernel<__half>
                      : dtype == CONVT3D_BF16 ? prepare_kernel<__nv_bfloat16>
                                              : prepare_kernel<float>;
  kernel<<<prepare_ctas(params), kPrepareThreads, prepare_bytes(params), stream>>>(params);
  return cudaGetLastError();
}

cudaError_t prepare_split_pieces(PieceParams const& params, cudaStream_t stream) {
  cudaError_t const error = scan_operands(params, stream);
  if (error != cudaSuccess) return error;
  return launch_dependent(prepare_kernel<SplitFloat>, prepare_ctas(params), kPrepareThreads, prepare_bytes(params),
                          stream, params);
}

}  // namespace convt3d::sm90::stream
