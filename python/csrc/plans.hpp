// SPDX-License-Identifier: Apache-2.0
//
// The plans of a thread's latest calls. A plan follows from the problem, the kernel that is asked for and the device
// alone, so that a loop or a network, whose calls are the same in every pass, plans once.
#pragma once

#include <cstdint>
#include <cstring>

#include "convt3d/convt3d.h"

namespace convt3d::binding {

/// What a plan follows from, and the plan. Compared and kept as bytes: `problem` is set to zeros before it is filled.
struct Planned {
  convt3d_problem problem;
  int64_t kernel;
  int64_t device_index;
  convt3d_device device;
  convt3d_plan plan;
};

/// Not for several threads at once.
class Plans {
 public:
  static constexpr int kCount = 16;

  /// Null where it is not kept.
  Planned const* find(convt3d_problem const& problem, int64_t kernel, int64_t device_index) const {
    for (int i = 0; i < count_; ++i) {
      Planned const& known = kept_[i];
      if (known.kernel == kernel && known.device_index == device_index &&
          std::memcmp(&known.problem, &problem, sizeof problem) == 0) {
        return &known;
      }
    }
    return nullptr;
  }

  /// In the place of the oldest one, where there is no other.
  Planned const* keep(Planned const& planned) {
    Planned& place = kept_[next_];
    std::memcpy(&place, &planned, sizeof planned);
    next_ = (next_ + 1) % kCount;
    if (count_ < kCount) ++count_;
    return &place;
  }

 private:
  Planned kept_[kCount];
  int count_ = 0;
  int next_ = 0;
};

}  // namespace convt3d::binding
