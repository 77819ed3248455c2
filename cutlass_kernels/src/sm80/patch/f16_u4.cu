// SPDX-License-Identifier: Apache-2.0
#include "sm80/patch/launch.hpp"

cudaError_t convt3d::sm80::patch::f16_u4(PatchCall const& call, cudaStream_t stream) {
  return launch<Half, 4, 4, 12>(call, stream);
}
