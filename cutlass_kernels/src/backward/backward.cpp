// SPDX-License-Identifier: Apache-2.0
#include "backward/backward.hpp"

#include <algorithm>

#include "checks.hpp"

#if CONVT3D_WITH_CUDA
#include "backward/launch.hpp"
#endif

namespace convt3d::backward {

using namespace checks;

namespace {

int element_of(Description const& d) { return d.dtype == CONVT3D_F32 ? 4 : 2; }

bool has_t(Description const& d) { return d.activation != CONVT3D_ACT_NONE; }

Size5 shape_of(Description const& d) {
  Size5 shape;
  std::copy(d.size, d.size + 5, shape.v);
  return shape;
}

Status check_choices(Description const& d, Message& message) {
  Status status = within("dtype", d.dtype, CONVT3D_BF16 + 1, message);
  if (status == CONVT3D_OK) status = within("activation", d.activation, CONVT3D_ACT_COUNT, message);
  if (status == CONVT3D_OK) status = within("has_grad_pre", d.has_grad_pre, 2, message);
  if (status == CONVT3D_OK) status = within("has_grad_pre_ndhwc", d.has_grad_pre_ndhwc, 2, message);
  if (status == CONVT3D_OK) status = within("has_grad_bias", d.has_grad_bias, 2, message);
  return status;
}

Status check_memory(Description const& d, Message& message) {
  int const element = element_of(d);
  Size5 const shape = shape_of(d);
  auto const check = [&](char const* name, int64_t const(&stride)[5], char const* alignment_name, int32_t alignment) {
    Status const status = addressable(name, shape, stride, kDimension, element, message);
    return status == CONVT3D_OK ? power_of_two_alignment(alignment_name, alignment, element, message) : status;
  };
  Status status = check("grad_output", d.grad_output_stride, "grad_output_alignment", d.grad_output_alignment);
  if (status == CONVT3D_OK && has_t(d)) status = check("t", d.t_stride, "t_alignment", d.t_alignment);
  if (status == CONVT3D_OK && d.has_grad_pre) {
    status = check("grad_pre", d.grad_pre_stride, "grad_pre_alignment", d.grad_pre_alignment);
    if (status == CONVT3D_OK && element_count(shape) > 0) {
      status = not_broadcast("grad_pre", shape, d.grad_pre_stride, kDimension, message);
      if (status == CONVT3D_OK) status = distinct_addresses("grad_pre", shape, d.grad_pre_stride, message);
    }
  }
  return status;
}

Status check_pointers(Description const& d, Tensors const& t, Message& message) {
  Status status = check_pointer("grad_output", t.grad_output, d.grad_output_alignment, message);
  if (status == CONVT3D_OK && has_t(d)) status = check_pointer("t", t.t, d.t_alignment, message);
  if (status == CONVT3D_OK && d.has_grad_pre) {
    status = check_pointer("grad_pre", t.grad_pre, d.grad_pre_alignment, message);
    // The plain mistake alone, as in convt3d_forward: views may interleave without sharing an element.
    Size5 const shape = shape_of(d);
    auto const shifted = [&](void const* input, int64_t const* stride) {
      auto const own = effective_stride(shape, d.grad_pre_stride), other = effective_stride(shape, stride);
      return t.grad_pre == input && !std::equal(own.v, own.v + 5, other.v);
    };
    if (status == CONVT3D_OK &&
        (shifted(t.grad_output, d.grad_output_stride) || (has_t(d) && shifted(t.t, d.t_stride)))) {
      status = message.fail(CONVT3D_INVALID_ARGUMENT,
                            "grad_pre starts at the address of an input of other strides; it must not overlap it");
    }
  }
  if (status == CONVT3D_OK && d.has_grad_pre_ndhwc) {
    status = check_pointer("grad_pre_ndhwc", t.grad_pre_ndhwc, kAccessBytes, message);
    bool const shared = t.grad_pre_ndhwc == t.grad_output || (has_t(d) && t.grad_pre_ndhwc == t.t) ||
                        (d.has_grad_pre && t.grad_pre_ndhwc == t.grad_pre);
    if (status == CONVT3D_OK && shared) {
      status = message.fail(CONVT3D_INVALID_ARGUMENT,
                            "grad_pre_ndhwc starts at the address of another tensor; it must not overlap any");
    }
  }
  if (status == CONVT3D_OK && d.has_grad_bias) status = check_pointer("grad_bias", t.grad_bias, 4, message);
  return status;
}

}  // namespace

Status validate(Description const& d, Message& message) {
  for (int axis = 0; axis < 5; ++axis) {
    if (d.size[axis] < 0) {
      return message.fail(CONVT3D_INVALID_ARGUMENT, "size must not be negative, but is %lld along %s",
                          static_cast<long long>(d.size[axis]), kDimension[axis]);
    }
  }
  Status status = check_choices(d, message);
  if (status == CONVT3D_OK) status = check_memory(d, message);
  if (status == CONVT3D_OK && d.has_grad_pre_ndhwc && element_count(shape_of(d)) > 0 && !turnable(d)) {
    return message.fail(CONVT3D_NOT_SUPPORTED,
                        "grad_pre_ndhwc: grad_output, t and grad_pre must be rows along W, 16-byte aligned, and "
                        "channels and D * H * W whole 16-byte accesses");
  }
  return status;
}

size_t workspace_bytes(Description const& d) {
  return element_count(shape_of(d)) == 0 ? 0 : make_plan(d).workspace_bytes;
}

#if CONVT3D_WITH_CUDA

namespace {

Status launch_all(Description const& d, Tensors const& t, Plan& plan, cudaStream_t stream, Message& message) {
  Params& p = plan.params;
  p.grad_output.data = const_cast<void*>(t.grad_output);
  p.t.data = has_t(d) ? const_cast<void*>(t.t) : nullptr;
  p.grad_pre.data = d.has_grad_pre ? t.grad_pre : nullptr;
  p.grad_pre_ndhwc = d.has_grad_pre_ndhwc ? t.grad_pre_ndhwc : nullptr;
  p.partial = d.has_grad_bias ? static_cast<float*>(t.workspace) : nullptr;
  cudaError_t error = d.dtype == CONVT3D_F32   ? launch_f32(plan, stream)
                      : d.dtype == CONVT3D_F16 ? launch_f16(plan, stream)
                                               : launch_bf16(plan, stream);
  if (error == cudaSuccess && d.has_grad_bias) {
    error = launch_sum_partials(p.partial, p.channels, p.partials, t.grad_bias, stream);
  }
  if (error == cudaSuccess) return CONVT3D_OK;
  cudaGetLastError();  // reported here; the next call must not find it
  return message.fail(CONVT3D_CUDA_ERROR, "the backward kernel did not launch: %s", cudaGetErrorString(error));
}

}  // namespace

Status run(Description const& d, Tensors const& t, void* stream, Message& message) {
  if (element_count(shape_of(d)) == 0) {
    if (!d.has_grad_bias || d.size[1] == 0) return CONVT3D_OK;
    Status const status = check_pointer("grad_bias", t.grad_bias, 4, message);
    if (status != CONVT3D_OK) return status;
    cudaError_t const error = cudaMemsetAsync(t.grad_bias, 0, static_cast<size_t>(d.size[1]) * sizeof(float),
                                              static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return CONVT3D_OK;
    cudaGetLastError();
    return message.fail(CONVT3D_CUDA_ERROR, "grad_bias was not cleared: %s", cudaGetErrorString(error));
  }
  Status status = check_pointers(d, t, message);
  if (status != CONVT3D_OK || !(d.has_grad_pre || d.has_grad_pre_ndhwc || d.has_grad_bias)) return status;
  Plan plan = make_plan(d);
  if (t.workspace_bytes < plan.workspace_bytes) {
    return message.fail(CONVT3D_WORKSPACE_TOO_SMALL, "workspace_bytes is %zu, but %zu are needed", t.workspace_bytes,
                        plan.workspace_bytes);
  }
  if (plan.workspace_bytes > 0) status = check_pointer("workspace", t.workspace, kWorkspaceAlignment, message);
  if (status != CONVT3D_OK) return status;
  return launch_all(d, t, plan, static_cast<cudaStream_t>(stream), message);
}

#else

Status run(Description const& d, Tensors const& t, void*, Message& message) {
  Status const status = element_count(shape_of(d)) == 0 ? CONVT3D_OK : check_pointers(d, t, message);
  if (status != CONVT3D_OK) return status;
  return message.fail(CONVT3D_NOT_SUPPORTED, "this library was built without CUDA");
}

#endif

}  // namespace convt3d::backward
