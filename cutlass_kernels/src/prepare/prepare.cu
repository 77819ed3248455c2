// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "convt3d/numerics.hpp"
#include "dependent_launch.hpp"
#include "prepare.hpp"

namespace convt3d::prepare {
namespace {

constexpr int kTile = 32;  // voxels and channels per block
constexpr int kRowsPerStep = 8;
constexpr int kThreads = kTile * kRowsPerStep;
constexpr int kPacketsPerThread = 4;

// Four neighbouring channels.
template <class T>
struct alignas(4 * sizeof(T)) Packet {
  T v[4];
};

struct Keep {
  template <class T>
  __device__ T operator()(T value) const {
    return value;
  }
};

struct RoundTf32 {
  __device__ uint32_t operator()(uint32_t bits) const { return round_bits_to_tf32(bits); }
};

// Elements are moved as unsigned integers of their size: nothing but the rounding looks at their value.
template <class T, class Convert>
__device__ void prepare_filter(Params const& p, unsigned first, unsigned step) {
  auto const* weight = static_cast<T const*>(p.weight);
  auto* filter = static_cast<T*>(p.filter);
  unsigned const size = unsigned(p.filter_size);  // launch() bounds it: 64-bit divisions would take most of the time
  int index = 0;
  for (unsigned i = first; i < size; i += step) {
    while (index + 1 < p.class_count && i >= p.classes[index + 1].begin) ++index;
    FilterClass const& c = p.classes[index];
    unsigned rest = i - unsigned(c.begin);
    int const channel = int(rest % unsigned(p.c_channels_padded));
    rest /= unsigned(p.c_channels_padded);
    int64_t offset = 0;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      int const tap = c.first_tap[axis] + int(rest % unsigned(c.taps[axis])) * c.tap_step[axis];
      rest /= unsigned(c.taps[axis]);
      offset += tap * p.weight_stride[2 + axis];
    }
    T value = 0;
    if (rest < unsigned(p.k_channels) && channel < p.c_channels) {
      value = weight[offset + rest * p.weight_stride[0] + channel * p.weight_stride[1]];
    }
    filter[i] = Convert{}(value);
  }
}

constexpr int kRunChannels = 64;  // output channels of a block
constexpr int64_t kMaxFilterBlocks = 1 << 20;
constexpr int kMaxRun = 64;  // elements from one output channel's taps to the next one's

// Weights whose taps lie together (PyTorch's order): each tap's place behind that of its output channel, and in the
// packed filter for input channel 0, with the step from one input channel to the next. No taps: they do not.
struct TapRun {
  int32_t taps, reach;  // reach: elements that the taps of a channel span
  int16_t offset[kMaxRun];
  int32_t out_begin[kMaxRun], out_step[kMaxRun];
};
static_assert(sizeof(Params) + sizeof(TapRun) + 8 <= 4096, "CUDA guarantees 4 KiB of kernel parameters");

// prepare_filter for them, where its lanes, which run along the output channels, would fetch a sector each: one input
// channel of 64 output channels is read as one run and turned in shared memory.
template <class T, class Convert>
__device__ void prepare_filter_runs(Params const& p, TapRun const& tap_run, unsigned block) {
  __shared__ T run[kRunChannels * kMaxRun * 33 / 32];
  auto const place = [](int i) { return i + i / 32; };  // spreads strides that are powers of two over the banks
  int const columns = (p.c_channels_padded + kRunChannels - 1) / kRunChannels;
  int const k = int(block) / columns, first = int(block) % columns * kRunChannels;
  int const stride = int(p.weight_stride[1]);
  int const channels = min(kRunChannels, p.c_channels - first);
  if (k < p.k_channels && channels > 0) {
    auto const* const from = static_cast<T const*>(p.weight) + k * p.weight_stride[0] + int64_t(first) * stride;
    // Behind the last channel's last tap the memory may end.
    int const size = (channels - 1) * stride + tap_run.reach;
#pragma unroll 4
    for (int i = threadIdx.x; i < size; i += kThreads) run[place(i)] = Convert{}(from[i]);
  }
  __syncthreads();
  // A warp keeps to one tap at a time.
  int const channel = threadIdx.x % kRunChannels;
  bool const inside = k < p.k_channels && channel < channels;
  auto* const filter = static_cast<T*>(p.filter) + first + channel;
  if (first + channel < p.c_channels_padded) {
#pragma unroll 4
    for (int tap = threadIdx.x / kRunChannels; tap < tap_run.taps; tap += kThreads / kRunChannels) {
      T const value = inside ? run[place(channel * stride + tap_run.offset[tap])] : T(0);
      filter[tap_run.out_begin[tap] + k * tap_run.out_step[tap]] = value;
    }
  }
  __syncthreads();  // the run in shared memory is written again
}

struct Voxels {
  int64_t per_sample;
  int64_t tiles;  // of 32, per sample
  int channel_tiles;
};

__host__ __device__ inline Voxels count_voxels(Params const& p) {
  int64_t const voxels = p.x_size[2] * p.x_size[3] * p.x_size[4];
  return {voxels, (voxels + kTile - 1) / kTile, (p.k_channels_padded + kTile - 1) / kTile};
}

// Address of one voxel of a sample. 32-bit divisions wherever the sizes allow, and none where (D, H, W) are one run.
__device__ inline int64_t voxel_offset(Params const& p, int64_t voxel) {
  if (p.x_flat_stride >= 0) return voxel * p.x_flat_stride;
  unsigned const width = unsigned(p.x_size[4]), height = unsigned(p.x_size[3]);  // the caller bounds them
  unsigned const w = unsigned(voxel) % width, dh = unsigned(voxel) / width;
  return w * p.x_stride[4] + (dh % height) * p.x_stride[3] + (dh / height) * p.x_stride[2];
}

// Where the prepared x has four channels, from `channel` on, of a voxel of a sample.
__device__ inline int64_t packet_offset(Params const& p, int64_t per_sample, int64_t n, int64_t voxel, int channel) {
  if (p.x_block == 0) return (n * per_sample + voxel) * p.k_channels_padded + channel;
  int const blocks = (p.k_channels_padded + p.x_block - 1) / p.x_block, block = channel / p.x_block;
  return ((n * blocks + block) * per_sample + voxel) * p.x_block + channel % p.x_block;
}

// One tile of 32 voxels by 32 channels of one sample, turned in shared memory so that both the read and the write
// are runs. A thread writes four neighbouring channels at once; 8 threads hold a voxel's 32.
template <class T, class Convert>
__device__ void turn_x(Params const& p, int64_t tile) {
  __shared__ T turned[kTile][kTile + 1];
  Voxels const count = count_voxels(p);
  int const channel_begin = int(tile % count.channel_tiles) * kTile;
  int64_t const voxel_begin = tile / count.channel_tiles % count.tiles * kTile;
  int64_t const n = tile / count.channel_tiles / count.tiles;
  int const lane = threadIdx.x % kTile;
  int const group = threadIdx.x / kTile;
  auto const* x = static_cast<T const*>(p.x_in) + n * p.x_stride[0];

  int64_t const voxel_in = voxel_begin + lane;
  int64_t const base = voxel_in < count.per_sample ? voxel_offset(p, voxel_in) : 0;
  T value[kTile / kRowsPerStep];
#pragma unroll
  for (int i = 0; i < kTile / kRowsPerStep; ++i) {
    int const channel = channel_begin + group + i * kRowsPerStep;
    bool const inside = voxel_in < count.per_sample && channel < p.x_size[1];
    value[i] = inside ? x[base + channel * p.x_stride[1]] : T(0);
  }
#pragma unroll
  for (int i = 0; i < kTile / kRowsPerStep; ++i) turned[group + i * kRowsPerStep][lane] = Convert{}(value[i]);
  __syncthreads();

  // kTile * kTile / 4 == kThreads: one packet of four each. The padded channel count is a multiple of 4.
  int const voxel = threadIdx.x / (kTile / 4);
  int const channel = threadIdx.x % (kTile / 4) * 4;
  if (voxel_begin + voxel >= count.per_sample || channel_begin + channel >= p.k_channels_padded) return;
  Packet<T> packet;
#pragma unroll
  for (int e = 0; e < 4; ++e) packet.v[e] = turned[channel + e][voxel];
  auto* const out = static_cast<T*>(p.x_out);
  *reinterpret_cast<Packet<T>*>(
      out + packet_offset(p, count.per_sample, n, voxel_begin + voxel, channel_begin + channel)) = packet;
}

// x in channels-last order already: rounded, and padded where the channels ask for it.
template <class T, class Convert>
__device__ void copy_x(Params const& p, int64_t block) {
  Voxels const count = count_voxels(p);
  int const packets = p.k_channels_padded / 4;
  int64_t const total = p.x_size[0] * count.per_sample * packets;
#pragma unroll
  for (int i = 0; i < kPacketsPerThread; ++i) {
    int64_t const index = (block * kPacketsPerThread + i) * kThreads + threadIdx.x;
    if (index >= total) return;
    Packet<T> packet{};
    int64_t at = 4 * index;
    if (p.x_dense && p.x_block == 0) {
      packet = static_cast<Packet<T> const*>(p.x_in)[index];
    } else {
      bool const narrow = total <= UINT32_MAX;  // as all but the largest are
      int64_t const row = narrow ? unsigned(index) / unsigned(packets) : index / packets;
      int const channel = int(index - row * packets) * 4;
      int64_t const n = narrow ? unsigned(row) / unsigned(count.per_sample) : row / count.per_sample;
      int64_t const voxel = row - n * count.per_sample;
      at = packet_offset(p, count.per_sample, n, voxel, channel);
      if (p.x_dense) {
        packet = static_cast<Packet<T> const*>(p.x_in)[index];
      } else {
        auto const* x = static_cast<T const*>(p.x_in) + n * p.x_stride[0] + voxel_offset(p, voxel) + channel;
#pragma unroll
        for (int e = 0; e < 4; ++e) packet.v[e] = channel + e < p.x_size[1] ? x[e] : T(0);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) packet.v[e] = Convert{}(packet.v[e]);
    *reinterpret_cast<Packet<T>*>(static_cast<T*>(p.x_out) + at) = packet;
  }
}

// The first virtual blocks take the filter, one per tile of x follows.
template <class T, class Convert>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(__grid_constant__ Params const p, __grid_constant__ TapRun const tap_run, int filter_blocks,
                   int blocks) {
  // A dependent kernel waits for this one alone, so whatever lies between a pre-pass and its reader is either a plain
  // launch or waits itself.
  let_next_kernel_start();
  if (p.condition != nullptr) {
    wait_for_previous_kernel();
    if (*p.condition == 0) return;
  }
  for (unsigned block = blockIdx.x; block < unsigned(blocks); block += gridDim.x) {
    if (block < unsigned(filter_blocks) && tap_run.taps > 0) {
      prepare_filter_runs<T, Convert>(p, tap_run, block);
    } else if (block < unsigned(filter_blocks)) {
      prepare_filter<T, Convert>(p, block * kThreads + threadIdx.x, unsigned(filter_blocks) * kThreads);
    } else if (p.x_stride[1] == 1) {
      copy_x<T, Convert>(p, int64_t(block) - filter_blocks);
    } else {
      turn_x<T, Convert>(p, int64_t(block) - filter_blocks);
      __syncthreads();  // the tile in shared memory is written again
    }
  }
}

TapRun find_run(Params const& p) {
  TapRun run{};
  int64_t const channel_stride = p.weight_stride[1];
  if (p.filter_size == 0 || p.c_channels == 1 || channel_stride < 2 || channel_stride > kMaxRun) return run;
  for (int index = 0; index < p.class_count; ++index) {
    FilterClass const& c = p.classes[index];
    int const own = c.taps[0] * c.taps[1] * c.taps[2];
    if (own > kMaxRun - run.taps) return TapRun{};
    int64_t first[3], step[3];
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = c.first_tap[axis] * p.weight_stride[2 + axis];
      step[axis] = c.tap_step[axis] * p.weight_stride[2 + axis];
    }
    auto out = static_cast<int32_t>(c.begin);
    for (int d = 0; d < c.taps[0]; ++d) {
      for (int h = 0; h < c.taps[1]; ++h) {
        for (int w = 0; w < c.taps[2]; ++w) {
          int64_t const offset = first[0] + d * step[0] + first[1] + h * step[1] + first[2] + w * step[2];
          if (offset < 0 || offset >= channel_stride) return TapRun{};
          run.reach = std::max(run.reach, static_cast<int32_t>(offset + 1));
          run.offset[run.taps] = static_cast<int16_t>(offset);
          run.out_begin[run.taps] = out;
          run.out_step[run.taps++] = own * p.c_channels_padded;
          out += p.c_channels_padded;
        }
      }
    }
  }
  return run;
}

}  // namespace

