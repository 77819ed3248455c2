// SPDX-License-Identifier: Apache-2.0
//
// The kernel of mma.hpp.
#include <algorithm>
#include <type_traits>

#include "sm80/grouped/mma.hpp"
#include "sm80/grouped/mma_launch.hpp"
#include "sm80/instructions.hpp"

namespace convt3d::sm80::grouped::mma {
namespace {

struct MmaParams : Params {
  int low[3], extent[3];  // of the inputs under a tile
  int parts, units, slots, total_units;
  int steps, tiles_of_block, all_tiles;
  cutlass::FastDivmod unit_blocks, tile_blocks, tiles_h, tiles_w, columns_x, rows_x, row_count;
  int classes;
  int64_t y_step, add_step;    // along W from one output of an item to the next
  bool x_in_rows, by_channel;  // 16-byte rows of x; items are channels
  bool add_in_items, y_in_items;
};

__device__ uint32_t shared_address(void const* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// What a half step needs: which row of x from a position's own, which tap, which eighth of the channels (-1: none).
struct Half {
  int64_t tap;  // elements from a weight of tap 0
  int row, part;
};

static_assert(sizeof(Half) == kHalfBytes);

__device__ void describe_halves(MmaParams const& p, Half* halves) {
  for (int i = threadIdx.x; i < 2 * p.steps; i += kThreads) {
    int half = i, count = 0;
    Residue const *in_d, *in_h, *in_w;
    for (int index = 0; index < p.classes; ++index) {
      in_w = &p.residues[2][index % p.stride[2]];
      in_h = &p.residues[1][index / p.stride[2] % p.stride[1]];
      in_d = &p.residues[0][index / p.stride[2] / p.stride[1]];
      count = in_d->taps * in_h->taps * in_w->taps * p.parts;
      if (half < (count + 1) / 2 * 2) break;
      half -= (count + 1) / 2 * 2;
    }
    // An odd half is the one before it, with weights of zero.
    bool const live = half < count;
    half = min(half, count - 1);
    int const part = half % p.parts;
    half /= p.parts;
    int const c = half % in_w->taps, b = half / in_w->taps % in_h->taps, a = half / in_w->taps / in_h->taps;
    int const d = in_d->base - a * p.input_step[0] - p.low[0], h = in_h->base - b * p.input_step[1] - p.low[1];
    int const w = in_w->base - c * p.input_step[2] - p.low[2];
    Half& to = halves[i];
    to.row = ((part * p.extent[0] + d) * p.extent[1] + h) * p.extent[2] + w;
    to.part = live ? part : -1;
    to.tap = (in_d->first_tap + a * p.tap_step[0]) * p.weight_stride[2] +
             (in_h->first_tap + b * p.tap_step[1]) * p.weight_stride[3] +
             (in_w->first_tap + c * p.tap_step[2]) * p.weight_stride[4];
  }
}

// Fragments of the weights of the warp's unit, all classes one after the other.
__device__ void load_fragments(MmaParams const& p, int unit, Half const* halves, uint2* to) {
  int const lane = threadIdx.x % 32, group = unit / p.units;
  int const output = (unit - group * p.units) * kChannels + lane / 4;
  int const input = 2 * (lane % 4);
  bool const live = unit < p.total_units && output < p.outputs;
  auto const* const from = static_cast<unsigned short const*>(p.weight) +
                           (int64_t(group) * p.inputs + input) * p.weight_stride[0] + output * p.weight_stride[1];
#pragma unroll 4
  for (int step = 0; step < p.steps; ++step) {
    uint32_t pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Half const half = halves[2 * step + j];
      auto const* const at = from + half.part * kChannels * p.weight_stride[0] + half.tap;
      int const left = live && half.part >= 0 ? p.inputs - half.part * kChannels - input : 0;
      uint32_t const low = left > 0 ? __ldg(at) : 0, high = left > 1 ? __ldg(at + p.weight_stride[0]) : 0;
      pair[j] = low | high << 16;
    }
    to[step * 32 + lane] = make_uint2(pair[0], pair[1]);
  }
}

// The inputs under a tile: rows of eight channels, by group, eighth and position. What lies outside x is zero.
template <class T>
__device__ void load_x(MmaParams const& p, T const* x, int first_group, int const (&origin)[3], uint4* rows) {
  int const positions = p.extent[0] * p.extent[1] * p.extent[2];
  int const all = p.slots * p.parts * positions;
  int const groups = p.total_units / p.units;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int slot, part, position, d, h, w;
    if (p.x_in_rows) {  // neighbours in memory are groups and eighths
      part = i % p.parts;
      slot = i / p.parts % p.slots;
      position = i / p.parts / p.slots;
    } else {
      p.row_count(part, position, i);
      slot = part / p.parts;
      part -= slot * p.parts;
    }
    p.columns_x(h, w, position);
    p.rows_x(d, h, h);
    int const group = first_group + slot;
    int const at[3] = {origin[0] + p.low[0] + d, origin[1] + p.low[1] + h, origin[2] + p.low[2] + w};
    union {
      uint4 row;
      T values[kChannels];
    };
    row = make_uint4(0, 0, 0, 0);
    if (group < groups && unsigned(at[0]) < unsigned(p.in_size[0]) && unsigned(at[1]) < unsigned(p.in_size[1]) &&
        unsigned(at[2]) < unsigned(p.in_size[2])) {
      T const* const from = x + (int64_t(group) * p.inputs + part * kChannels) * p.x_stride_c +
                            (at[0] * p.x_stride[0] + at[1] * p.x_stride[1] + at[2] * p.x_stride[2]);
      if (p.x_in_rows) {
        row = __ldg(reinterpret_cast<uint4 const*>(from));
      } else {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (part * kChannels + c < p.inputs) values[c] = __ldg(from + c * p.x_stride_c);
        }
      }
    }
    rows[(slot * p.parts + part) * positions + position] = row;
  }
}

