// SPDX-License-Identifier: Apache-2.0
//
// x and the multiply. Loader warps read x planes, round them to TF32 where they are fp32, and store them
// channel-innermost into shared memory; a consumer warpgroup multiplies resident weight blocks with shifted views.
//
// One halo slab serves every tap: a wgmma operand may start at any 128-byte row, since the 128-byte swizzle XORs
// absolute address bits. Rows run along H or W (8 per core matrix), `pitch` rows per position of the other.
#pragma once

#include <type_traits>

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
  static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
  static constexpr int kSums = kSumsOf<T, kChannelsLast>;

  struct SharedStorage {
    Barrier full[kMaxStages];
    Barrier empty[kMaxStages];
    TransactionBarrier weights;
    uint32_t tiny[kMaxStages];  // in ieee mode: how many tiny values the slab has (x_loader.hpp)
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
    int const bytes = p.weight_bytes;
    unsigned char const* image = p.weights + static_cast<int64_t>(cls) * bytes;
    shared.weights.arrive_and_expect_tx(bytes);
    for (int at = 0; at < bytes; at += kWeightBlockBytes) {
      cute::SM90_BULK_COPY_G2S::copy(image + at, reinterpret_cast<uint64_t*>(&shared.weights), smem + at,
                                     min(kWeightBlockBytes, bytes - at));
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
    constexpr int kRowBytes = 32 * sizeof(T);  // of SplitFloat too: 64 bytes of each part
    return descriptor(smem, 8 * kRowBytes / 16,
                      sizeof(T) == 4 ? cute::SM90::GMMA::LayoutType::B128 : cute::SM90::GMMA::LayoutType::B64);
  }

  /// Of x: groups of eight rows are `pitch` rows apart.
  CUTLASS_DEVICE static uint64_t positions_descriptor(Params const& p, void const* smem) {
    return descriptor(smem, static_cast<uint32_t>(p.slab_pitch) * (128 / 16), cute::SM90::GMMA::LayoutType::B128);
  }

  CUTLASS_DEVICE static void fence(Accumulators& acc) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Mma::kRows * Mma::kRegisters; ++i) {
      cute::warpgroup_fence_operand(acc[i / Mma::kRegisters][i % Mma::kRegisters]);
    }
  }

  CUTLASS_DEVICE static void clear(Accumulators& acc) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Mma::kRows * Mma::kRegisters; ++i) acc[i / Mma::kRegisters][i % Mma::kRegisters] = 0.f;
  }

  CUTLASS_DEVICE static void hand_back(SharedStorage& shared, int slot, int lane) {
    if (lane == 0) shared.empty[slot].arrive();
  }

  /// acc = sum over the group's blocks. `stage` stands at the tile's first slab; returns where the next tile starts.
  /// Slabs are handed back as soon as they are multiplied, unless the next tile of the run needs them (`keep`): it
  /// needs all slices but the first. Slices that the group skips after its last one are left to `release_rest`. In ieee
  /// mode lane 0 adds the number of their tiny values to `tiny`.
  CUTLASS_DEVICE static RingState mma(Params const& p, DeviceProgram const& program, SharedStorage& shared,
                                      uint64_t weights, uint64_t positions, RingState stage, bool keep, int lane,
                                      Accumulators& acc, uint32_t& tiny) {
    bool accumulate = false;
    RingState next = stage;
    uint32_t const stage_units = static_cast<uint32_t>(p.stage_bytes) >> 4;
    int multiplied = -1;  // slot whose products may still be running, to be handed back
    if constexpr (kSums > 1 && !kSplit) {
      clear(acc);
      accumulate = true;
    }
    fence(acc);
    if constexpr (kSums > 1) cute::warpgroup_arrive();
    // No branch may stand around the products, or the compiler puts a wait behind each of them. A parity's live slices
    // are neighbours.
    int s = 0;
    for (; s < p.depth_count && s <= program.last_live && program.live[s] == 0; ++s) {
      for (int c = 0; c < p.slabs; ++c) {
        if (s == 0 || !keep) {
          shared.full[stage.slot].wait(stage.phase);
          __syncwarp();  // once the slab is handed back, its phase may change under a lane that still waits
          hand_back(shared, stage.slot, lane);
        }
        stage.advance(1, p.stages);
      }
      if (s == 0) next = stage;
    }
    // A slab's products stand between these two.
    auto begin = [&] {
      shared.full[stage.slot].wait(stage.phase);
      cutlass::arch::fence_view_async_shared();  // the loader's stores, before wgmma reads them
      cute::warpgroup_arrive();
      return positions + stage.slot * stage_units;
    };
    // While a slab's products run; by the lane that hands it back.
    auto count_tiny = [&] {
      if (lane == 0) tiny = __dp4a(*static_cast<uint32_t volatile*>(&shared.tiny[stage.slot]), 0x01010101u, tiny);
    };
    auto hand_back_multiplied = [&] {
      if (multiplied >= 0) hand_back(shared, multiplied, lane);
      multiplied = -1;
    };
    auto end = [&] {
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      hand_back_multiplied();
      multiplied = s == 0 || !keep ? stage.slot : -1;
      stage.advance(1, p.stages);
    };
    auto all_done = [&] {
      cute::warpgroup_wait<0>();
      hand_back_multiplied();
      fence(acc);
    };
    if constexpr (kSplit) {
      // The first slab's large products have one accumulator; the small ones of the first two have the other, which
      // then is scaled to the large ones, takes the second slab's, and is added to the first. So does it with each
      // further slab. Of a single slab, it is scaled as it is added.
      int c = 0;
      auto next_slab = [&] {
        stage.advance(1, p.stages);
        weights += static_cast<uint32_t>(p.block_step);
        if (++c < p.slabs) return;
        c = 0;
        if (s == 0) next = stage;
        ++s;
      };
      auto weights_of = [&](int i) { return weights + static_cast<uint32_t>(p.block_units[i]); };
      auto view = [&](uint64_t slab, int i) { return slab + static_cast<uint32_t>(p.operand_offset[i]); };
      auto is_last = [&] { return c + 1 == p.slabs && s >= program.last_live; };
      uint64_t slab = begin();
      // What begins a sum ignores it. That must be plain to the compiler, or the sums' registers, cleared or not, would
      // be held through the epilogue, where there are none to spare.
      Mma::high(weights_of(0), view(slab, 0), acc, 0, false);
      for (int i = 1; i < p.offsets; ++i) Mma::high(weights_of(i), view(slab, i), acc, 0, true);
      Mma::low(weights_of(0), view(slab, 0), acc, false);
      for (int i = 1; i < p.offsets; ++i) Mma::low(weights_of(i), view(slab, i), acc, true);
      count_tiny();
      for (bool first = true;; first = false) {
        bool const more = !first || !is_last();
        for (int again = more ? 1 : 0; again > 0; --again) {
          multiplied = first && (s == 0 || !keep) ? stage.slot : -1;
          next_slab();
          slab = begin();
          for (int i = 0; i < p.offsets; ++i) Mma::low(weights_of(i), view(slab, i), acc, first || i > 0);
          count_tiny();
        }
        cute::warpgroup_commit_batch();
        all_done();
        if (more) Mma::scale_second(acc);
        fence(acc);
        cute::warpgroup_arrive();
        int const high_ones = more ? p.offsets : 0;
        for (int i = 0; i < high_ones; ++i) Mma::high(weights_of(i), view(slab, i), acc, Mma::kParts, true);
        cute::warpgroup_commit_batch();
        multiplied = s == 0 || !keep ? stage.slot : -1;
        all_done();
        Mma::add_second(acc, more ? 1.0f : kLowScale);
        fence(acc);
        if (is_last()) break;
      }
      next_slab();
    } else {
      // In tf32 mode the slabs go to two accumulators in turn, since sums are to be short.
      bool odd = false;
      for (; s <= program.last_live; ++s) {
        for (int c = 0; c < p.slabs; ++c) {
          uint64_t const slab = begin();
          int const halves = Mma::kHalves == 1 || c + 1 < p.slabs ? Mma::kHalves : p.last_halves;
          for (int half = 0; half < halves; ++half) {
            int const first = odd ? 0 : p.offsets;
            for (int i = 0; i < first; ++i) {
              Mma::block(weights, slab + static_cast<uint32_t>(p.operand_offset[i] + half * (64 / 16)), acc, 0,
                         accumulate);
              weights += kWeightBlockBytes >> 4;
              accumulate = true;
            }
            if constexpr (kSums > 1) {
              for (int i = first; i < p.offsets; ++i) {
                Mma::block(weights, slab + static_cast<uint32_t>(p.operand_offset[i]), acc, Mma::kParts, true);
                weights += kWeightBlockBytes >> 4;
              }
              odd = !odd;
            }
          }
          end();
        }
        if (s == 0) next = stage;
      }
    }
    all_done();
    if constexpr (kSums > 1 && !kSplit) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Mma::kParts * Mma::kRegisters; ++i) {
        acc[i / Mma::kRegisters][i % Mma::kRegisters] += acc[Mma::kParts + i / Mma::kRegisters][i % Mma::kRegisters];
      }
    }
    if (!kSplit && !accumulate) clear(acc);
    if (keep) return next;  // a parity has taps at every kernel size from 2 on, so slice 0 has been passed
    for (; s < p.depth_count; ++s) {
      for (int c = 0; c < p.slabs; ++c) stage.advance(1, p.stages);
    }
    return stage;
  }

  /// Hands back the slices after the group's last one. They may still be on their way, and waiting for them must not
  /// hold up the epilogue, so this comes after it.
  CUTLASS_DEVICE static void release_rest(Params const& p, DeviceProgram const& program, SharedStorage& shared,
                                          RingState stage, bool keep, int lane) {
    if (program.last_live + 1 >= p.depth_count) return;
    for (int s = 0; s < p.depth_count; ++s) {
      for (int c = 0; c < p.slabs; ++c) {
        if (s > program.last_live && (s == 0 || !keep)) {
          shared.full[stage.slot].wait(stage.phase);
          __syncwarp();
          hand_back(shared, stage.slot, lane);
        }
        stage.advance(1, p.stages);
      }
    }
  }
};

}  // namespace convt3d::sm90
