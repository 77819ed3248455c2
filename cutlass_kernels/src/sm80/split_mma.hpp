// SPDX-License-Identifier: Apache-2.0
//
// CUTLASS's warp-level 3xTF32 product with operands split by split.hpp. Its own split cuts the high part towards zero.
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/array.h"
#include "cutlass/gemm/warp/mma_tensor_op_fast_f32.h"
#include "sm80/split.hpp"

namespace convt3d::sm80 {

template <class FastF32>
struct NearestSplitMma : FastF32 {
  using typename FastF32::FragmentA;
  using typename FastF32::FragmentB;
  using typename FastF32::TransformedFragmentA;
  using typename FastF32::TransformedFragmentB;

  CUTLASS_DEVICE void transform(TransformedFragmentA& out_a, TransformedFragmentB& out_b, FragmentA const& a,
                                FragmentB const& b) const {
    split(out_a, a);
    split(out_b, b);
  }

 private:
  // High parts first, then the low ones: the order in which FastF32 takes them.
  template <class Parts, class Fragment>
  CUTLASS_DEVICE static void split(Parts& parts, Fragment const& fragment) {
    using Part = typename Parts::Element;
    static_assert(Parts::kElements == 2 * Fragment::kElements, "two parts of each element");
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) {
      Tf32Split const at = split_for_tensor_core(fragment[i]);
      parts[i] = Part::bitcast(float_to_bits(at.high));
      parts[Fragment::kElements + i] = Part::bitcast(float_to_bits(at.low));
    }
  }
};

// The warp-level operator as CUTLASS chose it, but for that split.
template <class WarpMma, class Math>
struct SplitNearest {
  using Type = WarpMma;
};

template <class WarpMma>
struct SplitNearest<WarpMma, cutlass::arch::OpMultiplyAddFastF32> {
  using Type = NearestSplitMma<WarpMma>;
};

}  // namespace convt3d::sm80
