// SPDX-License-Identifier: Apache-2.0
//
// What the kernel reads: x and the weight as they lie, or copies in the workspace, channels last. Host code, tested on
// the CPU.
#pragma once

#include "prepare/copies.hpp"
#include "sm90/product/boxes.hpp"
#include "sm90/product/rows.hpp"

namespace convt3d::sm90::product {

struct Operands {
  Problem p;  // with the strides of what is read
  bool copies_x, copies_weight;
  int64_t tap_columns;  // of the weight, one for each output channel and in a copy some without one

  constexpr bool in_rows() const { return takes_rows(p); }
  constexpr bool in_boxes() const { return takes_boxes(p, tap_columns); }
  constexpr bool is_padded() const { return tap_columns != p.out_channels; }
  /// Whether a thread moves pairs of channels (has_pairs).
  constexpr bool moves_pairs() const { return has_pairs(p) && !is_padded(); }
};

/// Input channels of the copies.
constexpr int64_t copied_channels(Problem const& p) {
  return prepare::padded_channels(p.in_channels, element_bytes(p));
}

/// Columns of a tap in the copy of the weight: whole accesses of 128 bytes.
constexpr int64_t copied_columns(Problem const& p) { return round_up(p.out_channels, 128 / element_bytes(p)); }

/// With as few copies as do, the weight's rather than that of x.
constexpr Operands operands(Problem const& p) {
  int64_t const weight = copied_channels(p) * copied_columns(p) * tap_count(p);
  bool const large = element_count(x_shape(p)) > kMostReach || weight > kMostReach;  // the pre-pass counts in 32 bits
  for (int copies = 0; copies < (large ? 1 : 8); ++copies) {
    Operands of{p, copies / 2 % 2 != 0, copies % 2 != 0, p.out_channels};
    if (copies / 4 != 0) {
      if (!of.copies_weight) continue;
      of.tap_columns = copied_columns(p);
    }
    Size5 const of_weight = prepare::packed_stride(weight_shape(p), p.out_channels);
    Size5 const of_x = prepare::packed_stride(x_shape(p), copied_channels(p));
    for (int axis = 0; axis < 5; ++axis) {
      if (of.copies_weight) of.p.weight_stride[axis] = of_weight[axis];
      if (of.copies_x) of.p.x_stride[axis] = of_x[axis];
    }
    if (of.copies_x) of.p.x_alignment = 16;
    if (of.in_rows() || of.in_boxes()) return of;
  }
  return {p, false, false, p.out_channels};
}

constexpr bool takes(Problem const& p) {
  Operands const of = operands(p);
  return of.in_rows() || of.in_boxes();
}

/// The workspace: a copy of the weight, for one that does not start at a multiple of 16 bytes, too; behind it that of
/// x.
constexpr size_t weight_copy_bytes(Problem const& p) {
  return static_cast<size_t>(copied_channels(p) * copied_columns(p) * tap_count(p) * element_bytes(p));
}
constexpr size_t x_copy_offset(Problem const& p) { return round_up(weight_copy_bytes(p), 128); }
constexpr size_t workspace_bytes(Problem const& p) {
  if (!operands(p).copies_x) return weight_copy_bytes(p);
  int64_t const voxels = p.batch * p.in_size[0] * p.in_size[1] * p.in_size[2];
  return x_copy_offset(p) + static_cast<size_t>(voxels * copied_channels(p) * element_bytes(p));
}

}  // namespace convt3d::sm90::product
