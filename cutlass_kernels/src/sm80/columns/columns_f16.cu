// SPDX-License-Identifier: Apache-2.0
#include "sm80/columns/launch.hpp"

cudaError_t convt3d::sm80::columns::launch_f16(ColumnsCall const& call, cudaStream_t stream) {
  return launch<cutlass::half_t, cutlass::half_t>(call, stream);
}
