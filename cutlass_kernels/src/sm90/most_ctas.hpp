// SPDX-License-Identifier: Apache-2.0
//
// How many CTAs a launch has.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace convt3d::sm90 {

/// For tests: on few CTAs a small problem, too, has several tiles for each, one in the buffers of the one before.
inline std::atomic<int> most_ctas{INT_MAX};

/// For so many pieces of work, of which each of `classes` CTAs at least must have its own.
inline int cta_count(int64_t pieces, int multiprocessors, int classes = 1) {
  int const most = std::max(most_ctas.load(std::memory_order_relaxed), classes);
  return static_cast<int>(std::min({pieces, int64_t{multiprocessors}, int64_t{most}}));
}

}  // namespace convt3d::sm90
