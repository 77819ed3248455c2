// SPDX-License-Identifier: Apache-2.0
#include "sm80/columns/launch.hpp"

cudaError_t convt3d::sm80::columns::launch_ieee(ColumnsCall const& call, cudaStream_t stream) {
  return launch<float, float>(call, stream);
}
