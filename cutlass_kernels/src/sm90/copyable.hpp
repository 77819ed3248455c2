// SPDX-License-Identifier: Apache-2.0
//
// What the copy engine can address of y and of a full-size add: neighbours along W (NCDHW) or C (NDHWC), everything
// else in steps of 16 bytes.
#pragma once

#include "sm90/geometry.hpp"

namespace convt3d::sm90 {

constexpr bool copyable(Problem const& p, int64_t const* stride, int alignment) {
  Form const f = form(p);
  Size5 const shape = y_shape(p);
  int const fast = f.channels_last ? 1 : 4;
  if (alignment < 16 || stride[fast] != 1) return false;
  for (int axis = 0; axis < 5; ++axis) {
    if (axis == fast || shape[axis] == 1) continue;
    if (stride[axis] <= 0 || stride[axis] % f.vector() != 0 || stride[axis] >= (int64_t{1} << 34)) return false;
  }
  return true;
}

}  // namespace convt3d::sm90
