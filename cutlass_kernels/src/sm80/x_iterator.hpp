// SPDX-License-Identifier: Apache-2.0
//
// Operand A of the implicit GEMM: CUTLASS's optimized unit-stride dgrad iterator (the same order of taps, the same
// pointer increments from Conv3dDgradOutputGradientIteratorOptimizedParams), reading the tile's rows from the table in
// shared memory instead of decoding them, with one mask register per access instead of three.
#pragma once

#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/threadblock/conv3d_params.h"
#include "cutlass/layout/tensor.h"
#include "cutlass/matrix_shape.h"
#include "cutlass/tensor_ref.h"
#include "sm80/row_table.hpp"

namespace convt3d::sm80 {

template <class Shape_, class Element_, class ThreadMap_>
class RowTableIterator {
 public:
  using Shape = Shape_;
  using Element = Element_;
  using ThreadMap = ThreadMap_;
  using Layout = cutlass::layout::TensorNDHWC;
  using TensorRef = cutlass::TensorRef<Element, Layout>;
  using TensorCoord = typename Layout::TensorCoord;
  using Index = typename Layout::Index;
  using LongIndex = typename Layout::LongIndex;
  using AccessType = cutlass::AlignedArray<Element, ThreadMap::kElementsPerAccess>;
  using ConvProblemSize = cutlass::conv::Conv3dProblemSize;
  using Params = cutlass::conv::threadblock::Conv3dDgradOutputGradientIteratorOptimizedParams;
  static constexpr auto kIteratorAlgorithm = cutlass::conv::IteratorAlgorithm::kOptimized;
  static constexpr auto kStrideSupport = cutlass::conv::StrideSupport::kUnity;
  static constexpr int kConvDim = 3;
  static constexpr int kAccessesPerVector = 1;
  static_assert(ThreadMap::Iterations::kContiguous == 1, "one access along channels per thread and row");

  static Params getParams(ConvProblemSize const& size, Layout const& layout) {
    return Params(size, layout, cutlass::sizeof_bits<Element>::value, {Shape::kRow, Shape::kColumn},
                  ThreadMap::kThreads, ThreadMap::kElementsPerAccess,
                  {ThreadMap::Iterations::kContiguous, ThreadMap::Iterations::kStrided},
                  {ThreadMap::Delta::kContiguous, ThreadMap::Delta::kStrided});
  }

  CUTLASS_DEVICE RowTableIterator(Params const& params, ConvProblemSize const& size, Element const* x, Row const* rows,
                                  int thread_idx)
      : params_(params), size_(size) {
    auto const coord = ThreadMap::initial_offset(thread_idx);
    channel_ = coord.contiguous();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Row const& row = rows[coord.strided() + i * ThreadMap::Delta::kStrided];
      pointer_[i] = reinterpret_cast<char const*>(x + row.x + channel_);
      mask_[i] = row.mask;
    }
    if (channel_ >= size_.K) clear();
    select_tap();
  }

  CUTLASS_DEVICE void set_iteration_index(Index index) { access_ = index; }

  CUTLASS_DEVICE RowTableIterator& operator++() {
    ++access_;
    return *this;
  }

  CUTLASS_DEVICE bool valid() const { return (mask_[access_] & tap_bits_) == tap_bits_; }

  CUTLASS_DEVICE AccessType const* get() const { return reinterpret_cast<AccessType const*>(pointer_[access_]); }

  // The next tap; after the last one, the first tap of the next block of channels.
  CUTLASS_DEVICE void advance() {
    int next = 0;
    if (++s_ == size_.S) {
      s_ = 0;
      next = 1;
      if (++r_ == size_.R) {
        r_ = 0;
        next = 2;
        if (++t_ == size_.T) {
          t_ = 0;
          next = 3;
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) pointer_[i] += params_.inc_next[next];
    if (next == 3) {
      channel_ += params_.filter_k_delta;
      if (channel_ >= size_.K) clear();
    }
    select_tap();
  }

 private:
  static constexpr int kRows = ThreadMap::Iterations::kStrided;

  CUTLASS_DEVICE void clear() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) mask_[i] = 0;
  }

  CUTLASS_DEVICE void select_tap() { tap_bits_ = 1u << t_ | 1u << (kMaskH + r_) | 1u << (kMaskW + s_); }

  Params const& params_;
  ConvProblemSize const& size_;
  char const* pointer_[kRows];
  uint32_t mask_[kRows];
  uint32_t tap_bits_;
  int t_ = 0, r_ = 0, s_ = 0;
  int channel_;
  int access_ = 0;
};

}  // namespace convt3d::sm80