// One sum with bias by the definition. A tile's has products with the zeros outside x and of odd halves, which an
// infinite factor makes nan.
template <class T>
__device__ __noinline__ float by_definition(MmaParams const& p, int n, int channel, int o0, int o1, int o2) {
  T const* const x = static_cast<T const*>(p.x) + n * p.x_stride_n;
  int const o[3] = {o0, o1, o2};
  int const group = channel / p.outputs, output = channel - group * p.outputs;
  int position[3];
  Residue const* in[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    position[axis] = o[axis] / p.stride[axis];
    in[axis] = &p.residues[axis][o[axis] - position[axis] * p.stride[axis]];
  }
  double sum = 0;
  for (int a = 0; a < in[0]->taps; ++a) {
    int const d = position[0] + in[0]->base - a * p.input_step[0];
    if (unsigned(d) >= unsigned(p.in_size[0])) continue;
    for (int b = 0; b < in[1]->taps; ++b) {
      int const h = position[1] + in[1]->base - b * p.input_step[1];
      if (unsigned(h) >= unsigned(p.in_size[1])) continue;
      for (int c = 0; c < in[2]->taps; ++c) {
        int const w = position[2] + in[2]->base - c * p.input_step[2];
        if (unsigned(w) >= unsigned(p.in_size[2])) continue;
        int const tap[3] = {in[0]->first_tap + a * p.tap_step[0], in[1]->first_tap + b * p.tap_step[1],
                            in[2]->first_tap + c * p.tap_step[2]};
        for (int input = 0; input < p.inputs; ++input) {
          T const weight = static_cast<T const*>(
              p.weight)[(int64_t(group) * p.inputs + input) * p.weight_stride[0] + output * p.weight_stride[1] +
                        tap[0] * p.weight_stride[2] + tap[1] * p.weight_stride[3] + tap[2] * p.weight_stride[4]];
          T const factor = x[(int64_t(group) * p.inputs + input) * p.x_stride_c +
                             (d * p.x_stride[0] + h * p.x_stride[1] + w * p.x_stride[2])];
          sum += static_cast<double>(to_float(factor)) * static_cast<double>(to_float(weight));
        }
      }
    }
  }
  float const bias = p.bias == nullptr ? 0.f : to_float(static_cast<T const*>(p.bias)[channel * p.bias_stride]);
  return static_cast<float>(sum) + bias;
}

template <class T>
using Operand = std::conditional_t<std::is_same_v<T, __half>, cutlass::half_t, cutlass::bfloat16_t>;

