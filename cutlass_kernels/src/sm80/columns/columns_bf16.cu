// SPDX-License-Identifier: Apache-2.0
#include "sm80/columns/launch.hpp"

cudaError_t convt3d::sm80::columns::launch_bf16(ColumnsCall const& call, cudaStream_t stream) {
  return launch<cutlass::bfloat16_t, cutlass::bfloat16_t>(call, stream);
}
