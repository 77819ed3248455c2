// SPDX-License-Identifier: Apache-2.0
#include "sm90/product/instance.hpp"

namespace convt3d::sm90::product {

cudaError_t launch_apart(Launch const& launch, ProductParams const& k, cudaStream_t stream) {
  return launch_instance<true>(launch, k, stream);
}

}  // namespace convt3d::sm90::product