cudaError_t launch(Params const& p, int element_size, bool round_tf32, cudaStream_t stream, int max_blocks) {
  int64_t const runs = int64_t(p.k_channels_padded) * ((p.c_channels_padded + kRunChannels - 1) / kRunChannels);
  TapRun const tap_run = runs <= kMaxFilterBlocks ? find_run(p) : TapRun{};
  int64_t const filter_blocks =
      tap_run.taps > 0 ? runs : std::min<int64_t>((p.filter_size + kThreads - 1) / kThreads, 1024);
  int64_t x_blocks = 0;
  if (p.x_out) {
    Voxels const count = count_voxels(p);
    int64_t const per_block = int64_t(kThreads) * kPacketsPerThread;
    x_blocks = p.x_stride[1] == 1
                   ? (p.x_size[0] * count.per_sample * (p.k_channels_padded / 4) + per_block - 1) / per_block
                   : p.x_size[0] * count.tiles * count.channel_tiles;
  }
  int64_t const blocks = filter_blocks + x_blocks;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || p.filter_size > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto const grid = static_cast<unsigned>(std::min<int64_t>(blocks, max_blocks));
  int const all = static_cast<int>(blocks);
  int const fb = static_cast<int>(filter_blocks);
  auto const kernel = element_size == 2 ? prepare_kernel<uint16_t, Keep>
                      : round_tf32      ? prepare_kernel<uint32_t, RoundTf32>
                                        : prepare_kernel<uint32_t, Keep>;
  if (p.condition != nullptr) return launch_dependent(kernel, grid, kThreads, 0, stream, p, tap_run, fb, all);
  kernel<<<grid, kThreads, 0, stream>>>(p, tap_run, fb, all);
  return cudaGetLastError();
}

}  // namespace convt3d::prepare
