// SPDX-License-Identifier: Apache-2.0
//
// Epilogue visitor for channels-last outputs, for CUTLASS's EpilogueWithVisitorCallbacks.
//
// CUTLASS's own aux load and store nodes address a matrix with one row stride. The output of a residue class is a
// strided sub-lattice of y, so this visitor looks every row's address up in a table that the kernel filled at its
// start, and does the whole tail: load add, add bias, activate, round once, store.
#pragma once

#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "cutlass/epilogue/threadblock/fusion/visitor_2x.hpp"
#include "sm80/tail.hpp"

namespace convt3d::sm80 {

template <class Mma, class Element, class ThreadMap>
struct NdhwcVisitor {
  static constexpr int kAccess = ThreadMap::kElementsPerAccess;
  static constexpr int kColumns = ThreadMap::Iterations::kColumn;
  static constexpr int kRows =
      ThreadMap::Iterations::kRow * ThreadMap::Iterations::kGroup * ThreadMap::Iterations::kCluster;
  static constexpr int kSteps = ThreadMap::Count::kRow * ThreadMap::Count::kGroup * ThreadMap::Count::kCluster;
  using Vector = cutlass::AlignedArray<Element, kAccess>;

  struct SharedStorage {};
  struct Arguments {};
  struct Params {};

  CUTLASS_DEVICE NdhwcVisitor(Params const&, SharedStorage&) {}

  struct Callbacks {
    TileContext<Mma> tile;
    cutlass::MatrixCoord thread_offset;
    bool saw_nan = false;
    float bias[kColumns][kAccess];                                    // a thread keeps its columns in every step
    cutlass::Array<Element, kAccess> add_fragment[kRows * kColumns];  // of the step at hand
    cutlass::Array<Element, kAccess> add_ahead[kRows * kColumns];     // of the next one, still on its way

    CUTLASS_DEVICE Callbacks(TileContext<Mma> const& context, int thread_idx)
        : tile(context), thread_offset(ThreadMap::initial_offset(thread_idx)) {}

    // Row of the tile that access `row_idx` of epilogue step `step` lands on (PredicatedTileIterator's order).
    CUTLASS_DEVICE int tile_row(int step, int row_idx) const {
      using Shape = typename ThreadMap::Shape;
      using Count = typename ThreadMap::Count;
      using Iterations = typename ThreadMap::Iterations;
      using Delta = typename ThreadMap::Delta;
      int const in_group = step % Count::kRow;
      int const group = step / Count::kRow;
      int const start = in_group * Shape::kRow + group * Shape::kGroup * Shape::kRow * Count::kRow;
      int const row = row_idx % Iterations::kRow;
      int const rest = row_idx / Iterations::kRow;
      return thread_offset.row() + start + row * Delta::kRow + (rest % Iterations::kGroup) * Delta::kGroup +
             (rest / Iterations::kGroup) * Delta::kCluster;
    }

    CUTLASS_DEVICE int column(int column_idx) const {
      return tile.column_begin + thread_offset.column() + column_idx * ThreadMap::Delta::kColumn;
    }

    CUTLASS_DEVICE void begin_epilogue() {
      TailParams const& tail = *tile.tail;
      auto const* source = static_cast<Element const*>(tail.bias);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns * kAccess; ++i) {
        int const channel = column(i / kAccess) + i % kAccess;
        bool const inside = source && channel < tail.channels;
        bias[i / kAccess][i % kAccess] = inside ? to_float(source[channel * tail.bias_stride]) : 0.f;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kColumns; ++i) add_ahead[i].fill(Element(0.f));
      load_add(0);
    }

    // The loads of add run one step ahead: a step alone is shorter than the way to L2.
    CUTLASS_DEVICE void begin_step(int step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kColumns; ++i) add_fragment[i] = add_ahead[i];
      if (step + 1 < kSteps) load_add(step + 1);
    }

    CUTLASS_DEVICE void load_add(int step) {
      TailParams const& tail = *tile.tail;
      if (!tail.add) return;
      auto const* add = static_cast<Element const*>(tail.add);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kColumns; ++i) {
        Row const& at = tile.rows[tile_row(step, i / kColumns)];
        int const channel = column(i % kColumns);
        if (!at.inside || channel >= tail.channels) continue;
        if (tail.vector_add) {
          add_ahead[i] = *reinterpret_cast<Vector const*>(add + at.add + channel);
        } else {
          load_elements(add_ahead[i], add + at.add, channel);
        }
      }
    }

    CUTLASS_DEVICE void load_elements(cutlass::Array<Element, kAccess>& fragment, Element const* add, int channel) {
      TailParams const& tail = *tile.tail;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kAccess; ++e) {
        if (channel + e < tail.channels) fragment[e] = add[(channel + e) * tail.add_channel_stride];
      }
    }

    CUTLASS_DEVICE void begin_row(int) {}

    template <class ElementAccumulator>
    CUTLASS_DEVICE void visit(int step, int row_idx, int column_idx, int fragment_idx,
                              cutlass::Array<ElementAccumulator, kAccess> const& accumulators) {
      TailParams const& tail = *tile.tail;
      Row const& at = tile.rows[tile_row(step, row_idx)];
      int const channel = column(column_idx);
      if (!at.inside || channel >= tail.channels) return;

      cutlass::NumericArrayConverter<float, Element, kAccess> widen;
      cutlass::NumericArrayConverter<Element, float, kAccess> round;
      cutlass::Array<float, kAccess> value = accumulators;
      cutlass::Array<float, kAccess> const addend = widen(add_fragment[fragment_idx]);
      apply_tail<kAccess>(tail, value, bias[column_idx], addend);

      // One test for the access: the sum is nan if a value is. (inf - inf makes it nan too: a needless second look.)
      float sum = value[0];
      CUTLASS_PRAGMA_UNROLL
      for (int e = 1; e < kAccess; ++e) sum += value[e];
      saw_nan |= sum != sum;

      cutlass::Array<Element, kAccess> const rounded = round(value);
      auto* y = static_cast<Element*>(tail.y) + at.y;
      if (tail.vector_y) {
        *reinterpret_cast<Vector*>(y + channel) = reinterpret_cast<Vector const&>(rounded);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kAccess; ++e) {
          if (channel + e < tail.channels) y[(channel + e) * tail.y_channel_stride] = rounded[e];
        }
      }
    }

    CUTLASS_DEVICE void end_row(int) {}
    CUTLASS_DEVICE void end_step(int) {}

    // A thread rereads only what it wrote itself, so no barrier is needed.
    CUTLASS_DEVICE void end_epilogue() {
      if (!saw_nan) return;
      TailParams const& tail = *tile.tail;
      auto const* y = static_cast<Element const*>(tail.y);
#pragma unroll 1
      for (int i = 0; i < kSteps * kRows * kColumns * kAccess; ++i) {
        int const access = i / kAccess;
        int const row = tile_row(access / (kRows * kColumns), access / kColumns % kRows);
        int const channel = column(access % kColumns) + i % kAccess;
        Row const& at = tile.rows[row];
        if (!at.inside || channel >= tail.channels) continue;
        float const stored = to_float(y[at.y + channel * tail.y_channel_stride]);
        if (stored != stored) {
          recompute_output<Mma, Element>(*tile.cls, tile.x, tail, tile.row_begin + row, channel);
        }
      }
    }
  };

  CUTLASS_DEVICE Callbacks get_callbacks(cutlass::gemm::GemmCoord, int thread_idx, TileContext<Mma> context) {
    return Callbacks(context, thread_idx);
  }
};

}  // namespace convt3d::sm80
