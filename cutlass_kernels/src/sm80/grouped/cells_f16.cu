// SPDX-License-Identifier: Apache-2.0
#include "sm80/grouped/cells.hpp"

namespace convt3d::sm80::grouped {
template void launch_cells<__half, false>(Problem const&, Params const&, dim3, size_t, cudaStream_t);
}  // namespace convt3d::sm80::grouped
