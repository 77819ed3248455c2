// SPDX-License-Identifier: Apache-2.0
//
// What the copy engine can address of y and of a full-size add: neighbours along W (NCDHW) or C (NDHWC), everything
// else in steps of 16 bytes.
#pragma once

#include "sm90/geometry.hpp"

namespace convt3d::sm90 {

/// Calls visit(whether it holds, which, value, limit) for every condition: 0 is the alignment, 1 the stride along the
/// fast axis, 2 another stride.
template <class Visit>
constexpr void visit_copyable(Problem const& p, int64_t const* stride, int alignment, Visit&& visit) {
  Form const f = form(p);
  Size5 const shape = y_shape(p);
  int const fast = f.channels_last ? 1 : 4;
  visit(alignment >= 16, 0, static_cast<int64_t>(alignment), "16 bytes");
  visit(stride[fast] == 1, 1, stride[fast], "1");
  for (int axis = 0; axis < 5; ++axis) {
    if (axis == fast || shape[axis] == 1) continue;
    bool const good = stride[axis] > 0 && stride[axis] % f.vector() == 0 && stride[axis] < (int64_t{1} << 34);
    visit(good, 2, stride[axis], f.element == 4 ? "positive multiples of 4" : "positive multiples of 8");
  }
}

constexpr bool copyable(Problem const& p, int64_t const* stride, int alignment) {
  bool all = true;
  visit_copyable(p, stride, alignment, [&](bool good, int, int64_t, char const*) { all = all && good; });
  return all;
}

}  // namespace convt3d::sm90
