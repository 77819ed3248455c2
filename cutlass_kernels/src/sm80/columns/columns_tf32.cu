// SPDX-License-Identifier: Apache-2.0
#include "sm80/columns/launch.hpp"

cudaError_t convt3d::sm80::columns::launch_tf32(ColumnsCall const& call, cudaStream_t stream) {
  return launch<cutlass::tfloat32_t, float>(call, stream);
}
