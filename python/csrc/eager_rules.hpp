// SPDX-License-Identifier: Apache-2.0
//
// What an eager call decides before it reaches the library. Plain C++, tested without torch against what the Python
// package says of the same (tests/cpp/test_eager_rules.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace convt3d::binding {

constexpr int kBits = 20;  // of each of the three numbers in a packed triple

/// (D, H, W) from one number: D in the lowest bits. Python packs only what fits.
inline std::vector<int64_t> unpack(int64_t packed) {
  constexpr int64_t kMask = (int64_t{1} << kBits) - 1;
  return {packed & kMask, packed >> kBits & kMask, packed >> (2 * kBits) & kMask};
}

// Options: activation + 256 * add_order + 512 * precision, by the codes of convt3d.h.
constexpr int64_t activation(int64_t options) { return options & 255; }
constexpr int64_t add_order(int64_t options) { return options >> 8 & 1; }
constexpr int64_t precision(int64_t options) { return options >> 9 & 1; }

/// The code of `name`, the value of CONVT3D_KERNEL (null: not set); -1 where the call is not for the library: "aten",
/// or a name that Python then refuses.
inline int64_t requested_kernel(char const* name) {
  if (name == nullptr || *name == 0 || std::strcmp(name, "auto") == 0) return 0;
  if (std::strcmp(name, "sm80") == 0) return 1;
  if (std::strcmp(name, "sm90") == 0) return 2;
  return -1;
}

/// Shape and strides of a 5-D tensor, (N, C, D, H, W).
struct Dense {
  int64_t shape[5];
  int64_t stride[5];
};

template <class Tensor>
Dense dense(Tensor const& tensor) {
  Dense d{};
  for (int dim = 0; dim < 5; ++dim) {
    d.shape[dim] = tensor.size(dim);
    d.stride[dim] = tensor.stride(dim);
  }
  return d;
}

/// Whether torch's suggest_memory_format says channels_last_3d; python/convt3d/_memory_format.py has the rule.
inline bool suggests_channels_last(Dense const& t) {
  if (t.stride[1] == 0) return false;
  int64_t extent = 0;
  for (int dim : {1, 4, 3, 2, 0}) {
    if (t.shape[dim] == 0 || t.stride[dim] < extent) return false;
    if (dim == 0 && extent == t.stride[1]) return false;
    extent = t.stride[dim];
    if (t.shape[dim] > 1) extent *= t.shape[dim];
  }
  return true;
}

}  // namespace convt3d::binding
