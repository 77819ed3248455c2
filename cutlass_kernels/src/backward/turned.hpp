// SPDX-License-Identifier: Apache-2.0
//
// The turned walk: NCDHW tensors in, grad_pre out in NDHWC order, for convolutions that tensor cores take no other way,
// and, where it is wanted, in its own order beside it. A block takes 64 positions of 64 channels at a time through
// shared memory, several tiles one after the other.
#pragma once

#include "backward/pointwise.hpp"

namespace convt3d::backward {

template <class T>
struct TurnedTile {
  static constexpr int kVector = kAccessBytes / sizeof(T);
  static constexpr int kLanesPerRow = kTilePositions / kVector;  // of a channel's positions
  static constexpr int kRowsPerStep = kThreads / kLanesPerRow;
  static constexpr int kSteps = kTileChannels / kRowsPerStep;
  static_assert(kSteps % kUnroll == 0, "a thread's steps are taken kUnroll at a time");
  static constexpr int kLanesPerVoxel = kTileChannels / kVector;
  static constexpr int kVoxelsPerStep = kThreads / kLanesPerVoxel;
  // An odd number of words: rows begin in different banks, whether they are written along or read across.
  static constexpr int kPitch = kTilePositions + 4 / static_cast<int>(sizeof(T));
  using Packet_ = Packet<T, kVector>;
};

template <class T>
__device__ void walk_turned(Params const& p) {
  using Tile = TurnedTile<T>;
  using Packet_ = typename Tile::Packet_;
  constexpr int kVector = Tile::kVector;
  __shared__ T turned[kTileChannels * Tile::kPitch];

  int const column = threadIdx.x % Tile::kLanesPerRow * kVector;   // reading: position in the tile
  int const row = threadIdx.x / Tile::kLanesPerRow;                // and channel of the first step
  int const chunk = threadIdx.x % Tile::kLanesPerVoxel * kVector;  // writing: channel in the tile
  int const voxel = threadIdx.x / Tile::kLanesPerVoxel;            // and position of the first step
  for (int64_t first = int64_t(blockIdx.y) * kTileChannels; first < p.channels;
       first += int64_t(gridDim.y) * kTileChannels) {
    int const channels = static_cast<int>(min(int64_t(kTileChannels), p.channels - first));
    for (int64_t unit = blockIdx.x; unit < p.partials; unit += gridDim.x) {
      int64_t const sample = unit / p.rows_split, split = unit - sample * p.rows_split;
      int64_t const begin = split * p.steps * kTilePositions;
      int64_t const end = min(begin + p.steps * kTilePositions, p.positions);
      auto const at = [&](Operand const& o) {
        return static_cast<T*>(o.data) + sample * o.stride[0] + (first + row) * o.stride[1] + column;
      };
      T const* const grad_output = static_cast<T const*>(p.grad_output.data) + sample * p.grad_output.stride[0] +
                                   (first + row) * p.grad_output.stride[1] + column * p.grad_output.flat;
      T const* const t = p.t.data ? at(p.t) : nullptr;
      T* const grad_pre = p.grad_pre.data ? at(p.grad_pre) : nullptr;
      T* const out = static_cast<T*>(p.grad_pre_ndhwc) + sample * p.positions * p.channels + first + chunk;
      float sums[Tile::kSteps] = {};
      for (int64_t tile = begin; tile < end; tile += kTilePositions) {
        bool const inside = tile + column < end;
#pragma unroll
        for (int step = 0; step < Tile::kSteps; step += kUnroll) {
          Batch<T, kVector, kUnroll> batch;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            int const down = (step + u) * Tile::kRowsPerStep;
            batch.grad[u].clear();
            batch.t[u].clear();
            if (!inside || row + down >= channels) continue;
            T const* const from = grad_output + down * p.grad_output.stride[1];
            if (p.grad_output.flat == 0) {
              batch.grad[u].fill(*from);
            } else {
              batch.grad[u] = *reinterpret_cast<Packet_ const*>(from + tile);
            }
            if (t) batch.t[u] = *reinterpret_cast<Packet_ const*>(t + down * p.t.stride[1] + tile);
          }
          batch.apply(p, [&](int u, int, float value) { sums[step + u] += value; });
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            int const down = (step + u) * Tile::kRowsPerStep;
            if (grad_pre && inside && row + down < channels) {
              *reinterpret_cast<Packet_*>(grad_pre + down * p.grad_pre.stride[1] + tile) = batch.grad[u];
            }
#pragma unroll
            for (int e = 0; e < kVector; ++e) turned[(row + down) * Tile::kPitch + column + e] = batch.grad[u][e];
          }
        }
        __syncthreads();
        if (chunk < channels) {
#pragma unroll
          for (int v = voxel; v < kTilePositions; v += Tile::kVoxelsPerStep) {
            if (tile + v >= end) break;
            Packet_ packet;
#pragma unroll
            for (int e = 0; e < kVector; ++e) packet[e] = turned[(chunk + e) * Tile::kPitch + v];
            *reinterpret_cast<Packet_*>(out + (tile + v) * p.channels) = packet;
          }
        }
        __syncthreads();
      }
      if (p.partial) {
#pragma unroll
        for (int u = 0; u < Tile::kSteps; ++u) {
          float sum = sums[u];
#pragma unroll
          for (int mask = Tile::kLanesPerRow / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
          int const channel = row + u * Tile::kRowsPerStep;
          if (column == 0 && channel < channels) p.partial[(first + channel) * p.partials + unit] = sum;
        }
      }
    }
  }
}

}  // namespace convt3d::backward
