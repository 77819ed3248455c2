// SPDX-License-Identifier: Apache-2.0
//
// The launches behind convt3d_backward_activation; one source file each, so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "backward/plan.hpp"

namespace convt3d::backward {

cudaError_t launch_f32(Plan const& plan, cudaStream_t stream);
cudaError_t launch_f16(Plan const& plan, cudaStream_t stream);
cudaError_t launch_bf16(Plan const& plan, cudaStream_t stream);

/// grad_bias[c] = the sum of partial[c, :], in a fixed order.
cudaError_t launch_sum_partials(float const* partial, int64_t channels, int64_t partials, float* grad_bias,
                                cudaStream_t stream);

}  // namespace convt3d::backward
