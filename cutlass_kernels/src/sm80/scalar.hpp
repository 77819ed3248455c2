// SPDX-License-Identifier: Apache-2.0
//
// Single elements, for the kernels of plain multiply-adds (direct/, grouped/).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "convt3d/numerics.hpp"

namespace convt3d::sm80::scalar {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline void convert(float& to, float v) { to = v; }
__device__ inline void convert(__half& to, float v) { to = __float2half_rn(v); }
__device__ inline void convert(__nv_bfloat16& to, float v) { to = __float2bfloat16_rn(v); }

// An operand of the products.
template <bool kTf32, class T>
__device__ float operand(T const* at) {
  float const value = to_float(__ldg(at));
  return kTf32 ? round_to_tf32(value) : value;
}

}  // namespace convt3d::sm80::scalar
