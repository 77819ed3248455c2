// SPDX-License-Identifier: Apache-2.0
//
// The compiled joint kernels, by type of the operands.
#pragma once

#include "sm80/joint/call.hpp"

namespace convt3d::sm80::joint {

cudaError_t launch_f16(JointCall const& call, cudaStream_t stream);
cudaError_t launch_bf16(JointCall const& call, cudaStream_t stream);
cudaError_t launch_tf32(JointCall const& call, cudaStream_t stream);

}  // namespace convt3d::sm80::joint
