// SPDX-License-Identifier: Apache-2.0
//
// From a tile configuration to a launch: names CUTLASS's DefaultConv3dDgrad mainloop for the configuration, puts our
// epilogues behind it, and fills the kernel's parameters from a Call. Each instances/*.cu file compiles one type.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cutlass/conv/kernel/default_conv3d_dgrad.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/threadblock/mma_base.h"
#include "sm80/call.hpp"
#include "sm80/filter_tile.hpp"
#include "sm80/kernel.hpp"
#include "sm80/select.hpp"
#include "sm80/shared_memory.hpp"
#include "sm80/short_sums.hpp"
#include "sm80/split_mma.hpp"
#include "sm80/sums.hpp"
#include "sm80/x_iterator.hpp"

namespace convt3d::sm80 {

// The mainloop's policy as CUTLASS chose it, but for our warp-level operators.
template <class Policy, class Config, class WarpMma>
struct MmaPolicy {
  using Split = typename SplitNearest<WarpMma, typename Config::Math>::Type;
  static constexpr bool kSplit = !std::is_same_v<Split, WarpMma>;
  static constexpr int kSteps = Config::Tile::kK / Config::Instruction::kK;
  static constexpr int kThreads =
      32 * (Config::Tile::kM / Config::WarpTile::kM) * (Config::Tile::kN / Config::WarpTile::kN);
  using Fragment = typename Split::FragmentC;
  using Sums = std::conditional_t<
      Config::kSums == ShortIn::kRegisters, ShortSums<Fragment, kSteps, Config::kSumIterations>,
      std::conditional_t<kSplit, StagedSums<Fragment, Config::kSumIterations, kThreads>,
                         StashedSums<Fragment, kSteps, Config::kSumIterations, kThreads, Config::kKept>>>;
  using Math = std::conditional_t<kSplit, typename Config::Math, cutlass::arch::OpMultiplyAdd>;
  using Operator = std::conditional_t<Config::kSums == ShortIn::kNone, Split, ShortSumMma<Split, Sums, Math>>;
  using Type = cutlass::gemm::threadblock::MmaPolicy<Operator, typename Policy::SmemPaddingA,
                                                     typename Policy::SmemPaddingB, Policy::kPartitionsK>;
};

// What reads the filter: as CUTLASS chose it, or for warps of 48 channels.
template <class Config, class Default, bool kSpaced = is_spaced(Config::Tile::kN)>
struct FilterParts {
  using IteratorB = typename Default::IteratorB;
  using SmemIteratorB = typename Default::SmemIteratorB;
  using WarpMma = typename Default::MmaPolicy::Operator;
};

template <class Config, class Default>
struct FilterParts<Config, Default, true> {
  using Operand = typename Config::Operand;
  using SmemLayoutA = typename Default::MmaCore::SmemLayoutA;
  using SmemLayoutB = typename Default::MmaCore::SmemLayoutB;
  using Tile = FilterTile<Operand, Config::Tile::kK, Config::Tile::kN, Default::MmaCore::kThreads>;
  using IteratorB = FilterIterator<Tile>;
  using SmemIteratorB = FilterStore<Tile, SmemLayoutB>;
  using WarpMma = SpacedMma<typename cutlass::gemm::warp::DefaultMmaTensorOp<
      typename Config::WarpTile, typename Config::Instruction, Operand, SmemLayoutA, Operand, SmemLayoutB, float,
      cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>::Type>;
};

template <class Config, bool kChannelsLast>
struct Instance {
  using Operand = typename Config::Operand;
  using Element = typename Config::Element;
  using Layout = cutlass::layout::TensorNDHWC;
  static constexpr int kAccess = kAccessBytes / int(sizeof(Element));
  // As CUTLASS has them; warps of 48 channels live in what it has for 64.
  static constexpr bool kSpaced = is_spaced(Config::Tile::kN);
  using Tile = std::conditional_t<kSpaced, Shape<Config::Tile::kM, with_room(Config::Tile::kN), Config::Tile::kK>,
                                  typename Config::Tile>;
  using WarpTile =
      std::conditional_t<kSpaced, Shape<Config::WarpTile::kM, kWarpRoom, Config::Tile::kK>, typename Config::WarpTile>;
  using Default = cutlass::conv::kernel::DefaultConv3dDgrad<
      Operand, Layout, Operand, Layout, Element, Layout, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      Tile, WarpTile, typename Config::Instruction,
      cutlass::epilogue::thread::LinearCombination<Element, kAccess, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, Config::kStages, typename Config::Math,
      cutlass::conv::IteratorAlgorithm::kOptimized, cutlass::conv::StrideSupport::kUnity>;
  using IteratorX =
      RowTableIterator<cutlass::MatrixShape<Config::Tile::kM, Config::Tile::kK>, Operand, typename Default::ThreadMapA>;
  using Filter = FilterParts<Config, Default>;
  using Mma = cutlass::conv::threadblock::ImplicitGemmMultistage<
      Tile, IteratorX, typename Default::SmemIteratorA, cutlass::arch::CacheOperation::Always,
      typename Filter::IteratorB, typename Filter::SmemIteratorB, cutlass::arch::CacheOperation::Global,
      typename MmaPolicy<typename Default::MmaPolicy, Config, typename Filter::WarpMma>::Type, Config::kStages>;
  using ThreadMap = typename Default::Epilogue::OutputTileIterator::ThreadMap;
  using Visitor = NdhwcVisitor<Mma, Element, ThreadMap>;
  // One epilogue stage, steps not unrolled: eleven activations times eight steps would be a megabyte of code.
  using VisitorEpilogue =
      cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Default::Epilogue, Visitor, 1, false>;
  using Kernel = DgradKernel<Mma, VisitorEpilogue, Element, kChannelsLast>;