constexpr int kTileD = kTile[0], kTileH = kTile[1], kTileW = kTile[2];
constexpr int kMTiles = kTileD * kTileH * kTileW / 16;
static_assert(kTileW == 8 && kTileH == 4, "two rows of eight positions are a matrix, two matrices a plane");

// A unit's planes of one sample.
template <class T>
struct Unit {
  T const* add;
  T* y;
  int n, first, live;  // output channels: the first, and how many
  float bias[2];       // of this lane's two

  __device__ Unit(MmaParams const& p, int n_, int unit) : add(static_cast<T const*>(p.add)), n(n_) {
    int const group = unit / p.units, output = (unit - group * p.units) * kChannels;
    first = group * p.outputs + output;
    live = unit < p.total_units ? min(p.outputs - output, kChannels) : 0;
    y = static_cast<T*>(p.y) + n * p.y_stride[0] + first * p.y_stride[1];
    if (add != nullptr) add += n * p.add_stride[0] + first * p.add_stride[1];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      int const channel = 2 * (threadIdx.x % 4) + c;
      bool const has_bias = p.bias != nullptr && channel < live;
      bias[c] = has_bias ? to_float(static_cast<T const*>(p.bias)[(first + channel) * p.bias_stride]) : 0.f;
    }
  }
};

constexpr int kItem = 8;  // outputs that a lane finishes at a time: 16 bytes, where they are neighbours in memory

template <class T>
struct alignas(16) Item {
  T v[kItem];
};

// The outputs of one class (two along W) of a warp's tile and unit, from its sums with bias (position, class, channel).
// An item is the channels of an output, or eight outputs along W.
template <class T, int kClasses>
__device__ void finish_tile(MmaParams const& p, Unit<T> const& unit, float const* sums, int const (&origin)[3], int rd,
                            int rh, int rw) {
  constexpr int kPositions = 16 * kMTiles;
  constexpr int kRowParts = kTileW * kClasses / kItem;  // items of a row along W
  bool const by_channel = p.by_channel;
  int64_t const y_step = by_channel ? p.y_stride[1] : p.y_step, add_step = by_channel ? p.add_stride[1] : p.add_step;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kPositions * kClasses; i += 32) {
    int position, channel, j, left;  // of the first output; how many there are of them
    if (by_channel) {
      position = i / kClasses;
      j = i % kClasses;
      channel = 0;
      left = unit.live;
    } else {
      channel = i / kRowParts % kChannels;
      position = (i / kRowParts / kChannels * kRowParts + i % kRowParts) * (kItem / kClasses);
      j = 0;
      left = channel < unit.live ? kItem : 0;
    }
    int const d = (origin[0] + position / (kTileH * kTileW)) * p.stride[0] + rd;
    int const h = (origin[1] + position / kTileW % kTileH) * p.stride[1] + rh;
    int const w = (origin[2] + position % kTileW) * p.stride[2] + rw + j;
    int const w_step = kClasses == 2 ? 1 : p.stride[2];
    if (d >= p.out_size[0] || h >= p.out_size[1] || w >= p.out_size[2]) continue;
    if (!by_channel) left = min(left, (p.out_size[2] - w - 1) / w_step + 1);
    if (left <= 0) continue;
    Item<T> add{};
    if (unit.add != nullptr) {
      T const* const from =
          unit.add + channel * p.add_stride[1] + d * p.add_stride[2] + h * p.add_stride[3] + w * p.add_stride[4];
      if (p.add_in_items && left == kItem) {
        add = *reinterpret_cast<Item<T> const*>(from);
      } else {
#pragma unroll
        for (int v = 0; v < kItem; ++v) {
          if (v < left) add.v[v] = from[v * add_step];
        }
      }
    }
    float const* const from = sums + (position * kClasses + j) * kChannels + channel;
    Item<T> result{};
#pragma unroll
    for (int v = 0; v < kItem; ++v) {
      float value = from[by_channel ? v : v * kChannels];
      if (value != value && v < left) {
        value = by_definition<T>(p, unit.n, unit.first + channel + (by_channel ? v : 0), d, h,
                                 by_channel ? w : w + v * w_step);
      }
      float const own_add = to_float(add.v[v]);
      if (!p.add_after) value += own_add;
      value = apply_activation(p.activation, value, p.negative_slope);
      if (p.add_after) value += own_add;
      convert(result.v[v], value);
    }
    T* const to = unit.y + channel * p.y_stride[1] + d * p.y_stride[2] + h * p.y_stride[3] + w * p.y_stride[4];
    if (p.y_in_items && left == kItem) {
      *reinterpret_cast<Item<T>*>(to) = result;
    } else {
#pragma unroll
      for (int v = 0; v < kItem; ++v) {
        if (v < left) to[v * y_step] = result.v[v];
      }
    }
  }
}

