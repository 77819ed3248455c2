// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sm80/grouped/params.hpp"

namespace convt3d::sm80::grouped::mma {

/// Enqueues a problem that mma::takes() and that has outputs.
cudaError_t launch(Problem const& p, Params const& base, cudaStream_t stream);

}  // namespace convt3d::sm80::grouped::mma