  static_assert(Config::Tile::kK * sizeof(Operand) == kStepBytes, "as x is laid out");
  static_assert(Config::Tile::kM <= kMaxTileRows && Config::Tile::kK <= kMaxTileK, "the bounds of call.hpp");
  static_assert(sizeof(typename Kernel::Params) <= 4096, "CUDA guarantees 4 KiB of kernel parameters");

  static Lattice lattice(ResidueClass const& rc, int64_t const* stride) {
    Lattice lattice{0, {stride[0], 0, 0, 0}};
    for (int axis = 0; axis < 3; ++axis) {
      lattice.base += rc.dim[axis].origin * stride[2 + axis];
      lattice.stride[1 + axis] = rc.dim[axis].stride * stride[2 + axis];
    }
    return lattice;
  }

  static ClassParams<Mma> class_params(Call const& call, ResidueClass const& rc, int samples, Operand const* filter) {
    Problem const& p = *call.problem;
    auto const& [d, h, w] = rc.dim;
    auto const as_int = [](int64_t value) { return static_cast<int>(value); };
    cutlass::conv::Conv3dProblemSize const size(
        samples, as_int(d.count), as_int(h.count), as_int(w.count), as_int(call.c_channels), as_int(call.k_channels),
        as_int(d.taps), as_int(h.taps), as_int(w.taps), as_int(p.in_size[0]), as_int(p.in_size[1]),
        as_int(p.in_size[2]), as_int(d.base), as_int(h.base), as_int(w.base), 1, 1, 1, as_int(d.input_step),
        as_int(h.input_step), as_int(w.input_step), cutlass::conv::Mode::kCrossCorrelation);
    Layout const x_layout(
        {as_int(call.x_stride[3]), as_int(call.x_stride[2]), as_int(call.x_stride[1]), as_int(call.x_stride[0])});
    Layout const filter_layout = Layout::packed({size.K, size.T, size.R, size.S, size.C});
    int64_t const k_tiles = (call.k_channels + Mma::Shape::kK - 1) / Mma::Shape::kK;

    ClassParams<Mma> params;
    params.size = size;
    params.iterator_x = Mma::IteratorA::getParams(size, x_layout);
    // To the channels of the next iteration, of which CUTLASS assumes that they lie behind those of this one.
    params.iterator_x.inc_next[3] += (call.x_block_step - Mma::Shape::kK) * int64_t(sizeof(Operand));
    params.iterator_filter = typename Mma::IteratorB::Params(size, filter_layout);
    params.x_block_step = call.x_block_step;
    params.filter = filter;
    params.rows = as_int(samples * rc.outputs());
    params.k_iterations = as_int(rc.taps() * k_tiles);
    params.cut_share = cut_share(p, rc.taps() * p.in_channels);
    params.y = lattice(rc, p.y_stride);
    params.add = lattice(rc, effective_add_stride(p).v);
    return params;
  }

  // Classes, or pairs of them, by their products. They are few: an insertion sort.
  static void longest_first(ClassParams<Mma>* classes, int count, bool pairs) {
    int const step = pairs ? 2 : 1;
    auto const length = [&](int i) { return classes[i].k_iterations + (pairs ? classes[i + 1].k_iterations : 0); };
    for (int i = step; i < count; i += step) {
      for (int at = i; at > 0 && length(at - step) < length(at); at -= step) {
        std::swap_ranges(classes + at - step, classes + at, classes + at);
      }
    }
  }

