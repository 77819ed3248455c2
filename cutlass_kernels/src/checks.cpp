// SPDX-License-Identifier: Apache-2.0
#include "checks.hpp"

#include <algorithm>
#include <cinttypes>

namespace convt3d::checks {

Status at_least(char const* name, int64_t value, int64_t minimum, Message& message) {
  if (value >= minimum) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT, "%s must be at least %" PRId64 ", but is %" PRId64, name, minimum,
                      value);
}

Status at_least(char const* name, int64_t const (&value)[3], int64_t minimum, Message& message) {
  if (std::all_of(value, value + 3, [=](int64_t v) { return v >= minimum; })) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT,
                      "%s must be at least %" PRId64 " in every dimension, but is (%" PRId64 ", %" PRId64 ", %" PRId64
                      ")",
                      name, minimum, value[0], value[1], value[2]);
}

Status within(char const* name, int64_t value, int64_t count, Message& message) {
  if (value >= 0 && value < count) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT, "%s must be in 0..%" PRId64 ", but is %" PRId64, name, count - 1,
                      value);
}

Status power_of_two_alignment(char const* name, int32_t value, int element, Message& message) {
  bool const power_of_two = value >= 1 && value <= 16 && (value & (value - 1)) == 0;
  if (power_of_two && value >= element) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT,
                      "%s must be a power of two from %d (the element size) to 16, but is %" PRId32, name, element,
                      value);
}

Status addressable(char const* name, Size5 const& shape, int64_t const (&stride)[5], char const* const (&dimension)[5],
                   int element, Message& message) {
  int64_t count = 1;
  int64_t last = 0;
  bool fits = true;
  bool const empty = std::any_of(shape.v, shape.v + 5, [](int64_t size) { return size == 0; });
  for (int axis = 0; axis < 5; ++axis) {
    if (stride[axis] < 0) {
      return message.fail(CONVT3D_INVALID_ARGUMENT, "%s_stride must not be negative, but is %" PRId64 " along %s", name,
                          stride[axis], dimension[axis]);
    }
    if (empty) continue;
    int64_t reach = 0;
    fits = fits && multiply(count, shape[axis], &count);
    fits = fits && multiply(shape[axis] - 1, stride[axis], &reach) && add(last, reach, &last);
  }
  int64_t bytes = 0;
  fits = fits && multiply(count, element, &bytes) && add(last, 1, &last) && multiply(last, element, &bytes);
  if (fits) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT,
                      "%s of size (%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                      ") with its strides does not fit 64-bit byte offsets",
                      name, shape[0], shape[1], shape[2], shape[3], shape[4]);
}

Status not_broadcast(char const* name, Size5 const& shape, int64_t const (&stride)[5],
                     char const* const (&dimension)[5], Message& message) {
  for (int axis = 0; axis < 5; ++axis) {
    if (shape[axis] > 1 && stride[axis] == 0) {
      return message.fail(CONVT3D_INVALID_ARGUMENT, "%s_stride must not be 0 along %s, which has %" PRId64 " elements",
                          name, dimension[axis], shape[axis]);
    }
  }
  return CONVT3D_OK;
}

Status distinct_addresses(char const* name, Size5 const& shape, int64_t const (&stride)[5], Message& message) {
  int order[5] = {0, 1, 2, 3, 4};
  std::sort(order, order + 5, [&](int a, int b) { return stride[a] < stride[b]; });
  int64_t reach = 0;
  for (int axis : order) {
    if (shape[axis] <= 1) continue;
    if (stride[axis] <= reach) {
      return message.fail(CONVT3D_INVALID_ARGUMENT,
                          "%s_stride (%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                          ") may give two elements one address",
                          name, stride[0], stride[1], stride[2], stride[3], stride[4]);
    }
    reach += (shape[axis] - 1) * stride[axis];  // `addressable` has bounded the sum
  }
  return CONVT3D_OK;
}

Status check_pointer(char const* name, void const* pointer, int alignment, Message& message) {
  if (pointer == nullptr) return message.fail(CONVT3D_INVALID_ARGUMENT, "%s is a null pointer", name);
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment) != 0) {
    return message.fail(CONVT3D_INVALID_ARGUMENT, "%s at %p is not aligned to %d bytes", name, pointer, alignment);
  }
  return CONVT3D_OK;
}

}  // namespace convt3d::checks
