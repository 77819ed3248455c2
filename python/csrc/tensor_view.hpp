// SPDX-License-Identifier: Apache-2.0
//
// Tensors as the forward operators see them: by handle, and asked once. Each question is a call into torch, and
// torch::stable::Tensor is a shared pointer with two allocations behind it; together that is a tenth of a small call.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>

#include "convt3d/convt3d.h"
#include "support.hpp"

namespace convt3d_torch {

/// What a call needs to know of a tensor. Borrowed from it.
struct TensorView {
  int64_t dims;
  int64_t const* size;
  int64_t const* stride;
  void const* data;
  int32_t device_type, device_index;
  int32_t dtype;  // torch's number
};

/// False for a tensor that is not strided: others have no strides to ask for.
inline bool look_at(AtenTensorHandle tensor, TensorView& view) {
  int32_t layout = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
  if (layout != aoti_torch_layout_strided()) return false;
  int64_t *size = nullptr, *stride = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &view.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &view.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &view.dims));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &size));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &stride));
  view.size = size;
  view.stride = stride;
  view.data = nullptr;
  return true;
}

/// Looks up the address of the first element, for a tensor that is known to have memory.
inline void find_data(AtenTensorHandle tensor, TensorView& view) {
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor, &view.data));
}

inline void copy_strides(TensorView const& view, int64_t (&strides)[kDims]) {
  std::copy(view.stride, view.stride + kDims, strides);
}

}  // namespace convt3d_torch
