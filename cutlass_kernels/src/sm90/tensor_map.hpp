// SPDX-License-Identifier: Apache-2.0
//
// The driver's encoder of tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

namespace convt3d::sm90 {

constexpr CUtensorMapDataType kMapTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                             CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};  // by convt3d_dtype

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                    cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// cuTensorMapEncodeTiled of the installed driver, or null. Found without linking to it. A failure is not remembered:
/// it may be an earlier error of the context.
inline EncodeFunction tensor_map_encoder() {
  static std::atomic<EncodeFunction> cached{nullptr};
  if (EncodeFunction const known = cached.load(std::memory_order_acquire)) return known;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // reported as a refused map; the next call must not find it
    return nullptr;
  }
  cached.store(reinterpret_cast<EncodeFunction>(found), std::memory_order_release);
  return reinterpret_cast<EncodeFunction>(found);
}

/// Calls the encoder. A thread that has not used the runtime yet (autograd's, where the memory came from a cache) has
/// no current context, without which the driver refuses every map: so it is bound, and the map encoded again.
template <typename... Arguments>
bool encode_tensor_map(Arguments... arguments) {
  EncodeFunction const encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  if (encode(arguments...) == CUDA_SUCCESS) return true;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return encode(arguments...) == CUDA_SUCCESS;
}

}  // namespace convt3d::sm90