// Grid: block of units, tiles, sample. kPairs: two classes along W at a time, whose outputs are neighbours.
template <class T, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3) mma_kernel(__grid_constant__ MmaParams const p) {
  constexpr int kClasses = kPairs ? 2 : 1;
  extern __shared__ uint4 shared[];
  int const positions = p.extent[0] * p.extent[1] * p.extent[2];
  uint4* const rows = shared;
  auto* const all_sums = reinterpret_cast<float*>(rows + p.slots * p.parts * positions);
  auto* const fragments = reinterpret_cast<uint2*>(all_sums + kSumsBytes / int(sizeof(float)));
  auto* const halves = reinterpret_cast<Half*>(fragments + kWarps * p.steps * 32);

  int unit_block, tile_block, n;
  p.unit_blocks(n, unit_block, static_cast<int>(blockIdx.x));
  p.tile_blocks(n, tile_block, n);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const first_unit = unit_block * kWarps, first_group = first_unit / p.units;
  describe_halves(p, halves);
  __syncthreads();
  int const unit = first_unit + warp, group = unit / p.units;
  load_fragments(p, unit, halves, fragments + warp * p.steps * 32);
  Unit<T> const own(p, n, unit);
  T const* const x = static_cast<T const*>(p.x) + n * p.x_stride_n;
  float* const sums = all_sums + warp * (kSumsBytes / int(sizeof(float)) / kWarps);
  uint2 const* const weights = fragments + warp * p.steps * 32 + lane;
  // The row of a matrix whose address this lane gives, and which half of a step it is of.
  int const half = lane / 16;
  uint32_t const own_rows = shared_address(rows + (group - first_group) * p.parts * positions +
                                           lane % 16 / kTileW * p.extent[2] + lane % kTileW);

  int const last = min((tile_block + 1) * p.tiles_of_block, p.all_tiles);
#pragma unroll 1
  for (int tile = tile_block * p.tiles_of_block; tile < last; ++tile) {
    int origin[3];
    p.tiles_w(origin[1], origin[2], tile);
    p.tiles_h(origin[0], origin[1], origin[1]);
    origin[0] *= kTileD;
    origin[1] *= kTileH;
    origin[2] *= kTileW;
    __syncthreads();  // nobody reads the inputs before any more
    load_x(p, x, first_group, origin, rows);
    __syncthreads();
    if (unit >= p.total_units) continue;

    int at = 0;
#pragma unroll 1
    for (int row = 0; row < p.stride[0] * p.stride[1]; ++row) {
      int const rd = row / p.stride[1], rh = row - rd * p.stride[1];
      int const in_plane = p.residues[0][rd].taps * p.residues[1][rh].taps * p.parts;
#pragma unroll 1
      for (int rw = 0; rw < p.stride[2]; rw += kClasses) {
#pragma unroll 1
        for (int j = 0; j < kClasses; ++j) {
          float sum[kMTiles][4] = {};
          int left = (in_plane * p.residues[2][rw + j].taps + 1) / 2;
#pragma unroll 1
          while (left > 0) {
            float part[kMTiles][4] = {};
            int const some = min(left, kSumSteps);
#pragma unroll 2
            for (int step = 0; step < some; ++step, ++at) {
              uint32_t const from = own_rows + 16 * halves[2 * at + half].row;
              uint2 const b = weights[at * 32];
#pragma unroll
              for (int m = 0; m < kMTiles; ++m) {
                uint32_t a[4];
                load_matrices(a, from + 16 * ((m / 2 * p.extent[1] + m % 2 * 2) * p.extent[2]));
                multiply(Operand<T>{}, part[m], a, b.x, b.y);
              }
            }
            left -= some;
#pragma unroll
            for (int i = 0; i < 4 * kMTiles; ++i) sum[i / 4][i % 4] += part[i / 4][i % 4];
          }
#pragma unroll
          for (int i = 0; i < 2 * kMTiles; ++i) {  // rows lane / 4 and eight below of each matrix
            auto* const to = sums + ((8 * i + lane / 4) * kClasses + j) * kChannels + 2 * (lane % 4);
            *reinterpret_cast<float2*>(to) =
                make_float2(sum[i / 2][i % 2 * 2] + own.bias[0], sum[i / 2][i % 2 * 2 + 1] + own.bias[1]);
          }
        }
        __syncwarp();
        finish_tile<T, kClasses>(p, own, sums, origin, rd, rh, rw);
        __syncwarp();
      }
    }
  }
}

