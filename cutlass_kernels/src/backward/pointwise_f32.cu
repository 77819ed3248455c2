// SPDX-License-Identifier: Apache-2.0
#include "backward/launch_typed.hpp"

namespace convt3d::backward {

cudaError_t launch_f32(Plan const& plan, cudaStream_t stream) { return launch_typed<float>(plan, stream); }

}  // namespace convt3d::backward
