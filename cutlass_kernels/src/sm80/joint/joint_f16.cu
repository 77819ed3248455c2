// SPDX-License-Identifier: Apache-2.0
#include "sm80/joint/instances.hpp"
#include "sm80/joint/launch.hpp"

cudaError_t convt3d::sm80::joint::launch_f16(JointCall const& call, cudaStream_t stream) {
  return launch<cutlass::half_t, cutlass::half_t, Kernel3>(call, stream);
}
