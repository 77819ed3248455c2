// SPDX-License-Identifier: Apache-2.0
#include "sm90/instances/launch_kernel.hpp"
#include "sm90/launch.hpp"

namespace convt3d::sm90 {

cudaError_t launch_ncdhw_tf32(KernelParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  if (!k.epilogue.add_after && k.epilogue.activation == CONVT3D_ACT_X_HARDSWISH) {
    return launch_kernel<XHardswishTail>(k, shared_bytes, ctas, stream);
  }
  if (!k.epilogue.add_after && k.epilogue.activation == CONVT3D_ACT_NONE) {
    return launch_kernel<FixedTail<activation::None>>(k, shared_bytes, ctas, stream);
  }
  return launch_kernel<AnyTail>(k, shared_bytes, ctas, stream);
}

}  // namespace convt3d::sm90
