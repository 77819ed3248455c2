// SPDX-License-Identifier: Apache-2.0
//
// Sums of products of one sign: what the tensor cores take from them, and what makes up for it.
//
// The products of an instruction and its accumulator are aligned to the largest of them and cut off two bits below
// fp32's last, the sum at fp32's. A sum that only grows loses by that in each step, in all about in proportion to
// itself and to the number of its products, and much the same for all operands with full mantissas (docs/numerics.md).
// In 16-bit types sums are therefore multiplied by 1 plus more than half of that: up to 256 products of fp16 and 512 of
// bf16, what is left of the loss, and what a sum gains that has lost nothing (of operands with few digits), are both
// within the bound. In fp32 the gain would show, where sums of integers should be exact: there a thread multiplies its
// sums only if they do not all fit 16 bits (multiply.hpp), and in the kernel whose sums are not short otherwise.
#pragma once

#include "sm90/geometry.hpp"

namespace convt3d::sm90 {

/// Products of an output of these parities.
constexpr int64_t products_of(Problem const& p, int d, int h, int w) {
  return p.in_channels * live_taps(d, p.kernel[0], p.padding[0]) * live_taps(h, p.kernel[1], p.padding[1]) *
         live_taps(w, p.kernel[2], p.padding[2]);
}

/// What to multiply a sum of `products` in one accumulator by. A model of the tensor core gives a loss of 1.25 and 0.81
/// units of 2^-20, which is the bound, for 256 products of fp16 and 512 of bf16, which are shorter; in tf32 mode, with
/// twice that bound, 1.09 of it for 256.
constexpr float loss_factor(int32_t dtype, int64_t products) {
  double const most = dtype == CONVT3D_F16 ? 0.875 : dtype == CONVT3D_BF16 ? 0.5 : 1.0;
  double const share = static_cast<double>(products) / (dtype == CONVT3D_BF16 ? 512 : 256);
  return static_cast<float>(1 + most * (share < 1 ? share : 1) / (1 << 20));
}

}  // namespace convt3d::sm90
