// SPDX-License-Identifier: Apache-2.0
//
// The bits that the tensor cores read of a value: rounded to TF32 where it is fp32.
#pragma once

#include "sm90/element.hpp"

namespace convt3d::sm90 {

__device__ inline uint32_t operand_bits(float v) { return round_bits_to_tf32(__float_as_uint(v)); }
template <class T>
__device__ uint16_t operand_bits(T v) {
  return static_cast<uint16_t>(Element<T>::bits(v));
}

}  // namespace convt3d::sm90
