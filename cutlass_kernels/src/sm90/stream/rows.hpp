// SPDX-License-Identifier: Apache-2.0
//
// How the streaming kernel moves add and y: by boxes of the copy engine where it can address them (it reads and writes
// from multiples of 16 bytes alone), otherwise by plain loads and stores of warps. Host code, constexpr.
#pragma once

#include "sm90/copyable.hpp"
#include "sm90/split.hpp"
#include "sm90/stream/geometry.hpp"

namespace convt3d::sm90::stream {

constexpr int kMostMaps = 4;

enum class Path : int32_t {
  kBoxes,
  kPlain2,  // plain.hpp, in accesses of 2 bytes
  kPlain4,  // of 4
  kShift4,  // add alone: of 4, the aligned words that a row of 16-bit elements lies in (shift.hpp)
};

/// Whether boxes describe the tiles: neighbouring outputs along W, a map for each residue of the row.
constexpr bool tiles_are_boxes(Problem const& p) {
  Size3 const out = output_size(p);
  int64_t const maps = form(p).channels_last ? p.stride[1] : 2 * p.stride[1];
  return output_step(p) == 2 && maps <= kMostMaps && out[1] >= maps && out[2] >= 2;
}

/// Plain accesses take two neighbouring outputs (NCDHW) or channels (NDHWC) of 16-bit types at a time where every one
/// of these pairs is aligned.
constexpr Path plain_path(Problem const& p, int64_t const* stride, int alignment) {
  if (element_bytes(p) == 4) return Path::kPlain4;
  Size5 const shape = y_shape(p);
  int const fast = form(p).channels_last ? 1 : 4;
  if (alignment < 4 || stride[fast] != 1 || output_step(p) % 2 != 0) return Path::kPlain2;
  for (int axis = 0; axis < 5; ++axis) {
    if (axis != fast && shape[axis] != 1 && stride[axis] % 2 != 0) return Path::kPlain2;
  }
  return Path::kPlain4;
}

/// Rows of a 16-bit add in NCDHW that start at any element: the words that they lie in, if the rows of a channel that a
/// tile reads all start in the same half of a word.
constexpr bool takes_words(Problem const& p, int64_t const* stride) {
  bool const alike = p.stride[1] * stride[3] % 2 == 0 || output_size(p)[1] == 1;
  return element_bytes(p) == 2 && !form(p).channels_last && stride[4] == 1 && output_step(p) == 2 && alike;
}

struct Paths {
  Path add, y;
};

constexpr Path choose_path(Problem const& p, int64_t const* stride, int alignment) {
  return tiles_are_boxes(p) && copyable(p, stride, alignment) ? Path::kBoxes : plain_path(p, stride, alignment);
}

constexpr Paths choose_paths(Problem const& p) {
  Size5 const add = effective_add_stride(p);
  // Otherwise its values come with the bias.
  bool const full_add = add[2] != 0 || add[3] != 0 || add[4] != 0;
  Paths path{full_add ? choose_path(p, add.v, p.add_alignment) : Path::kBoxes,
             choose_path(p, p.y_stride, p.y_alignment)};
  if (path.add == Path::kPlain2 && takes_words(p, add.v)) path.add = Path::kShift4;
  // In ieee mode the one warp that stores y loads add, where the consumers store.
  if (uses_split(p) && path.add != Path::kBoxes) path.y = plain_path(p, p.y_stride, p.y_alignment);
  return path;
}

}  // namespace convt3d::sm90::stream
