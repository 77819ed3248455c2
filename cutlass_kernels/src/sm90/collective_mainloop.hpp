// SPDX-License-Identifier: Apache-2.0
//
// x and the multiply. Loader warps read x planes (NCDHW), round them to TF32 and store them channel-innermost
// into shared memory; a consumer warpgroup multiplies resident weight blocks with shifted views of them.
//
// One halo slab serves every tap: a wgmma operand may start at any 128-byte row, since the 128-byte swizzle XORs
// absolute address bits. Rows run along H (8 per core matrix), `pitch` rows per W position.
#pragma once

#include "convt3d/numerics.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90 {

/// Read in place of x outside the tensor.
static __device__ const float4 kZeros = {0.f, 0.f, 0.f, 0.f};

struct CollectiveMainloop {
  using Params = MainloopParams;
  using Mma = cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_SS_TN<>;
  static constexpr int kAccumulators = 64;
  static constexpr int kStepUnits = 2;      // 8 channels of 4 bytes, in 16-byte units
  static constexpr int kStepsPerBlock = 4;  // 32 channels
  static constexpr int kLoaderThreads = kLoaderWarps * 32;
  static constexpr float kInstructionRounds = 3.4e38f;  // magnitudes below which cvt.rn.tf32 is right
  static constexpr int kFastItems = 3;  // 4 x 4 pieces of x in a chunk: one chunk per slab on the fast path

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

  CUTLASS_DEVICE static int stage_bytes(Params const& p) { return p.slab_bytes * p.channel_blocks; }

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

  // ---- loader ------------------------------------------------------------------------------------------------

  /// Four channels by four W positions of x.
  struct Piece {
    float4 channel[4];
  };

