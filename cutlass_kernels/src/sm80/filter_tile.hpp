// SPDX-License-Identifier: Apache-2.0
//
// Filter tiles of 48 output channels for each warp, 96 or 48 in all. CUTLASS has shared-memory layouts of the filter
// for multiples of 64 channels (16-bit) or 32, and warp tiles that fill these. Here a warp finds its 48 channels where
// it would find 64, and a quarter of that shared memory stays empty.
#pragma once

#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/conv/threadblock/conv3d_params.h"
#include "cutlass/gemm/warp/default_mma_tensor_op.h"
#include "cutlass/layout/tensor.h"
#include "cutlass/matrix_shape.h"

namespace convt3d::sm80 {

constexpr int kWarpChannels = 48, kWarpRoom = 64;

/// Whether a tile of so many output channels is one of these.
constexpr bool is_spaced(int channels) { return channels % kWarpRoom != 0 && channels % kWarpChannels == 0; }
constexpr int with_room(int channels) { return channels / kWarpChannels * kWarpRoom; }

/// K rows of so many channels, as accesses of 16 bytes: thread `t` has accesses t, t + kThreads, ... in row-major
/// order.
template <class Element_, int kRows_, int kChannels_, int kThreads_>
struct FilterTile {
  using Element = Element_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRows = kRows_;
  static constexpr int kChannels = kChannels_;
  static constexpr int kElementsPerAccess = 16 / int(sizeof(Element));
  static constexpr int kPerRow = kChannels / kElementsPerAccess;
  static_assert(kRows * kPerRow % kThreads == 0, "the same for all threads");
  struct Iterations {
    static constexpr int kCount = kRows * kPerRow / kThreads;
  };

  CUTLASS_DEVICE static int row(int thread, int access) { return (thread + access * kThreads) / kPerRow; }
  CUTLASS_DEVICE static int channel(int thread, int access) {
    return (thread + access * kThreads) % kPerRow * kElementsPerAccess;
  }
};

/// Operand B of the implicit GEMM from a KTRSC filter, in the order of CUTLASS's optimized dgrad iterator.
template <class Tile>
class FilterIterator {
 public:
  using ThreadMap = Tile;
  using Element = typename Tile::Element;
  using Layout = cutlass::layout::TensorNDHWC;
  using AccessType = cutlass::AlignedArray<Element, Tile::kElementsPerAccess>;
  static constexpr int kAccessesPerVector = 1;

  struct Params {
    int taps, channels;
    int64_t next_tap, next_rows;  // in bytes; the latter back to the first tap, too
    int64_t row_stride;           // in elements

    Params() = default;
    Params(cutlass::conv::Conv3dProblemSize const& size, Layout const& layout)
        : taps(size.T * size.R * size.S), channels(size.C), row_stride(layout.stride()[3]) {
      next_tap = int64_t(layout.stride()[0]) * int(sizeof(Element));
      next_rows = Tile::kRows * row_stride * int(sizeof(Element)) - (taps - 1) * next_tap;
    }
  };

  CUTLASS_DEVICE FilterIterator(Params const& params, cutlass::conv::Conv3dProblemSize const& size,
                                Element const* filter, int thread, cutlass::MatrixCoord begin)
      : params_(params), rows_(size.K) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Tile::Iterations::kCount; ++i) {
      int const channel = begin.column() + Tile::channel(thread, i);
      row_[i] = channel < params.channels ? Tile::row(thread, i) : 1 << 30;
      pointer_[i] = reinterpret_cast<char const*>(filter + Tile::row(thread, i) * params.row_stride + channel);
    }
  }

  CUTLASS_DEVICE void set_iteration_index(int index) { access_ = index; }
  CUTLASS_DEVICE FilterIterator& operator++() {
    ++access_;
    return *this;
  }
  CUTLASS_DEVICE bool valid() const { return row_[access_] < rows_; }
  CUTLASS_DEVICE AccessType const* get() const { return reinterpret_cast<AccessType const*>(pointer_[access_]); }

  CUTLASS_DEVICE void advance() {
    bool const last = ++tap_ == params_.taps;
    int64_t const step = last ? params_.next_rows : params_.next_tap;
    if (last) {
      tap_ = 0;
      rows_ -= Tile::kRows;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Tile::Iterations::kCount; ++i) pointer_[i] += step;
  }

 private:
  Params const& params_;
  char const* pointer_[Tile::Iterations::kCount];
  int row_[Tile::Iterations::kCount];
  int rows_;  // left
  int tap_ = 0;
  int access_ = 0;
};

/// Where those accesses go in shared memory. `SmemLayout`: CUTLASS's, with room.
template <class Tile, class SmemLayout>
class FilterStore {
 public:
  using Element = typename Tile::Element;
  using AccessType = cutlass::AlignedArray<Element, Tile::kElementsPerAccess>;
  using TensorRef = cutlass::TensorRef<Element, SmemLayout>;

  CUTLASS_DEVICE FilterStore(TensorRef ref, int thread) : stage_(ref.stride(0) * Tile::kRows) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Tile::Iterations::kCount; ++i) {
      int const channel = Tile::channel(thread, i);
      int const place = channel % kWarpChannels + channel / kWarpChannels * kWarpRoom;
      place_[i] = ref.data() + ref.offset({Tile::row(thread, i), place});
    }
  }

  CUTLASS_DEVICE void set_iteration_index(int index) { access_ = index; }
  CUTLASS_DEVICE FilterStore& operator++() {
    ++access_;
    return *this;
  }
  CUTLASS_DEVICE AccessType* get() const { return reinterpret_cast<AccessType*>(place_[access_] + offset_); }
  CUTLASS_DEVICE void add_tile_offset(cutlass::MatrixCoord tiles) { offset_ += tiles.row() * stage_; }

 private:
  Element* place_[Tile::Iterations::kCount];
  int stage_, offset_ = 0;
  int access_ = 0;
};

/// A warp-level product whose filter fragments lie further apart than its tiles are wide.
template <class WarpMma>
struct SpacedMma : WarpMma {
  struct IteratorB : WarpMma::IteratorB {
    using Base = typename WarpMma::IteratorB;
    using Base::Base;
    CUTLASS_DEVICE IteratorB& add_tile_offset(cutlass::MatrixCoord const& tiles) {
      Base::add_tile_offset(tiles);
      Base::add_pointer_offset(tiles.column() * (kWarpRoom - kWarpChannels));
      return *this;
    }
  };
};

}  // namespace convt3d::sm80
