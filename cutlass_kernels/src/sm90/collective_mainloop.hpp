// SPDX-License-Identifier: Apache-2.0
//
// x and the multiply. Loader warps read x planes, round them to TF32 where they are fp32, and store them
// channel-innermost into shared memory; a consumer warpgroup multiplies resident weight blocks with shifted views.
//
// One halo slab serves every tap: a wgmma operand may start at any 128-byte row, since the 128-byte swizzle XORs
// absolute address bits. Rows run along H or W (8 per core matrix), `pitch` rows per position of the other.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "sm90/multiply.hpp"
#include "sm90/x_loader.hpp"

namespace convt3d::sm90 {

template <class T, bool kChannelsLast>
struct CollectiveMainloop {
  using Params = MainloopParams;
  using Mma = Multiply<T, kChannelsLast>;
  using Accumulators = typename Mma::Accumulators;
  using Loader = XLoader<T, kChannelsLast>;

  struct SharedStorage {
    Barrier full[kMaxStages];
    Barrier empty[kMaxStages];
    TransactionBarrier weights;
  };

  CUTLASS_DEVICE static void init(SharedStorage& shared) {
    for (int i = 0; i < kMaxStages; ++i) {
      shared.full[i].init(kLoaderWarps);
      shared.empty[i].init(kGroups * 4);
    }
    shared.weights.init(1);
  }

  /// One thread: brings the class's weight image into shared memory.
  CUTLASS_DEVICE static void load_weights(Params const& p, SharedStorage& shared, unsigned char* smem, int cls) {
    int const bytes = p.weight_blocks * kWeightBlockBytes;
    unsigned char const* image = p.weights + static_cast<int64_t>(cls) * bytes;
    shared.weights.arrive_and_expect_tx(bytes);
    for (int i = 0; i < p.weight_blocks; ++i) {
      cute::SM90_BULK_COPY_G2S::copy(image + i * kWeightBlockBytes, reinterpret_cast<uint64_t*>(&shared.weights),
                                     smem + i * kWeightBlockBytes, kWeightBlockBytes);
    }
  }

  // ---- consumer ----------------------------------------------------------------------------------------------

  CUTLASS_DEVICE static uint64_t descriptor(void const* smem, uint32_t stride_units,
                                            cute::SM90::GMMA::LayoutType layout) {
    cute::GmmaDescriptor desc;
    desc.desc_ = 0;
    desc.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(smem) >> 4;
    desc.bitfield.leading_byte_offset_ = 1;
    desc.bitfield.stride_byte_offset_ = stride_units;
    desc.bitfield.layout_type_ = static_cast<uint8_t>(layout);
    return desc.desc_;
  }

  /// Of weight blocks: rows of 32 channels.
  CUTLASS_DEVICE static uint64_t weights_descriptor(void const* smem) {
    constexpr int kRowBytes = 32 * sizeof(T);
    return descriptor(smem, 8 * kRowBytes / 16,
                      sizeof(T) == 4 ? cute::SM90::GMMA::LayoutType::B128 : cute::SM90::GMMA::LayoutType::B64);
  }

  /// Of x: groups of eight rows are `pitch` rows apart.
  CUTLASS_DEVICE static uint64_t positions_descriptor(Params const& p, void const* smem) {
    return descriptor(smem, static_cast<uint32_t>(p.slab_pitch) * (128 / 16), cute::SM90::GMMA::LayoutType::B128);
  }

  CUTLASS_DEVICE static void fence(Accumulators& acc) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Mma::kParts * Mma::kRegisters; ++i) {
      cute::warpgroup_fence_operand(acc[i / Mma::kRegisters][i % Mma::kRegisters]);
    }
  }

  /// acc = sum over the group's blocks. `stage` stands at the tile's first slice.
  CUTLASS_DEVICE static void mma(Params const& p, DeviceProgram const& program, SharedStorage& shared, uint64_t weights,
                                 uint64_t positions, RingState stage, Accumulators& acc) {
    bool accumulate = false;
    int block = 0;
    uint32_t const stage_units = static_cast<uint32_t>(p.stage_bytes) >> 4;
    fence(acc);
    for (int s = 0; s < p.depth_count; ++s) {
      int const end = program.slice_end[s];
      if (block < end) {
        shared.full[stage.slot].wait(stage.phase);
        cutlass::arch::fence_view_async_shared();  // the loader's stores, before wgmma reads them
      }
      cute::warpgroup_arrive();
      uint64_t const slice = positions + stage.slot * stage_units;
      for (; block < end; ++block) {
        Mma::block(weights + static_cast<uint32_t>(block) * (kWeightBlockBytes >> 4),
                   slice + static_cast<uint32_t>(program.operand_offset[block]), acc, accumulate);
        accumulate = true;
      }
      cute::warpgroup_commit_batch();
      stage.advance(1, p.stages);
    }
    cute::warpgroup_wait<0>();
    fence(acc);
    if (block == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Mma::kParts * Mma::kRegisters; ++i) acc[i / Mma::kRegisters][i % Mma::kRegisters] = 0.f;
    }
  }

  /// One warp hands back the first `count` slices of a tile: those its group multiplied (`kUsed`, at once), or the
  /// others (later, since they may still be on their way and waiting for them must not hold up the epilogue).
  template <bool kUsed>
  CUTLASS_DEVICE static void release(Params const& p, DeviceProgram const& program, SharedStorage& shared,
                                     RingState stage, int count, int lane) {
    int before = 0;
    for (int s = 0; s < count; ++s) {
      if ((program.slice_end[s] > before) == kUsed) {
        if (!kUsed) shared.full[stage.slot].wait(stage.phase);
        __syncwarp();
        if (lane == 0) shared.empty[stage.slot].arrive();
      }
      before = program.slice_end[s];
      stage.advance(1, p.stages);
    }
  }
};

}  // namespace convt3d::sm90
