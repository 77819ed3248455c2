// SPDX-License-Identifier: Apache-2.0
//
//   convt3d_native::activation_backward_(Tensor grad_output, Tensor(a!)? t, Tensor(b!)? ndhwc, ...) -> Tensor?
//
// grad_output * act'(t) goes to t where `in_place` says so, and to `ndhwc`, a packed channels-last tensor, if it is
// there. The result holds each channel's sum of it in fp32, or nothing where no sums were asked for; it is none where
// the library does not take the call, and then nothing was written. Without t the activation is none.
#include <algorithm>

#include "convt3d/convt3d_backward.h"
#include "support.hpp"

namespace {

using namespace convt3d_torch;

bool same_tensor_type(Tensor const& a, Tensor const& b) {
  if (b.dim() != kDims || dtype_of(a) != dtype_of(b) || !is_strided(b)) return false;
  if (device_type_of(b) != aoti_torch_device_type_cuda() || a.get_device_index() != b.get_device_index()) return false;
  for (int dim = 0; dim < kDims; ++dim) {
    if (a.size(dim) != b.size(dim)) return false;
  }
  return true;
}

bool is_packed_ndhwc(Tensor const& tensor) {
  int64_t expected = 1;
  for (int dim : {1, 4, 3, 2, 0}) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

// False where the call cannot be described; what the description says wrong is the library's to find.
bool describe(Tensor const& grad_output, std::optional<Tensor> const& t, std::optional<Tensor> const& ndhwc,
              int64_t activation, double negative_slope, bool in_place, bool sums, convt3d_activation_gradient& d) {
  std::optional<convt3d_dtype> const type = library_dtype(dtype_of(grad_output));
  if (!type || !same_tensor_type(grad_output, grad_output)) return false;
  if (activation < 0 || activation >= CONVT3D_ACT_COUNT) return false;
  if (t.has_value() != (activation != CONVT3D_ACT_NONE) || (in_place && !t)) return false;
  d = {};
  d.dtype = *type;
  d.activation = static_cast<int32_t>(activation);
  d.negative_slope = static_cast<float>(negative_slope);
  d.has_grad_bias = sums ? 1 : 0;
  for (int dim = 0; dim < kDims; ++dim) d.size[dim] = grad_output.size(dim);
  copy_strides(grad_output, d.grad_output_stride);
  d.grad_output_alignment = alignment_of(grad_output.const_data_ptr());
  if (t) {
    if (!same_tensor_type(grad_output, *t)) return false;
    copy_strides(*t, d.t_stride);
    std::copy(d.t_stride, d.t_stride + kDims, d.grad_pre_stride);
    d.t_alignment = d.grad_pre_alignment = alignment_of(t->const_data_ptr());
    d.has_grad_pre = in_place ? 1 : 0;
  }
  if (ndhwc) {
    if (!same_tensor_type(grad_output, *ndhwc) || !is_packed_ndhwc(*ndhwc)) return false;
    d.has_grad_pre_ndhwc = 1;
  }
  return true;
}

std::optional<Tensor> activation_backward(Tensor const& grad_output, std::optional<Tensor> const& t,
                                          std::optional<Tensor> const& ndhwc, int64_t activation, double negative_slope,
                                          int64_t in_place, int64_t sums) {
  convt3d_activation_gradient d;
  if (!describe(grad_output, t, ndhwc, activation, negative_slope, in_place != 0, sums != 0, d)) return std::nullopt;
  char message[kMessageBytes] = "";
  size_t workspace_bytes = 0;
  convt3d_status status = convt3d_backward_activation_workspace(&d, &workspace_bytes, message, sizeof(message));
  if (declined(status)) return std::nullopt;
  if (status != CONVT3D_OK) raise(status, message);

  int32_t const index = grad_output.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(index);
  int64_t const count = sums != 0 ? d.size[1] : 0;
  int64_t const stride = 1;
  OwnedTensor allocated = empty_cuda(1, &count, &stride, aoti_torch_dtype_float32(), index);
  Workspace const workspace(allocated ? workspace_bytes : 0, index);
  if (!allocated || workspace.failed()) raise_out_of_memory(4 * count, workspace_bytes);
  Tensor const result(allocated.release());

  convt3d_activation_gradient_tensors tensors{};
  tensors.grad_output = grad_output.const_data_ptr();
  tensors.t = t ? t->const_data_ptr() : nullptr;
  tensors.grad_pre = d.has_grad_pre ? t->mutable_data_ptr() : nullptr;
  tensors.grad_pre_ndhwc = ndhwc ? ndhwc->mutable_data_ptr() : nullptr;
  tensors.grad_bias = count > 0 ? static_cast<float*>(result.mutable_data_ptr()) : nullptr;
  tensors.workspace = workspace.data();
  tensors.workspace_bytes = workspace_bytes;
  status = convt3d_backward_activation(&d, &tensors, current_stream(index), message, sizeof(message));
  if (declined(status)) return std::nullopt;
  if (status != CONVT3D_OK) raise(status, message);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(convt3d_native, m) {
  m.def(
      "activation_backward_(Tensor grad_output, Tensor(a!)? t, Tensor(b!)? ndhwc, int activation, "
      "float negative_slope, int in_place, int sums) -> Tensor?");
}

STABLE_TORCH_LIBRARY_IMPL(convt3d_native, CompositeExplicitAutograd, m) {
  m.impl("activation_backward_", TORCH_BOX(&activation_backward));
}
