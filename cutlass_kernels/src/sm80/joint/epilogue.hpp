// SPDX-License-Identifier: Apache-2.0
//
// From a tile's sums to y: the two layouts' order of work, and the recomputation of outputs that came out nan.
#pragma once

#include "sm80/joint/params.hpp"
#include "sm80/tail.hpp"

namespace convt3d::sm80::joint {

constexpr int kBatch = 16;   // outputs of a thread at a time: both W parities of eight channels
constexpr int kBatches = 8;  // of a thread and tile

/// Batch `index` of a thread. Its outputs are numbered so that runs of kVector lie together in memory: channels, or the
/// two W parities.
template <class Element, bool kChannelsLast>
struct Batch {
  static constexpr int kVector = kChannelsLast ? kAccessBytes / int(sizeof(Element)) : 2;
  static constexpr int kVectors = kBatch / kVector;
  using Vector = cutlass::AlignedArray<Element, kVector>;

  // Of an output, by its number: W parity, and channels from the batch's first one.
  CUTLASS_HOST_DEVICE static constexpr int parity(int e) { return kChannelsLast ? e / 8 : e % 2; }
  CUTLASS_HOST_DEVICE static constexpr int channels(int e) {
    return kChannelsLast ? e % 8 / kVector * 8 + e % kVector : e / 2;
  }

  int position, cls, channel;  // within the tile; class and channel of output 0
  int columns;                 // channels that y has from `channel` on
  bool even, odd;              // whether the outputs of a W parity are inside y
  int64_t y, add;              // element offsets of output 0

  CUTLASS_DEVICE Batch(Params const& p, Place const* places, int column_begin, int index) {
    int const thread = threadIdx.x;
    int const residue_d = index / 2 % 2;
    int residue_h;
    if constexpr (kChannelsLast) {
      position = (thread / 32 + index / 4 * 4) * 16 + thread % 16;
      residue_h = index % 2;
      channel = thread / 16 % 2 * kVector;
    } else {
      int const item = thread + index / 4 * kThreads;
      position = (item >> (p.row_log + 1) << p.row_log) | (item & ((1 << p.row_log) - 1));
      residue_h = item >> p.row_log & 1;
      channel = index % 2 * 8;
    }
    cls = 4 * residue_d + 2 * residue_h;
    columns = p.tail.channels - column_begin - channel;
    Place const& place = places[position];
    uint32_t const wanted = kInside | uint32_t(residue_d) << 3 | uint32_t(residue_h) << 4;
    even = (place.flags & wanted) == wanted;
    odd = even && (place.flags >> 5 & 1) != 0;
    int64_t const column = column_begin + channel;
    y = place.y + residue_d * p.y_stride[1] + residue_h * p.y_stride[2] + column * p.tail.y_channel_stride;
    add = place.add + residue_d * p.add_stride[1] + residue_h * p.add_stride[2] + column * p.tail.add_channel_stride;
  }

  CUTLASS_DEVICE bool present(int e) const { return (parity(e) == 0 ? even : odd) && channels(e) < columns; }

  /// f(vector, its first output, offset from output 0) for each run, with a channel and a W parity that far apart.
  template <class F>
  CUTLASS_DEVICE static void for_each_vector(int64_t channel_stride, int64_t w_stride, F&& f) {
    int64_t offset = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kChannelsLast) {
        f(v, v * kVector, parity(v * kVector) * w_stride + channels(v * kVector));
      } else {
        f(v, v * kVector, offset);
        offset += channel_stride;
      }
    }
  }

  CUTLASS_DEVICE void load_add(Params const& p, Vector (&to)[kVectors]) const {
    if (p.tail.add == nullptr) return;
    auto const* const from = static_cast<Element const*>(p.tail.add) + add;
    for_each_vector(p.tail.add_channel_stride, p.add_stride[3], [&](int v, int e, int64_t offset) {
      if (present(e)) to[v] = *reinterpret_cast<Vector const*>(from + offset);
    });
  }

  /// Asks L2 for the sectors of add, which are wanted a mainloop later.
  CUTLASS_DEVICE void prefetch_add(Params const& p) const {
    auto const* const from = static_cast<Element const*>(p.tail.add) + add;
    bool const first = (reinterpret_cast<uint64_t>(from) & 31) < kVector * sizeof(Element);
    for_each_vector(p.tail.add_channel_stride, p.add_stride[3], [&](int, int e, int64_t offset) {
      if (first && present(e)) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + offset));
    });
  }

  CUTLASS_DEVICE void store(Params const& p, cutlass::Array<float, kBatch> const& value) const {
    auto* const to = static_cast<Element*>(p.tail.y) + y;
    for_each_vector(p.tail.y_channel_stride, p.y_stride[3], [&](int, int e, int64_t offset) {
      Vector rounded;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) rounded[i] = Element(value[e + i]);
      if (present(e)) *reinterpret_cast<Vector*>(to + offset) = rounded;
    });
  }
};

