// SPDX-License-Identifier: Apache-2.0
//
// A tile by a cluster of thread blocks, where tiles are few: each block makes some of the steps, and ends with the sums
// of some of the positions, which the others send it. Always in the same order, so that results repeat bit by bit.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "sm90/product/geometry.hpp"

namespace convt3d::sm90::product {

/// Of `kBlocks` blocks with one warpgroup each.
template <int kBlocks>
struct Cluster {
  static constexpr int kRegisters = kColumns * kPositions / 128;  // sums of a thread
  static constexpr int kOwn = kRegisters / kBlocks;               // of which it ends with so many
  static constexpr int kAccesses = kOwn / 4;                      // of 16 bytes
  static constexpr int kBytes = cluster_bytes(kBlocks);
  static_assert(kOwn % 16 == 0, "a block's positions are whole batches of the epilogue");

  CUTLASS_DEVICE static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }
  CUTLASS_DEVICE static int tile() { return static_cast<int>(blockIdx.x) / kBlocks; }
  /// Of a tile's steps the first that a block makes; of block kBlocks their number.
  CUTLASS_DEVICE static int first_step(int steps, int rank) { return steps * rank / kBlocks; }

  /// Before any block sends. One thread.
  CUTLASS_DEVICE static void init(cutlass::arch::ClusterTransactionBarrier& received) {
    received.init(1);
    received.arrive_and_expect_tx(kBytes);
  }

  /// Sends each block its part of this thread's sums and returns the sum of what all have for this block. `room` is
  /// where the others' parts come to lie: kBytes, of which each sender has a share, access after access, thread by
  /// thread.
  CUTLASS_DEVICE static void exchange(float const (&sums)[kRegisters], float (&own)[kOwn], unsigned char* room,
                                      cutlass::arch::ClusterTransactionBarrier& received) {
    int const here = rank();
    uint32_t const thread = threadIdx.x;
    uint32_t const to = cute::cast_smem_ptr_to_uint(room) + thread * 16;
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&received);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      float const* const part = sums + block * kOwn;
      if (block == here) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOwn; ++i) own[i] = part[i];
        continue;
      }
      auto const share = static_cast<uint32_t>((here - block - 1) & (kBlocks - 1));
      uint32_t const there = cute::set_block_rank(to + share * (kAccesses * 128 * 16), static_cast<uint32_t>(block));
      uint32_t const signal = cute::set_block_rank(barrier, static_cast<uint32_t>(block));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccesses; ++i) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         there + static_cast<uint32_t>(i) * (128 * 16)),
                     "f"(part[4 * i]), "f"(part[4 * i + 1]), "f"(part[4 * i + 2]), "f"(part[4 * i + 3]), "r"(signal)
                     : "memory");
      }
    }
    received.wait(0);
    CUTLASS_PRAGMA_UNROLL
    for (int share = 0; share < kBlocks - 1; ++share) {
      auto const* const from = reinterpret_cast<float4 const*>(room) + share * kAccesses * 128 + thread;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccesses; ++i) {
        float4 const v = from[i * 128];
        own[4 * i] += v.x;
        own[4 * i + 1] += v.y;
        own[4 * i + 2] += v.z;
        own[4 * i + 3] += v.w;
      }
    }
  }
};

}  // namespace convt3d::sm90::product
