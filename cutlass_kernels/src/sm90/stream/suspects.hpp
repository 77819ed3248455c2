// SPDX-License-Identifier: Apache-2.0
//
// The streaming kernel's cold path in ieee mode: the nans of the items in which a consumer saw one among its sums.
// Values that parts do not hold are few, but they come in clusters of outputs, so these are shared among all consumer
// threads, as the resident kernel does (cold_path.hpp).
#pragma once

#include "sm90/cold_path.hpp"
#include "sm90/stream/tile.hpp"

namespace convt3d::sm90::stream {

template <int kWidth>
constexpr int kItemOutputs = kGroups * kTileChannels * kTileH * 2 * kWidth;

/// Output `index` of an item: one of the columns it computes need not be inside y.
struct Place {
  int c, od, oh, ow;
  bool inside;
};

template <int kWidth>
CUTLASS_DEVICE Place place(StreamParams const& params, Item const& item, int index) {
  Residues const r = residues(params, item.cls);
  Column const column = params.plain.extent.columns.at(item.w * 2 * kWidth + index % (2 * kWidth), r.pair);
  index /= 2 * kWidth;
  int const oh = params.stride_h * (item.h * kTileH + index % kTileH) + r.h;
  index /= kTileH;
  return {item.channel + index % kTileChannels, params.stride_d * (item.d + index / kTileChannels) + r.d, oh, column.ow,
          column.inside};
}

/// Shared memory for the outputs of one item that are to be computed again: their number, and as many as there is room
/// for. Used by all consumer threads together.
template <int kWidth>
struct ItemNans {
  static constexpr int kOutputs = kItemOutputs<kWidth>;
  static constexpr int kThreads = kGroups * 128;
  int32_t* words;
  int32_t room;

  CUTLASS_DEVICE static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

  template <class T>
  CUTLASS_DEVICE void recompute(StreamParams const& params, int number) const {
    constexpr int kBatch = 16;  // outputs that a thread looks at together: each look is a round trip
    int const thread = threadIdx.x;
    ColdParams const& p = params.cold;
    Item const item = decode(params, number);
    auto const* const y = static_cast<T const*>(p.y) + item.n * p.y_stride[0];
    auto recompute_at = [&](int index) {
      Place const at = place<kWidth>(params, item, index);
      if (at.inside) recompute_output<T>(params.x, params.epilogue, p, item.n, at.c, at.od, at.oh, at.ow);
    };

    if (thread == 0) words[0] = 0;
    sync();
    for (int first = thread; first < kOutputs; first += kBatch * kThreads) {
      unsigned nans = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < kBatch; ++b) {
        Place const at = place<kWidth>(params, item, first + b * kThreads);
        bool const exists = at.inside && at.ow < p.out_size[2] && at.oh < p.out_size[1] && at.od < p.out_size[0] &&
                            at.c < params.epilogue.out_channels;
        T const* const from =
            y + at.c * p.y_stride[1] + at.od * p.y_stride[2] + at.oh * p.y_stride[3] + at.ow * p.y_stride[4];
        float const value = exists ? Element<T>::to_float(load_written(from)) : 0.f;
        nans |= static_cast<unsigned>(value != value) << b;
      }
      for (; nans != 0; nans &= nans - 1) {
        int const entry = atomicAdd(words, 1);
        if (entry < room) words[1 + entry] = first + (__ffs(static_cast<int>(nans)) - 1) * kThreads;
      }
    }
    sync();
    int const found = words[0];
    if (found <= room) {
      for (int i = thread; i < found; i += kThreads) recompute_at(words[1 + i]);
    } else {
      for (int index = thread; index < kOutputs; index += kThreads) recompute_at(index);
    }
    sync();
  }
  static_assert(kOutputs % (16 * kThreads) == 0);
};

/// The nans of the items that are listed; of all of this CTA's where these are too many.
template <class T, int kWidth>
__device__ __noinline__ void recompute_suspects(StreamParams const& params, SuspectList const& items,
                                                ItemNans<kWidth> nans) {
  int const count = items.count();
  if (count <= SuspectList::kRoom) {
    for (int i = 0; i < count; ++i) nans.template recompute<T>(params, items.entry[i]);
    return;
  }
  int32_t const volatile* owners = params.scheduler.owners;
  for (int number = 0; number < params.scheduler.runs; ++number) {
    if (owners[number] == 1 + static_cast<int>(blockIdx.x)) nans.template recompute<T>(params, number);
  }
}

}  // namespace convt3d::sm90::stream