/// One output by plain fp32 multiply-adds over the taps that reach it. The tensor cores multiply zeros for taps outside
/// x, and 0 * inf is nan.
template <class Operand, class Element>
__device__ __noinline__ void recompute_output(Params const& p, int taps, int number, int cls, int channel) {
  Position const at(p, number);
  int const residue[3] = {cls / 4, cls / 2 % 2, cls % 2};
  TailParams const& tail = p.tail;
  int const first[3] = {2 * at.d + residue[0], 2 * at.h + residue[1], 2 * at.w + residue[2]};
  // The place of residue 0, and steps of single outputs from there.
  int64_t y_at = at.n * p.y_stride[0] + channel * tail.y_channel_stride;
  int64_t add_at = at.n * p.add_stride[0] + channel * tail.add_channel_stride;
  for (int axis = 0; axis < 3; ++axis) {
    y_at += first[axis] * p.y_stride[1 + axis];
    add_at += first[axis] * p.add_stride[1 + axis];
  }
  float bias[1] = {0.f}, add[1] = {0.f};
  if (tail.bias) bias[0] = to_float(static_cast<Element const*>(tail.bias)[channel * tail.bias_stride]);
  if (tail.add) add[0] = to_float(static_cast<Element const*>(tail.add)[add_at]);
  if (bias[0] != bias[0] || add[0] != add[0]) return;  // nan whatever the convolution is

  float acc = 0.f;
  int const channels = p.x_channels < p.weight_channels ? p.x_channels : p.weight_channels;
  for (int j = 0; j < taps; ++j) {
    TapWeights const& tap = p.taps[j];
    if (tap.code % kClasses != cls) continue;
    int const next = tap.code / kClasses;
    int const d = at.d + (next & 1), h = at.h + (next >> 1 & 1), w = at.w + (next >> 2);
    if (d >= p.in_size[0] || h >= p.in_size[1] || w >= p.in_size[2]) continue;
    Operand const* const voxel = static_cast<Operand const*>(p.x) + at.n * p.x_stride[0] + d * p.x_stride[1] +
                                 h * p.x_stride[2] + w * p.x_stride[3];
    Operand const* const weight = static_cast<Operand const*>(p.weight) + tap.first + channel;
#pragma unroll 1
    for (int k = 0; k < channels; ++k) {
      acc = fmaf(to_float(voxel[k]), to_float(weight[int64_t(k) * tap.channel_step]), acc);
    }
  }
  float value[1] = {acc};
  apply_tail<1>(tail, value, bias, add);
  static_cast<Element*>(tail.y)[y_at] = Element(value[0]);
}

/// The sums of a tile in shared memory.
struct TileSums {
  float const* sums;

  CUTLASS_HOST_DEVICE static constexpr int index(int cls, int channel, int position) {
    return sum_index(cls, channel, position);
  }
  CUTLASS_DEVICE float operator()(int at) const { return sums[at]; }
};

/// The sums of its parts in memory, added in order.
struct PartSums {
  float const* sums;
  int parts;

  CUTLASS_HOST_DEVICE static constexpr int index(int cls, int channel, int position) {
    return (cls * kChannels + channel) * kPositions + position;
  }
  CUTLASS_DEVICE float operator()(int at) const {
    float sum = 0.f;
    for (int part = 0; part < parts; ++part) sum += __ldcg(sums + part * kPartFloats + at);
    return sum;
  }
};

/// A thread's outputs of a tile, in whole accesses. Returns whether one may be nan.
template <class Element, bool kChannelsLast, class Sums>
CUTLASS_DEVICE bool finish_vectors(Params const& p, Place const* places, float const* tile_bias, int column_begin,
                                   int first, int last, Sums const& sums) {
  using Batch = joint::Batch<Element, kChannelsLast>;
  float look = 0.f;
  // The loads of add run several batches ahead, since few warps hide their latency. They move up in registers: a loop
  // that is not unrolled keeps the activations' code once.
  constexpr int kAhead = 4;
  typename Batch::Vector ahead[kAhead][Batch::kVectors];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kAhead; ++i) {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < Batch::kVectors; ++v) ahead[i][v].fill(Element(0.f));
    if (first + i < last) Batch(p, places, column_begin, first + i).load_add(p, ahead[i]);
  }
