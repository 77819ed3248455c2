// SPDX-License-Identifier: Apache-2.0
//
// What an eager call decides before it reaches the library. Plain C++, tested without torch against what the Python
// package says of the same (tests/cpp/test_eager_rules.cpp).
#pragma once

#include <cstdint>
#include <cstring>

namespace convt3d::binding {

/// What an eager call says beside its tensors, as python/convt3d/_native.py writes it into a tensor of kSettings int64.
struct Settings {
  int64_t stride[3], padding[3], output_padding[3], dilation[3];  // (D, H, W)
  int64_t groups;
  int64_t activation, add_order, precision;  // by the codes of convt3d.h
  double negative_slope;                     // its bits
};
constexpr int64_t kSettings = 17;
static_assert(sizeof(Settings) == kSettings * sizeof(int64_t), "64 bits each");

inline Settings read_settings(void const* data) {
  Settings settings;
  std::memcpy(&settings, data, sizeof settings);
  return settings;
}

/// The code of `name`, the value of CONVT3D_KERNEL (null: not set); -1 where the call is not for the library: "aten",
/// or a name that Python then refuses.
inline int64_t requested_kernel(char const* name) {
  if (name == nullptr || *name == 0 || std::strcmp(name, "auto") == 0) return 0;
  if (std::strcmp(name, "sm80") == 0) return 1;
  if (std::strcmp(name, "sm90") == 0) return 2;
  return -1;
}

/// Whether torch's suggest_memory_format says channels_last_3d of a 5-D tensor; python/convt3d/_memory_format.py has
/// the rule.
inline bool suggests_channels_last(int64_t const* shape, int64_t const* stride) {
  if (stride[1] == 0) return false;
  int64_t extent = 0;
  for (int dim : {1, 4, 3, 2, 0}) {
    if (shape[dim] == 0 || stride[dim] < extent) return false;
    if (dim == 0 && extent == stride[1]) return false;
    extent = stride[dim];
    if (shape[dim] > 1) extent *= shape[dim];
  }
  return true;
}

}  // namespace convt3d::binding
