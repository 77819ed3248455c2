// SPDX-License-Identifier: Apache-2.0
#include "backward/launch_typed.hpp"

namespace convt3d::backward {

cudaError_t launch_bf16(Plan const& plan, cudaStream_t stream) {
  return launch_typed<cutlass::bfloat16_t>(plan, stream);
}

}  // namespace convt3d::backward
