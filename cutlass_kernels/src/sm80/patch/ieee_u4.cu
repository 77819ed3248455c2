// SPDX-License-Identifier: Apache-2.0
#include "sm80/patch/launch.hpp"

cudaError_t convt3d::sm80::patch::ieee_u4(PatchCall const& call, cudaStream_t stream) {
  return launch<Ieee, 4, 8, 8>(call, stream);
}
