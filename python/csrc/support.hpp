// SPDX-License-Identifier: Apache-2.0
//
// What the binding's operators share: tensors in the library's terms, memory, streams and errors. Over LibTorch's
// stable ABI only.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "convt3d/convt3d.h"

// Weak, because a torch without CUDA has no such function: the library then still loads, and finds no CUDA tensor.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t nbytes, void** ret_ptr);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* ptr);
}

namespace convt3d_torch {

using torch::stable::Tensor;

constexpr int kDims = 5;
constexpr size_t kMessageBytes = 256;

inline int32_t device_type_of(Tensor const& tensor) {
  int32_t type = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// torch's number for the type. Unlike scalar_type(), answers for every type.
inline int32_t dtype_of(Tensor const& tensor) {
  int32_t dtype = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

inline bool is_strided(Tensor const& tensor) {
  int32_t layout = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

inline int32_t alignment_of(void const* data) {
  uintptr_t const address = reinterpret_cast<uintptr_t>(data) | 16;
  return static_cast<int32_t>(address & (~address + 1));
}

// Of a place that many bytes into an allocation of torch's, whose alignment is more.
inline int32_t alignment_within(int64_t bytes) { return static_cast<int32_t>((bytes | 16) & -(bytes | 16)); }

// Of a tensor with kDims dimensions.
inline void copy_strides(Tensor const& tensor, int64_t (&strides)[kDims]) {
  auto const own = tensor.strides();
  std::copy(own.begin(), own.begin() + kDims, strides);
}

inline std::optional<convt3d_dtype> library_dtype(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return CONVT3D_F32;
  if (dtype == aoti_torch_dtype_float16()) return CONVT3D_F16;
  if (dtype == aoti_torch_dtype_bfloat16()) return CONVT3D_BF16;
  return std::nullopt;
}

// Whether a status means "not for this library" rather than a failure.
inline bool declined(convt3d_status status) {
  return status == CONVT3D_INVALID_ARGUMENT || status == CONVT3D_NOT_SUPPORTED;
}

struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Null where the memory cannot be had.
inline OwnedTensor empty_cuda(int64_t dims, int64_t const* shape, int64_t const* strides, int32_t dtype,
                              int32_t device_index) {
  AtenTensorHandle handle = nullptr;
  AOTITorchError const error =
      aoti_torch_empty_strided(dims, shape, strides, dtype, aoti_torch_device_type_cuda(), device_index, &handle);
  return OwnedTensor(error == 0 ? handle : nullptr);
}

// Memory of the current device and stream that is free again, in stream order, when this goes. From torch's allocator,
// as a tensor's is, but without the tensor (2 microseconds) where torch has a function for that.
class Workspace {
 public:
  Workspace(size_t bytes, int32_t device_index) {
    if (bytes == 0) return;
    raw_ = aoti_torch_cuda_caching_allocator_raw_alloc != nullptr &&
           aoti_torch_cuda_caching_allocator_raw_delete != nullptr;
    if (raw_) {
      failed_ = aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data_) != 0;
    } else {
      int64_t const size = static_cast<int64_t>(bytes), stride = 1;
      tensor_ = empty_cuda(1, &size, &stride, aoti_torch_dtype_uint8(), device_index);
      failed_ = !tensor_;
      if (tensor_) TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor_.get(), &data_));
    }
  }
  ~Workspace() {
    if (raw_ && !failed_) aoti_torch_cuda_caching_allocator_raw_delete(data_);
  }
  Workspace(Workspace const&) = delete;
  Workspace& operator=(Workspace const&) = delete;

  bool failed() const { return failed_; }
  void* data() const { return data_; }

 private:
  bool raw_ = false;
  bool failed_ = false;
  void* data_ = nullptr;
  OwnedTensor tensor_;
};

inline void raise(convt3d_status status, char const* message) {
  STD_TORCH_CHECK(false, "convt3d: ", message, " (status ", static_cast<int>(status), ")");
}

// The stable ABI does not say why an allocation failed. Python reads the two numbers and lets torch say it.
inline void raise_out_of_memory(int64_t output_bytes, size_t workspace_bytes) {
  STD_TORCH_CHECK(false, "convt3d: cannot allocate ", output_bytes, " bytes of output and ", workspace_bytes,
                  " of workspace");
}

// The current stream of a CUDA device.
inline void* current_stream(int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "convt3d: this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

}  // namespace convt3d_torch
