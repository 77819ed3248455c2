// SPDX-License-Identifier: Apache-2.0
//
// Validation of a problem description. Everything a caller can get wrong is refused here, once, with the name
// and the value of the argument; the kernels assume a valid description. All arithmetic is overflow-checked:
// the sizes come from outside and may be anything.
#include "validate.hpp"

#include <algorithm>
#include <cinttypes>

#include "checks.hpp"

namespace convt3d {

using namespace checks;

namespace {

constexpr char const* kAxis[3] = {"D", "H", "W"};
constexpr char const* kWeightDimension[5] = {"Cin", "Cout", "kD", "kH", "kW"};

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
