// SPDX-License-Identifier: Apache-2.0
//
// Validation of a problem description. Everything a caller can get wrong is refused here, once, with the name
// and the value of the argument; the kernels assume a valid description. All arithmetic is overflow-checked:
// the sizes come from outside and may be anything.
#include "validate.hpp"

#include <algorithm>
#include <cinttypes>

namespace convt3d {
namespace {

constexpr char const* kAxis[3] = {"D", "H", "W"};
constexpr char const* kDimension[5] = {"N", "C", "D", "H", "W"};
constexpr char const* kWeightDimension[5] = {"Cin", "Cout", "kD", "kH", "kW"};

bool multiply(int64_t a, int64_t b, int64_t* result) { return !__builtin_mul_overflow(a, b, result); }
bool add(int64_t a, int64_t b, int64_t* result) { return !__builtin_add_overflow(a, b, result); }

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

/// Strides are non-negative and the last byte's offset fits 64 bits.
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

/// No stride of 0 on a dimension that has several elements.
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

/// Distinct elements have distinct addresses. The test is sufficient: taken from the smallest stride up, each
/// stride steps over everything the smaller ones reach. Every slice of a dense tensor passes.
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

Status check_counts(Problem const& p, Message& message) {
  Status status = at_least("batch", p.batch, 0, message);
  if (status == CONVT3D_OK) status = at_least("in_channels", p.in_channels, 1, message);
  if (status == CONVT3D_OK) status = at_least("out_channels", p.out_channels, 1, message);
  if (status == CONVT3D_OK) status = at_least("groups", p.groups, 1, message);
  if (status != CONVT3D_OK) return status;
  if (p.in_channels % p.groups != 0) {
    return message.fail(CONVT3D_INVALID_ARGUMENT,
                        "groups must divide in_channels, but %" PRId64 " does not divide %" PRId64, p.groups,
                        p.in_channels);
  }
  if (p.out_channels % p.groups != 0) {
    return message.fail(CONVT3D_INVALID_ARGUMENT,
                        "groups must divide out_channels, but %" PRId64 " does not divide %" PRId64, p.groups,
                        p.out_channels);
  }
  return CONVT3D_OK;
}

Status check_choices(Problem const& p, Message& message) {
  Status status = within("dtype", p.dtype, CONVT3D_BF16 + 1, message);
  if (status == CONVT3D_OK) status = within("precision", p.precision, CONVT3D_TF32 + 1, message);
  if (status == CONVT3D_OK) status = within("activation", p.activation, CONVT3D_ACT_COUNT, message);
  if (status == CONVT3D_OK) status = within("add_order", p.add_order, CONVT3D_ADD_AFTER + 1, message);
  if (status == CONVT3D_OK) status = within("has_bias", p.has_bias, 2, message);
  if (status == CONVT3D_OK) status = within("has_add", p.has_add, 2, message);
  return status;
}

Status check_memory(Problem const& p, Message& message) {
  int const element = element_bytes(p);
  Status status = addressable("x", x_shape(p), p.x_stride, kDimension, element, message);
  if (status == CONVT3D_OK) {
    status = addressable("weight", weight_shape(p), p.weight_stride, kWeightDimension, element, message);
  }
  if (status == CONVT3D_OK)
    status = not_broadcast("weight", weight_shape(p), p.weight_stride, kWeightDimension, message);
  if (status == CONVT3D_OK) status = addressable("y", y_shape(p), p.y_stride, kDimension, element, message);
  if (status == CONVT3D_OK && element_count(y_shape(p)) > 0) {
    status = not_broadcast("y", y_shape(p), p.y_stride, kDimension, message);
    if (status == CONVT3D_OK) status = distinct_addresses("y", y_shape(p), p.y_stride, message);
  }
  if (status == CONVT3D_OK) status = power_of_two_alignment("x_alignment", p.x_alignment, element, message);
  if (status == CONVT3D_OK) status = power_of_two_alignment("y_alignment", p.y_alignment, element, message);
  if (status == CONVT3D_OK && p.has_add) {
    status = addressable("add", y_shape(p), p.add_stride, kDimension, element, message);
    if (status == CONVT3D_OK) status = power_of_two_alignment("add_alignment", p.add_alignment, element, message);
  }
  if (status == CONVT3D_OK && p.has_bias) {
    status = at_least("bias_stride", p.bias_stride, 0, message);
    int64_t reach = 0;
    if (status == CONVT3D_OK &&
        !(multiply(p.out_channels, p.bias_stride, &reach) && multiply(reach, element, &reach))) {
      return message.fail(CONVT3D_INVALID_ARGUMENT,
                          "bias_stride %" PRId64 " over %" PRId64 " channels does not fit 64-bit byte offsets",
                          p.bias_stride, p.out_channels);
    }
  }
  return status;
}

}  // namespace

Status checked_output_size(Problem const& p, int64_t out_size[3], Message& message) {
  Status status = at_least("in_size", p.in_size, 1, message);
  if (status == CONVT3D_OK) status = at_least("kernel", p.kernel, 1, message);
  if (status == CONVT3D_OK) status = at_least("stride", p.stride, 1, message);
  if (status == CONVT3D_OK) status = at_least("padding", p.padding, 0, message);
  if (status == CONVT3D_OK) status = at_least("output_padding", p.output_padding, 0, message);
  if (status == CONVT3D_OK) status = at_least("dilation", p.dilation, 1, message);
  if (status != CONVT3D_OK) return status;

  int64_t result[3];
  for (int axis = 0; axis < 3; ++axis) {
    int64_t const limit = std::max(p.stride[axis], p.dilation[axis]);
    if (p.output_padding[axis] >= limit) {
      return message.fail(CONVT3D_INVALID_ARGUMENT,
                          "output_padding must be smaller than stride or dilation, but along %s it is %" PRId64
                          " with stride %" PRId64 " and dilation %" PRId64,
                          kAxis[axis], p.output_padding[axis], p.stride[axis], p.dilation[axis]);
    }
    // Grouped so that every term a kernel computes (residue + padding, tap * dilation) is known to fit as well.
    int64_t spread = 0, reach = 0, crop = 0, offset = 0, size = 0;
    bool const fits = multiply(p.in_size[axis] - 1, p.stride[axis], &spread) &&
                      multiply(p.kernel[axis] - 1, p.dilation[axis], &reach) && multiply(p.padding[axis], 2, &crop) &&
                      add(p.stride[axis], crop, &offset) && add(reach, p.output_padding[axis], &size) &&
                      add(size, 1, &size) && add(size, spread, &size) && add(size, -crop, &size);
    if (!fits) {
      return message.fail(CONVT3D_INVALID_ARGUMENT,
                          "the output size along %s overflows 64 bits: in_size %" PRId64 ", kernel %" PRId64
                          ", stride %" PRId64 ", padding %" PRId64 ", output_padding %" PRId64 ", dilation %" PRId64,
                          kAxis[axis], p.in_size[axis], p.kernel[axis], p.stride[axis], p.padding[axis],
                          p.output_padding[axis], p.dilation[axis]);
    }
    if (size < 0) {
      return message.fail(CONVT3D_INVALID_ARGUMENT,
                          "the output size along %s is negative (%" PRId64 "): in_size %" PRId64 ", kernel %" PRId64
                          ", stride %" PRId64 ", padding %" PRId64 ", output_padding %" PRId64 ", dilation %" PRId64,
                          kAxis[axis], size, p.in_size[axis], p.kernel[axis], p.stride[axis], p.padding[axis],
                          p.output_padding[axis], p.dilation[axis]);
    }
    result[axis] = size;
  }
  std::copy(result, result + 3, out_size);
  return CONVT3D_OK;
}

Status validate(Problem const& p, Message& message) {
  int64_t out_size[3];
  Status status = check_counts(p, message);
  if (status == CONVT3D_OK) status = checked_output_size(p, out_size, message);
  if (status == CONVT3D_OK) status = check_choices(p, message);
  if (status == CONVT3D_OK) status = check_memory(p, message);
  return status;
}

}  // namespace convt3d