// Whether all items are accesses of 16 bytes.
bool in_items(Problem const& p, Size5 const& stride, int alignment, bool by_channel) {
  int const axis = by_channel ? 1 : 4;
  if (stride[axis] != 1 || alignment < 16) return false;
  for (int other = 0; other < 5; ++other) {
    if (other != axis && stride[other] % kItem != 0) return false;
  }
  // Classes one by one have gaps between them.
  return by_channel ? p.out_channels / p.groups % kItem == 0 : p.stride[2] <= 2;
}

MmaParams make_params(Problem const& p, Params const& base) {
  MmaParams params;
  static_cast<Params&>(params) = base;
  for (int axis = 0; axis < 3; ++axis) {
    Reach const inputs = reach(p, axis);
    params.low[axis] = static_cast<int>(inputs.low);
    params.extent[axis] = static_cast<int>(inputs.extent);
  }
  params.parts = static_cast<int>(eighths(base.inputs));
  params.units = static_cast<int>(units_of_group(p));
  params.slots = static_cast<int>(groups_of_block(p));
  params.total_units = static_cast<int>(p.groups) * params.units;
  params.steps = static_cast<int>(steps(p));
  params.classes = static_cast<int>(residue_class_count(p.stride));
  params.all_tiles = static_cast<int>(tiles(p));
  params.tiles_of_block = static_cast<int>(tiles_of_block(p));
  params.unit_blocks = cutlass::FastDivmod(static_cast<int>(unit_blocks(p)));
  params.tile_blocks = cutlass::FastDivmod((params.all_tiles + params.tiles_of_block - 1) / params.tiles_of_block);
  params.tiles_h = cutlass::FastDivmod(static_cast<int>(tiles(p, 1)));
  params.tiles_w = cutlass::FastDivmod(static_cast<int>(tiles(p, 2)));
  params.columns_x = cutlass::FastDivmod(params.extent[2]);
  params.rows_x = cutlass::FastDivmod(params.extent[1]);
  params.row_count = cutlass::FastDivmod(static_cast<int>(row_count(p)));
  params.x_in_rows = p.x_stride[1] == 1 && base.inputs % kChannels == 0 &&
                     access_bytes(x_shape(p), p.x_stride, 1, p.x_alignment, element_bytes(p)) == kAccessBytes;
  Size5 const y_stride = effective_stride(y_shape(p), p.y_stride), add_stride = effective_add_stride(p);
  params.by_channel = lanes_are_channels(p);
  params.y_in_items = in_items(p, y_stride, p.y_alignment, params.by_channel);
  params.add_in_items = p.has_add && in_items(p, add_stride, p.add_alignment, params.by_channel);
  int64_t const w_step = p.stride[2] == 2 ? 1 : p.stride[2];
  params.y_step = w_step * p.y_stride[4];
  params.add_step = w_step * base.add_stride[4];
  return params;
}

}  // namespace

cudaError_t launch(Problem const& p, Params const& base, cudaStream_t stream) {
  MmaParams const params = make_params(p, base);
  bool const pairs = p.stride[2] == 2;
  auto* const kernel = p.dtype == CONVT3D_F16
                           ? (pairs ? mma_kernel<__half, true> : mma_kernel<__half, false>)
                           : (pairs ? mma_kernel<__nv_bfloat16, true> : mma_kernel<__nv_bfloat16, false>);
  // The same for all calls: another thread's may come in between.
  cudaError_t const error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kMaxSharedBytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid(p)), kThreads, static_cast<size_t>(shared_bytes(p, params.steps)), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace convt3d::sm80::grouped::mma
