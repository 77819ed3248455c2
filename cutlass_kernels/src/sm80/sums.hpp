// SPDX-License-Identifier: Apache-2.0
//
// How many products tensor cores add up by themselves, and what their sums get back (docs/numerics.md): host
// arithmetic.
#pragma once

#include "sm80/limits.hpp"

namespace convt3d::sm80 {

/// Products that a tensor core may add up by itself: cut off instead of rounded, a sum of so many of one sign comes to
/// the bound of docs/numerics.md, and with the middle of what it may have lost given back stays below it. Longer ones
/// are made of shorter ones (configs.hpp).
constexpr int64_t kSumProducts = 256;
constexpr int64_t short_sum_products(Problem const& p) { return p.dtype == CONVT3D_BF16 ? 384 : kSumProducts; }

/// What a sum of so many products gets back, as a share of it. By 256 random products of one sign it loses 3 to 8 units
/// of 2^-22 where products have 22 bits, and 0 to 3 where they have 16, as in bf16 (docs/numerics.md).
constexpr float cut_share(Problem const& p, int64_t products) {
  if (uses_ieee(p) || 2 * products <= kSumProducts) return 0.f;
  int64_t const together = products <= kSumProducts ? products : short_sum_products(p);
  return (p.dtype == CONVT3D_BF16 ? 2.f : 4.f) / (1 << 30) * float(together);
}

}  // namespace convt3d::sm80
