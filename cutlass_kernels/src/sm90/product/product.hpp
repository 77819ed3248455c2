// SPDX-License-Identifier: Apache-2.0
//
// The product kernel behind its launch.
#pragma once

#include <cuda_runtime.h>

#include "sm90/product/choice.hpp"

namespace convt3d::sm90::product {

/// Of a problem that it takes. cudaErrorInvalidValue where the driver refuses a tensor map.
cudaError_t launch(Problem const& p, convt3d_tensors const& t, int multiprocessors, cudaStream_t stream);

}  // namespace convt3d::sm90::product