  static cudaError_t launch(Call const& call, cudaStream_t stream) {
    auto* kernel = &dgrad_kernel<Kernel, Config::kMinBlocks>;
    int64_t max_blocks = kMaxInt;
    if constexpr (std::is_same_v<Operand, float>) {
      if (call.condition != nullptr) {
        kernel = &conditional_dgrad_kernel<Kernel, Config::kMinBlocks - 1>;
        max_blocks = int64_t(Config::kMinBlocks - 1) * call.multiprocessors;
      }
    }
    Problem const& p = *call.problem;
    constexpr int kStorage = int(sizeof(typename Kernel::SharedStorage));
    constexpr bool kStashes = Config::kSums == ShortIn::kSharedMemory;
    constexpr int kStash = kStashes ? Kernel::kThreads * (int(sizeof(typename Kernel::Sums)) - Config::kKept * 4) : 0;
    // It may cost a thread block on a multiprocessor.
    constexpr int64_t kLeast = std::max<int64_t>(Config::kSumIterations * Mma::Shape::kK, kSumProducts);
    bool const stash = kStashes && longest_sum(p) > kLeast;
    SharedMemory const room = shared_memory();
    int const with_pairs = kStorage + Kernel::kHeldBytes + (stash ? kStash : 0);
    bool const fits = Kernel::kPairs && 2 * (with_pairs + kReservedBytes) <= room.of_multiprocessor;
    bool const pairs = fits && pairs_classes(p, stash);
    int const shared_bytes = pairs ? with_pairs : kStorage + (stash ? kStash : 0);
    // Set on every launch: it is per device and cheap, and remembering it would be state. The same for all calls:
    // another thread's may come in between.
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             std::min(kStorage + Kernel::kHeldBytes + kStash, std::max(room.of_block, kStorage)));
    if (error != cudaSuccess) return error;

    Size5 const add_stride = effective_add_stride(p);
    Size5 const y_sizes = y_shape(p);
    int64_t const classes = residue_class_count(p.stride);
    int64_t const chunk = samples_per_launch(p, call.x_stride[0]);
    for (int64_t first = 0; first < p.batch; first += chunk) {
      int const samples = static_cast<int>(std::min(chunk, p.batch - first));
      KernelParams<Mma> params;
      params.stash = stash;
      params.pairs = pairs;
      params.column_tiles = static_cast<int>((p.out_channels + Config::Tile::kN - 1) / Config::Tile::kN);
      params.x = static_cast<Operand const*>(call.x) + first * call.x_stride[0];
      params.tail.bias = call.bias;
      params.tail.add = call.add ? static_cast<Element const*>(call.add) + first * add_stride[0] : nullptr;
      params.tail.y = static_cast<Element*>(call.y) + first * p.y_stride[0];
      params.tail.bias_stride = p.bias_stride;
      params.tail.add_channel_stride = add_stride[1];
      params.tail.y_channel_stride = p.y_stride[1];
      params.tail.channels = static_cast<int>(p.out_channels);
      params.tail.activation = p.activation;
      params.tail.negative_slope = p.negative_slope;
      params.tail.add_after = p.add_order == CONVT3D_ADD_AFTER;
      params.tail.vector_add =
          access_bytes(y_sizes, add_stride.v, 1, p.add_alignment, sizeof(Element)) == kAccessBytes &&
          add_stride[1] == 1;
      params.tail.vector_y =
          access_bytes(y_sizes, p.y_stride, 1, p.y_alignment, sizeof(Element)) == kAccessBytes && p.y_stride[1] == 1;

      int64_t filter_begin = 0;
      int64_t next = 0;
      while (next < classes) {
        params.class_count = 0;
        int64_t row_tiles = 0;
        for (; next < classes && params.class_count < kMaxClassesPerLaunch; ++next) {
          ResidueClass const rc = residue_class(p, next);
          auto const* filter = static_cast<Operand const*>(call.filter) + filter_begin;
          filter_begin += rc.taps() * call.k_channels * call.c_channels;
          if (rc.is_empty()) continue;
          ClassParams<Mma>& cls = params.classes[params.class_count++];
          cls = class_params(call, rc, samples, filter);
          row_tiles = std::max<int64_t>(row_tiles, (int64_t(cls.rows) + Mma::Shape::kM - 1) / Mma::Shape::kM);
        }
        if (params.class_count == 0) continue;
        int64_t const tiles = row_tiles * params.column_tiles;
        int64_t const blocks = tiles * (params.class_count / (pairs ? 2 : 1));
        if (blocks > kMaxInt) return cudaErrorInvalidConfiguration;
        longest_first(params.classes, params.class_count, pairs);
        params.tiles = static_cast<int>(tiles);
        params.mixed_tiles = static_cast<int>(std::max<int64_t>(tiles - Kernel::kTailTiles, 0));
        params.blocks = static_cast<int>(blocks);
        params.condition = call.condition;
        auto const launched = static_cast<unsigned>(std::min(blocks, max_blocks));
        if (call.condition != nullptr || call.overlap) {
          error = launch_dependent(kernel, launched, Kernel::kThreads, shared_bytes, stream, params);
        } else {
          kernel<<<launched, Kernel::kThreads, shared_bytes, stream>>>(params);
          error = cudaGetLastError();
        }
        if (error != cudaSuccess) return error;
      }
    }
    return cudaSuccess;
  }
};

template <class Config>
LaunchFn launch_for(bool channels_last) {
  return channels_last ? &Instance<Config, true>::launch : &Instance<Config, false>::launch;
}

}  // namespace convt3d::sm80
