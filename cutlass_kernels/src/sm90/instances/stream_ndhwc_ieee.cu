// SPDX-License-Identifier: Apache-2.0
#include "sm90/instances/launch_stream.hpp"

namespace convt3d::sm90::stream {

cudaError_t launch_ndhwc_ieee(StreamParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  return launch_tail<SplitFloat, true>(k, shared_bytes, ctas, stream);
}

}  // namespace convt3d::sm90::stream
