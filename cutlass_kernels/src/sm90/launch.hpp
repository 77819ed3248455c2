// SPDX-License-Identifier: Apache-2.0
//
// Host side: from a problem to the parameters of the two kernels, and one launch function per instance file.
#pragma once

#include <cuda_runtime.h>

#include "sm90/params.hpp"
#include "sm90/weights.hpp"

namespace convt3d::sm90 {

/// Fills both kernels' parameters. False if the driver refuses a tensor map.
bool fill_params(KernelParams& k, WeightParams& w, Problem const& p, Config const& c, convt3d_tensors const& t);

/// Enqueue the main kernel on `ctas` CTAs, as the programmatic dependent of prepare_weights.
cudaError_t launch_ncdhw_tf32(KernelParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream);

}  // namespace convt3d::sm90
