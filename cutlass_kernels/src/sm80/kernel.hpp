// SPDX-License-Identifier: Apache-2.0
//
// The sm80 kernel: CUTLASS 2.x implicit-GEMM dgrad mainloop (unit stride, optimized iterators) over one residue class
// per thread block, and one of two epilogues.
//
// Grid: class fastest, then GEMM N tiles, then GEMM M tiles. Neighbouring thread blocks then read the same x (all
// classes do) and write interleaved voxels of the same region of y, so both meet in L2; and blocks with one tap run
// beside blocks with eight, so that some stream add and y while others compute. Of the last tiles the class with the
// most taps comes first, so that no block of eight taps starts when the others are about to end.
#pragma once

#include <type_traits>

#include "cutlass/arch/cache_operation.h"
#include "cutlass/conv/convolution.h"
#include "dependent_launch.hpp"
#include "sm80/epilogue_ncdhw.hpp"
#include "sm80/epilogue_rows.hpp"
#include "sm80/short_sums.hpp"
#include "sm80/tail.hpp"
#include "sm80/visitor_ndhwc.hpp"

namespace convt3d::sm80 {

// Asks L2 for the 128-byte line at `address`. The line is wanted by the epilogue, a mainloop later.
CUTLASS_DEVICE void prefetch_to_l2(void const* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

template <class Mma_, class VisitorEpilogue_, class Element_, bool kChannelsLast>
struct DgradKernel {
  using Mma = Mma_;
  using Element = Element_;
  using Params = KernelParams<Mma>;
  using VisitorEpilogue = VisitorEpilogue_;  // EpilogueWithVisitorCallbacks<.., NdhwcVisitor>
  using Shape = typename Mma::Shape;
  using PlaneEpilogue = NcdhwEpilogue<Mma, Element>;
  static constexpr int kColumns = Mma::WarpCount::kN * Mma::Operator::Shape::kN;  // of a tile
  static constexpr bool kOwnRows = kColumns != Shape::kN;                         // CUTLASS has no epilogue for them
  using LastEpilogue = std::conditional_t<kOwnRows, RowsEpilogue<Mma, Element>, VisitorEpilogue>;
  using Sums = typename Mma::Operator::IteratorC::Fragment;  // a thread's
  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;

  // Behind it, where sums are stashed (short_sums.hpp), those of all threads.
  struct alignas(16) SharedStorage {
    union {
      typename Mma::SharedStorage mainloop;
      std::conditional_t<kChannelsLast, typename LastEpilogue::SharedStorage, typename PlaneEpilogue::SharedStorage>
          epilogue;
    };
    Row rows[Shape::kM];
  };

  // Whether a thread block may compute two classes that are neighbours along W. In ieee mode products take the time.
  static constexpr bool kPairs =
      !kChannelsLast && PlaneEpilogue::kPairs && !std::is_same_v<typename Mma::IteratorA::Element, float>;
  // Behind the storage for a pair: the first one's sums.
  static constexpr int kHeldBytes = kPairs ? int(sizeof(typename PlaneEpilogue::SharedStorage)) : 0;

  // So many tiles are the last ones: the blocks that an H200 has at once, and as many again of the shorter classes.
  // Where a class writes every second element, its neighbours should not be far.
  static constexpr int kTailTiles = kChannelsLast ? 128 : 64;

  struct Place {
    int class_idx, tile_idx;
  };

  CUTLASS_DEVICE static Place place(Params const& params, int block, int classes) {
    int const groups = params.class_count / classes, behind = block - params.mixed_tiles * groups;
    if (behind < 0) return {block % groups * classes, block / groups};
    int const tiles = params.tiles - params.mixed_tiles;
    return {behind / tiles * classes, params.mixed_tiles + behind % tiles};
  }

  CUTLASS_DEVICE static void run(Params const& params, SharedStorage& storage, int block) {
    int const classes = kPairs && params.pairs ? 2 : 1;  // of this block
    auto const [class_idx, tile_idx] = place(params, block, classes);
    int const column_begin = tile_idx % params.column_tiles * kColumns;
    int const row_begin = tile_idx / params.column_tiles * Shape::kM;
    if (row_begin >= params.classes[class_idx].rows) return;

    int const thread_idx = threadIdx.x;
    int const warp_idx = cutlass::canonical_warp_idx_sync();
    int const lane_idx = thread_idx % 32;
    TailParams const& tail = params.tail;
    auto* const behind = reinterpret_cast<unsigned char*>(&storage + 1);

#pragma unroll 1
    for (int i = 0; i < classes; ++i) {
      ClassParams<Mma> const& cls = params.classes[class_idx + i];
      for (int row = thread_idx; row < Shape::kM; row += kThreads) {
        Row const at = decode_row(cls, row_begin + row);
        storage.rows[row] = at;
        if constexpr (kChannelsLast) {
          if (tail.vector_add && at.inside) {
            auto const* line = static_cast<Element const*>(tail.add) + at.add + column_begin;
            CUTLASS_PRAGMA_UNROLL
            for (int c = 0; c < kColumns; c += 128 / int(sizeof(Element))) {
              if (column_begin + c < tail.channels) prefetch_to_l2(line + c);
            }
          }
        }
      }

      // Rows and add do not depend on the pre-pass, x and the filters do.
      if (i == 0) wait_for_previous_kernel();
      __syncthreads();

      typename Mma::FragmentC accumulators;
      start_sums(accumulators, cls.k_iterations,
                 params.stash ? reinterpret_cast<float4*>(behind + (classes - 1) * kHeldBytes) : nullptr);
      if (cls.k_iterations > 0) {
        typename Mma::IteratorA iterator_x(cls.iterator_x, cls.size, params.x, storage.rows, thread_idx);
        typename Mma::IteratorB iterator_filter(cls.iterator_filter, cls.size, cls.filter, thread_idx,
                                                {0, column_begin});
        Mma mma(storage.mainloop, thread_idx, warp_idx, lane_idx);
        mma(cls.k_iterations, accumulators, iterator_x, iterator_filter, accumulators);
      }

      auto& sums = finish_sums(accumulators);
      if (cls.cut_share != 0.f) center(sums, cls.cut_share);

      TileContext<Mma> const tile{&cls, params.x, &tail, storage.rows, row_begin, column_begin};
      if constexpr (kChannelsLast && kOwnRows) {
        LastEpilogue::run(storage.epilogue, sums, tile, warp_idx, lane_idx);
      } else if constexpr (kChannelsLast) {
        typename VisitorEpilogue::Params const visitor_params{};
        VisitorEpilogue epilogue(visitor_params, storage.epilogue, thread_idx, warp_idx, lane_idx);
        epilogue(sums, {0, 0, 0}, tile, thread_idx);
      } else if constexpr (kPairs) {
        auto& held = *reinterpret_cast<typename PlaneEpilogue::SharedStorage*>(behind);
        if (classes == 1) {
          PlaneEpilogue::run(storage.epilogue, sums, tile, warp_idx, lane_idx);
        } else if (i == 0) {
          __syncthreads();  // the rows are done with
          PlaneEpilogue::write(held, sums, 0, warp_idx, lane_idx);
        } else {
          PlaneEpilogue::run_pair(held, storage.epilogue, sums, tile, &cls - 1, warp_idx, lane_idx);
        }
      } else {
        PlaneEpilogue::run(storage.epilogue, sums, tile, warp_idx, lane_idx);
      }
    }
  }
};

// Compiled for SM80, a kernel with a stash beside sums that fill the registers needs more of these than three blocks
// leave; and the devices that run such code have shared memory for two (select.cpp).
template <class Kernel, int kMinBlocks>
constexpr int min_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return kStashed<typename Kernel::Mma::FragmentC> ? kMinBlocks - 1 : kMinBlocks;
#else
  return kMinBlocks;
#endif
}

template <class Kernel, int kMinBlocks>
__global__ void __launch_bounds__(Kernel::kThreads, (min_blocks<Kernel, kMinBlocks>()))
    dgrad_kernel(__grid_constant__ typename Kernel::Params const params) {
  extern __shared__ __align__(16) unsigned char shared[];
  Kernel::run(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared), blockIdx.x);
}

// The same behind the sm90 family's kernel (conditional.hpp): the work may not be wanted, and the grid is smaller than
// it. One block less per multiprocessor, whose registers the loop needs.
template <class Kernel, int kMinBlocks>
__global__ void __launch_bounds__(Kernel::kThreads, kMinBlocks)
    conditional_dgrad_kernel(__grid_constant__ typename Kernel::Params const params) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(16) unsigned char shared[];
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (*params.condition == 0) return;
  for (unsigned block = blockIdx.x; block < unsigned(params.blocks); block += gridDim.x) {
    Kernel::run(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared), int(block));
    __syncthreads();
  }
#endif
}

}  // namespace convt3d::sm80