#pragma unroll 1
  for (int index = first; index < last; ++index) {
    Batch const batch(p, places, column_begin, index);
    int const at = Sums::index(batch.cls, batch.channel, batch.position);
    cutlass::Array<float, kBatch> value;
    float bias[kBatch], add[kBatch];
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kBatch; ++e) {
      value[e] = sums(at + Sums::index(Batch::parity(e), Batch::channels(e), 0));
      bias[e] = tile_bias[batch.channel + Batch::channels(e)];
      add[e] = to_float(ahead[0][e / Batch::kVector][e % Batch::kVector]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i + 1 < kAhead; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < Batch::kVectors; ++v) ahead[i][v] = ahead[i + 1][v];
    }
    if (index + kAhead < last) Batch(p, places, column_begin, index + kAhead).load_add(p, ahead[kAhead - 1]);
    apply_tail<kBatch>(p.tail, value, bias, add);
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kBatch; ++e) look = fmaf(value[e], 0.f, look);
    batch.store(p, value);
  }
  return look != look;
}

/// The same output by output, for what has no whole accesses: rows of odd lengths, broadcast or unaligned tensors.
template <class Element, bool kChannelsLast, class Sums>
CUTLASS_DEVICE bool finish_elements(Params const& p, Place const* places, float const* tile_bias, int column_begin,
                                    int first, int last, Sums const& sums) {
  using Batch = joint::Batch<Element, kChannelsLast>;
  constexpr int kAtOnce = 4;
  float look = 0.f;
#pragma unroll 1
  for (int i = first * kBatch; i < last * kBatch; i += kAtOnce) {
    Batch const batch(p, places, column_begin, i / kBatch);
    cutlass::Array<float, kAtOnce> value;
    float bias[kAtOnce], add[kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      int const e = i % kBatch + k, channel = Batch::channels(e), w = Batch::parity(e);
      value[k] = sums(Sums::index(batch.cls + w, batch.channel + channel, batch.position));
      bias[k] = tile_bias[batch.channel + channel];
      int64_t const at = batch.add + channel * p.tail.add_channel_stride + w * p.add_stride[3];
      add[k] = p.tail.add && batch.present(e) ? to_float(static_cast<Element const*>(p.tail.add)[at]) : 0.f;
    }
    apply_tail<kAtOnce>(p.tail, value, bias, add);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      int const e = i % kBatch + k;
      int64_t const at = batch.y + Batch::channels(e) * p.tail.y_channel_stride + Batch::parity(e) * p.y_stride[3];
      look = fmaf(value[k], 0.f, look);
      if (batch.present(e)) static_cast<Element*>(p.tail.y)[at] = Element(value[k]);
    }
  }
  return look != look;
}

/// Batches [first, last) of a thread.
template <class Operand, class Element, bool kChannelsLast, class Sums>
CUTLASS_DEVICE void finish(Params const& p, int taps, Place const* places, float const* tile_bias, int position_begin,
                           int column_begin, int first, int last, Sums const& sums) {
  using Batch = joint::Batch<Element, kChannelsLast>;
  bool const look =
      p.vectors ? finish_vectors<Element, kChannelsLast>(p, places, tile_bias, column_begin, first, last, sums)
                : finish_elements<Element, kChannelsLast>(p, places, tile_bias, column_begin, first, last, sums);
  // A thread rereads only what it wrote itself.
  if (!look) return;
#pragma unroll 1
  for (int i = first * kBatch; i < last * kBatch; ++i) {
    Batch const batch(p, places, column_begin, i / kBatch);
    int const e = i % kBatch, channel = batch.channel + Batch::channels(e), w = Batch::parity(e);
    if (!batch.present(e)) continue;
    int64_t const at = batch.y + Batch::channels(e) * p.tail.y_channel_stride + w * p.y_stride[3];
    float const stored = to_float(static_cast<Element const*>(p.tail.y)[at]);
    if (stored != stored) {
      recompute_output<Operand, Element>(p, taps, position_begin + batch.position, batch.cls + w,
                                         column_begin + channel);
    }
  }
}

}  // namespace convt3d::sm80::joint
