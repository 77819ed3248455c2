// SPDX-License-Identifier: Apache-2.0
#include "sm90/product/instance.hpp"

namespace convt3d::sm90::product {

cudaError_t launch_pairs(Launch const& launch, ProductParams const& k, cudaStream_t stream) {
  return launch_instance<false>(launch, k, stream);
}

}  // namespace convt3d::sm90::product
