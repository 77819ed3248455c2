// SPDX-License-Identifier: Apache-2.0
//
// The kernel behind its launch.
#pragma once

#include <cuda_runtime.h>

#include "sm90/product/params.hpp"

namespace convt3d::sm90::product {

struct Launch {
  int32_t dtype;
  bool rows;               // or boxes
  int of_cluster, blocks;  // thread blocks of a cluster, and in all
};

/// Where channels are neighbours in y and add (has_pairs), and elsewhere.
cudaError_t launch_pairs(Launch const& launch, ProductParams const& k, cudaStream_t stream);
cudaError_t launch_apart(Launch const& launch, ProductParams const& k, cudaStream_t stream);

}  // namespace convt3d::sm90::product
