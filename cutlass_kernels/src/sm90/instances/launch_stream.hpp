// SPDX-License-Identifier: Apache-2.0
//
// Launches one instantiation of the streaming kernel; included by the stream_* instance files alone.
#pragma once

#include "sm90/instances/launch_kernel.hpp"
#include "sm90/stream/kernel.hpp"

namespace convt3d::sm90::stream {

/// One kernel for none, relu and leaky_relu, one for these with narrow tiles, and one for all others.
template <class T, bool kChannelsLast>
cudaError_t launch_tail(StreamParams const& k, size_t shared_bytes, int ctas, cudaStream_t stream) {
  bool const linear = k.epilogue.activation == CONVT3D_ACT_NONE || k.epilogue.activation == CONVT3D_ACT_RELU ||
                      k.epilogue.activation == CONVT3D_ACT_LEAKY_RELU;
  constexpr int kThreads = Kernel<T, kChannelsLast, LinearTail, kTileW>::kThreads;
  auto launch = [&](auto* function) { return launch_persistent(function, kThreads, k, shared_bytes, ctas, stream); };
  if (k.tile_width == kNarrowTileW) return launch(kernel<T, kChannelsLast, LinearTail, kNarrowTileW>);
  if (linear && !k.epilogue.add_after) return launch(kernel<T, kChannelsLast, LinearTail, kTileW>);
  return launch(kernel<T, kChannelsLast, AnyTail, kTileW>);
}

}  // namespace convt3d::sm90::stream
