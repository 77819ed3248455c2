// SPDX-License-Identifier: Apache-2.0
#include "sm80/patch/launch.hpp"

cudaError_t convt3d::sm80::patch::tf32_u2(PatchCall const& call, cudaStream_t stream) {
  return launch<Tf32, 2, 8, 24>(call, stream);
}
