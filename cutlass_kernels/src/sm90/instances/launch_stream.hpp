// SPDX-License-Identifier: Apache-2.0
//
// Launches one instantiation of the streaming kernel; included by the stream_* instance files alone.
#pragma once

#include "sm90/instances/launch_kernel.hpp"
#include "sm90/stream/kernel.hpp"
#include "sm90/stream/tile_width.hpp"

namespace convt3d::sm90::stream {

/// One kernel for the commonest activations, one for these with narrow tiles, and one for all others.
template <class T, bool kChannelsLast>
cudaError_t launch_tail(StreamParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  constexpr int kThreads = Kernel<T, kChannelsLast, CommonTail, kTileW>::kThreads;
  auto launch = [&](auto* function) { return launch_persistent(function, kThreads, k, shared_bytes, ctas, stream); };
  if (k.tile_width == kNarrowTileW) return launch(kernel<T, kChannelsLast, CommonTail, kNarrowTileW>);
  if (is_common(k.epilogue.activation) && !k.epilogue.add_after) {
    return launch(kernel<T, kChannelsLast, CommonTail, kTileW>);
  }
  return launch(kernel<T, kChannelsLast, AnyTail, kTileW>);
}

}  // namespace convt3d::sm90::stream
