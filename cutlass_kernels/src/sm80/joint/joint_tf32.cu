// SPDX-License-Identifier: Apache-2.0
#include "sm80/joint/instances.hpp"
#include "sm80/joint/launch.hpp"

cudaError_t convt3d::sm80::joint::launch_tf32(JointCall const& call, cudaStream_t stream) {
  return launch<cutlass::tfloat32_t, float, Kernel3>(call, stream);
}
