// SPDX-License-Identifier: Apache-2.0
#include "sm80/patch/launch.hpp"

cudaError_t convt3d::sm80::patch::bf16_u2(PatchCall const& call, cudaStream_t stream) {
  return launch<Bfloat, 2, 4, 12>(call, stream);
}