  /// x is read by every class and by neighbouring tiles; add and y stream past it in L2.
  CUTLASS_DEVICE static uint64_t keep_in_l2() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }

  CUTLASS_DEVICE static float4 load_quad(float const* at, uint64_t policy) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at), "l"(policy));
    return v;
  }

  /// `count` values after skipping `skip`, zeros elsewhere: rows that cannot be read in 16-byte pieces.
  CUTLASS_DEVICE static float4 load_quad_slowly(float const* at, int w, int width) {
    float4 v;
    v.x = w >= 0 && w < width ? __ldg(at) : 0.f;
    v.y = w + 1 >= 0 && w + 1 < width ? __ldg(at + 1) : 0.f;
    v.z = w + 2 >= 0 && w + 2 < width ? __ldg(at + 2) : 0.f;
    v.w = w + 3 >= 0 && w + 3 < width ? __ldg(at + 3) : 0.f;
    return v;
  }

  CUTLASS_DEVICE static uint32_t rounded(float v) {
    uint32_t r;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return r;
  }

  /// Largest magnitude, nan if there is one.
  CUTLASS_DEVICE static float magnitude(float4 v, float largest) {
    float const values[4] = {v.x, v.y, v.z, v.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(values[i])));
    return largest;
  }

  /// An item of a slab, (channel quad, H row, W quad) with W fastest for coalesced reads, and where it goes.
  struct Item {
    int64_t offset;       // elements from the slab's first row and column
    int row;              // H row; far outside if there is no such item
    int w;                // first W position relative to the tile
    uint32_t address[4];  // of its W positions' 16 bytes within a stage
  };

  CUTLASS_DEVICE static Item item(Params const& p, int index, int items) {
    Item it;
    int rest, quad, column, row;
    p.divide_quads(rest, column, index);
    p.divide_pitch(quad, row, rest);
    bool const exists = index < items;
    it.w = 4 * (column + p.quad_lo);
    it.offset = 4 * quad * p.x_stride[1] + row * p.x_stride[3] + it.w;
    it.row = exists ? row : (1 << 30);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      int const slab_column = it.w + j - p.window_lo[2];
      bool const wanted = exists && slab_column >= 0 && slab_column < p.slab_columns;
      int const slab_row = wanted ? slab_column * p.slab_pitch + row : p.slab_pitch * p.slab_columns;
      it.address[j] = (wanted ? quad / 8 * p.slab_bytes : 0) + slab_row * 128 + ((quad ^ slab_row) & 7) * 16;
    }
    return it;
  }

  /// What a loader thread has in flight: some items of one slab.
  template <int kItems>
  struct Chunk {
    Piece piece[kItems];
    RingState stage;
    int first;  // item of piece 0
    bool last;  // of its slab
  };

  /// Walks the chunks of all slabs of all runs.
  struct ChunkCursor {
    TileScheduler::Run run;
    int slice = 0, slices = 0, first = 0;
    RingState stage;
  };

  /// Loader warps: every slab of every run, in order. A slab's loads take an L2 latency, longer than its turn, so two
  /// chunks are in flight: one is loaded while the other is stored. The loop has few instructions to spare (a warp
  /// issues one every few cycles here), so what does not change is computed once. `flag()` is called where x may not
  /// stay finite.
  template <class Flag>
  CUTLASS_DEVICE static void load(Params const& p, SchedulerParams const& sp, SharedStorage& shared,
                                  TileScheduler::SharedStorage& schedule, unsigned char* smem, int thread,
                                  Flag&& flag) {
    if (p.vectorized && p.in_quads * p.slab_pitch * p.quads <= kFastItems * kLoaderThreads) {
      load_as<kFastItems, true>(p, sp, shared, schedule, smem, thread, flag);
    } else {
      load_as<1, false>(p, sp, shared, schedule, smem, thread, flag);
    }
  }

  /// `kOneChunk`: a slab is one chunk, and x can be read in 16-byte pieces.
  template <int kItems, bool kOneChunk, class Flag>
  CUTLASS_DEVICE static void load_as(Params const& p, SchedulerParams const& sp, SharedStorage& shared,
                                     TileScheduler::SharedStorage& schedule, unsigned char* smem, int thread,
                                     Flag&& flag) {
    TileScheduler::Consumer scheduler{schedule, {}};
    int const items = p.in_quads * p.slab_pitch * p.quads;
    uint64_t const policy = keep_in_l2();
    uint32_t const smem_address = cute::cast_smem_ptr_to_uint(smem);
    ChunkCursor at;
    float largest = 0.f;
    Chunk<kItems> even, odd;
    bool even_pending = false, odd_pending = false;
    Item cached[kItems];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kItems; ++i) cached[i] = item(p, thread + i * kLoaderThreads, items);

    auto finish = [&](Chunk<kItems> const& chunk) {
      shared.empty[chunk.stage.slot].wait(chunk.stage.phase ^ 1);
      uint32_t const slab = smem_address + chunk.stage.slot * stage_bytes(p);
      float most = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 4; ++c) most = magnitude(chunk.piece[i].channel[c], most);
      }
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(most));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        Item const it = kOneChunk ? cached[i] : item(p, chunk.first + i * kLoaderThreads, items);
        if (most < kInstructionRounds) {
          store_piece<false>(slab, it, chunk.piece[i]);
        } else {
          store_piece<true>(slab, it, chunk.piece[i]);
        }
      }
      if (chunk.last) {
        // No proxy fence here: it would wait for the loads that are in flight. The consumers have it.
        __syncwarp();
        if (cutlass::canonical_lane_idx() == 0) shared.full[chunk.stage.slot].arrive();
      }
    };

    // Loads the next chunk into `chunk`; `other` is the one before it, finished on the way. False at the end.
    auto step = [&](Chunk<kItems>& chunk, Chunk<kItems>& other, bool& other_pending) {
      if (at.slice == at.slices) {
        if (other_pending && !scheduler.available()) {  // the next run may wait for that very chunk
          finish(other);
          other_pending = false;
        }
        int const run = scheduler.fetch();
        if (run == TileScheduler::kEnd) {
          if (other_pending) finish(other);
          return false;
        }
        at.run = TileScheduler::decode(sp, run);
        at.slice = 0;
        at.slices = at.run.length + p.depth_count - 1;
        at.first = 0;
      }
      int const d = at.run.d + p.window_lo[0] + at.slice;
      int const h0 = at.run.h * kTileH + p.window_lo[1];
      int const w0 = at.run.w * kTileW;
      int const height = d >= 0 && d < p.in_size[0] ? p.in_size[1] : 0;
      float const* corner = p.x + at.run.n * p.x_stride[0] + d * p.x_stride[2] + h0 * p.x_stride[3] + w0;
      chunk.first = at.first + thread;
      chunk.stage = at.stage;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        Item const it = kOneChunk ? cached[i] : item(p, chunk.first + i * kLoaderThreads, items);
        bool live = static_cast<unsigned>(h0 + it.row) < static_cast<unsigned>(height);
        if (kOneChunk || p.vectorized) {
          live = live && static_cast<unsigned>(w0 + it.w) < static_cast<unsigned>(p.in_size[2]);
          float const* from = live ? corner + it.offset : reinterpret_cast<float const*>(&kZeros);
          int64_t const step = live ? p.x_stride[1] : 0;
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 4; ++c) chunk.piece[i].channel[c] = load_quad(from + c * step, policy);
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 4; ++c) {
            chunk.piece[i].channel[c] =
                load_quad_slowly(corner + it.offset + c * p.x_stride[1], w0 + it.w, live ? p.in_size[2] : 0);
          }
        }
      }
      at.first += kItems * kLoaderThreads;
      chunk.last = at.first >= items;
      if (chunk.last) {
        at.first = 0;
        ++at.slice;
        at.stage.advance(1, p.stages);
      }
      if (other_pending) finish(other);
      other_pending = false;
      return true;
    };

    for (;;) {
      if (!step(even, odd, odd_pending)) break;
      even_pending = true;
      if (!step(odd, even, even_pending)) break;
      odd_pending = true;
    }
    if (__any_sync(0xffffffffu, !(largest < kSuspect))) flag();
  }

  /// `kAnyValue`: with values near the end of the range or nans, which the rounding instruction turns into others.
  template <bool kAnyValue>
  CUTLASS_DEVICE static void store_piece(uint32_t slab, Item const& it, Piece const& piece) {
    float const* v = reinterpret_cast<float const*>(&piece);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      uint32_t word[4];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 4; ++c) {
        word[c] = kAnyValue ? round_bits_to_tf32(__float_as_uint(v[4 * c + j])) : rounded(v[4 * c + j]);
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(slab + it.address[j]), "r"(word[0]), "r"(word[1]),
                   "r"(word[2]), "r"(word[3])
                   : "memory");
    }
  }

  // ---- consumer ----------------------------------------------------------------------------------------------

  CUTLASS_DEVICE static uint64_t descriptor(void const* smem, uint32_t stride_units) {
    cute::GmmaDescriptor desc;
    desc.desc_ = 0;
    desc.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(smem) >> 4;
    desc.bitfield.leading_byte_offset_ = 1;
    desc.bitfield.stride_byte_offset_ = stride_units;
    desc.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    return desc.desc_;
  }

  template <size_t... I>
  CUTLASS_DEVICE static void fma(uint64_t a, uint64_t b, float (&acc)[kAccumulators], bool accumulate,
                                 std::index_sequence<I...>) {
    Mma::fma(a, b, acc[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  /// acc = sum over the group's blocks. `stage` stands at the tile's first slice.
  CUTLASS_DEVICE static void mma(Params const& p, DeviceProgram const& program, SharedStorage& shared, uint64_t a_base,
                                 uint64_t b_base, RingState stage, float (&acc)[kAccumulators]) {
    bool accumulate = false;
    int block = 0;
    uint32_t const stage_units = static_cast<uint32_t>(stage_bytes(p)) >> 4;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators; ++i) cute::warpgroup_fence_operand(acc[i]);
    for (int s = 0; s < p.depth_count; ++s) {
      int const end = program.slice_end[s];
      if (block < end) {
        shared.full[stage.slot].wait(stage.phase);
        cutlass::arch::fence_view_async_shared();  // the loader's stores, before wgmma reads them
      }
      cute::warpgroup_arrive();
      uint64_t const b_stage = b_base + stage.slot * stage_units;
      for (; block < end; ++block) {
        uint64_t const a = a_base + static_cast<uint32_t>(block) * (kWeightBlockBytes >> 4);
        uint64_t const b = b_stage + static_cast<uint32_t>(program.b_offset[block]);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kStepsPerBlock; ++k) {
          fma(a + k * kStepUnits, b + k * kStepUnits, acc, accumulate, std::make_index_sequence<kAccumulators>{});
          accumulate = true;
        }
      }
      cute::warpgroup_commit_batch();
      stage.advance(1, p.stages);
    }
    cute::warpgroup_wait<0>();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators; ++i) cute::warpgroup_fence_operand(acc[i]);
    if (block == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.f;
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
