// SPDX-License-Identifier: Apache-2.0
//
// From a plan to a launch, for one element type.
#pragma once

#include "backward/pointwise.hpp"
#include "backward/turned.hpp"

namespace convt3d::backward {

// Bound by memory: three blocks per multiprocessor have 24 KiB of each tensor under way.
template <class T, int kVector, Walk kWalk>
__global__ void __launch_bounds__(kThreads, 3) pointwise_kernel(__grid_constant__ Params const p) {
  if constexpr (kWalk == Walk::kRows) {
    walk_rows<T, kVector>(p);
  } else if constexpr (kWalk == Walk::kColumns) {
    walk_columns<T, kVector>(p);
  } else {
    walk_turned<T>(p);
  }
}

template <class T, Walk kWalk>
cudaError_t launch_walk(Params const& p, int vector, dim3 grid, cudaStream_t stream) {
  constexpr int kWide = kAccessBytes / sizeof(T);
  if (vector == kWide || kWalk == Walk::kTurned) {
    pointwise_kernel<T, kWide, kWalk><<<grid, kThreads, 0, stream>>>(p);
  } else {
    // Not instantiated for a walk that is wide or nothing.
    pointwise_kernel<T, kWalk == Walk::kTurned ? kWide : 1, kWalk><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

/// Enqueues the kernel of `plan`, whose operands are of type T. The loops over units take what a grid cannot hold.
template <class T>
cudaError_t launch_typed(Plan const& plan, cudaStream_t stream) {
  Params const& p = plan.params;
  constexpr int64_t kMostBlocks = 1 << 30, kMostTiles = 1 << 15;
  if (plan.walk == Walk::kRows) {
    int64_t const units = p.batch * p.channels * p.rows_split;
    int64_t const blocks = std::min((units + kWarpsPerBlock - 1) / kWarpsPerBlock, kMostBlocks);
    return launch_walk<T, Walk::kRows>(p, plan.vector, dim3(static_cast<unsigned>(blocks)), stream);
  }
  if (plan.walk == Walk::kTurned) {
    int64_t const tiles = std::min((p.channels + kTileChannels - 1) / kTileChannels, kMostTiles);
    dim3 const grid(static_cast<unsigned>(std::min(p.partials, kMostBlocks)), static_cast<unsigned>(tiles));
    return launch_walk<T, Walk::kTurned>(p, plan.vector, grid, stream);
  }
  int64_t const width = column_groups(p.channels, plan.vector) * plan.vector;
  int64_t const tiles = std::min((p.channels + width - 1) / width, kMostTiles);
  dim3 const grid(static_cast<unsigned>(std::min(p.partials, kMostBlocks)), static_cast<unsigned>(tiles));
  return launch_walk<T, Walk::kColumns>(p, plan.vector, grid, stream);
}

}  // namespace convt3d::backward
