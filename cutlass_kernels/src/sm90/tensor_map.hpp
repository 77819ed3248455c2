// SPDX-License-Identifier: Apache-2.0
//
// The driver's encoder of tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace convt3d::sm90 {

constexpr CUtensorMapDataType kMapTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                             CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};  // by convt3d_dtype

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                    cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// cuTensorMapEncodeTiled of the installed driver, or null. Found without linking to it.
inline EncodeFunction tensor_map_encoder() {
  static EncodeFunction const function = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      f = nullptr;
    }
    return reinterpret_cast<EncodeFunction>(f);
  }();
  return function;
}

}  // namespace convt3d::sm90
