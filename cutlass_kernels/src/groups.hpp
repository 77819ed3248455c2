// SPDX-License-Identifier: Apache-2.0
//
// A problem with groups as one problem for each group: every tensor's part is a view.
#pragma once

#include "convt3d/problem.hpp"

namespace convt3d {

/// Groups that are run one after the other, at most. Each takes a launch or two.
constexpr int64_t kMaxGroupRuns = 32;

/// What `offset_elements`, and every multiple of it, leaves of an alignment in bytes.
constexpr int32_t offset_alignment(int32_t alignment, int64_t offset_elements, int element_bytes) {
  // Modulo 16 first, so that the product stays small.
  int64_t const offset = offset_elements % 16 * element_bytes;
  while (alignment > 1 && offset % alignment != 0) alignment /= 2;
  return alignment;
}

/// Distance of two groups' parts in elements.
struct GroupOffsets {
  int64_t x, weight, bias, add, y;
};

constexpr GroupOffsets group_offsets(Problem const& p) {
  int64_t const in = p.in_channels / p.groups, out = p.out_channels / p.groups;
  return {in * p.x_stride[1], in * p.weight_stride[0], p.has_bias ? out * p.bias_stride : 0,
          p.has_add ? out * p.add_stride[1] : 0, out * p.y_stride[1]};
}

/// The problem of any one group.
constexpr Problem one_group(Problem const& p) {
  GroupOffsets const offset = group_offsets(p);
  Problem part = p;
  part.groups = 1;
  part.in_channels = p.in_channels / p.groups;
  part.out_channels = p.out_channels / p.groups;
  int const bytes = element_bytes(p);
  part.x_alignment = offset_alignment(p.x_alignment, offset.x, bytes);
  part.add_alignment = offset_alignment(p.add_alignment, offset.add, bytes);
  part.y_alignment = offset_alignment(p.y_alignment, offset.y, bytes);
  return part;
}

/// The tensors of group `index`; all use one workspace, in the order of the stream.
inline convt3d_tensors group_tensors(Problem const& p, convt3d_tensors const& t, int64_t index) {
  GroupOffsets const offset = group_offsets(p);
  auto const part = [&](void const* base, int64_t elements) -> void const* {
    return base == nullptr ? nullptr : static_cast<char const*>(base) + index * elements * element_bytes(p);
  };
  convt3d_tensors result = t;
  result.x = part(t.x, offset.x);
  result.weight = part(t.weight, offset.weight);
  result.bias = part(t.bias, offset.bias);
  result.add = part(t.add, offset.add);
  result.y = static_cast<char*>(t.y) + index * offset.y * element_bytes(p);
  return result;
}

}  // namespace convt3d
