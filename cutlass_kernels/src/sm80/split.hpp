// SPDX-License-Identifier: Apache-2.0
//
// The two parts of an fp32 operand in three-product (3xTF32) arithmetic, as cheap as the mainloop needs them: it splits
// every fragment that it loads, and is bound by instruction issue.
#pragma once

#include "convt3d/numerics.hpp"

namespace convt3d::sm80 {

/// high: `value` rounded to TF32, to nearest. low: the exact rest, at most 2^-11 of it, whose 12 bits the tensor core
/// cuts to 11. So the dropped product of two low parts is at most 2^-22 of the product, and of either sign; high parts
/// cut towards zero make it four times that, and always of the sign of the product.
///
/// The last half unit before infinity rounds to infinity, with the opposite infinity for the rest, and an infinity has
/// nan for the rest: sums come out nan and are computed anew by plain fp32 arithmetic (tail.hpp). A nan may have any
/// high part; its rest is nan.
CONVT3D_HOST_DEVICE Tf32Split split_for_tensor_core(float value) {
  float const high = bits_to_float((float_to_bits(value) + 0x1000u) & 0xffffe000u);
  return {high, value - high};
}

}  // namespace convt3d::sm80
