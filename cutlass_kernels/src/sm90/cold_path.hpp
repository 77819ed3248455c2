// SPDX-License-Identifier: Apache-2.0
//
// Non-finite operands. A weight block multiplies x by zeros where a tap is not live, and inf * 0 is nan, so a CTA
// that met operands which are not surely finite looks at its outputs again after all stores: every nan in y is
// recomputed by the definition, over live taps alone. Nothing of this costs anything on finite data. In ieee mode the
// same serves outputs that values which do not split into parts may have spoilt (split.hpp).
#pragma once

#include <type_traits>

#include "convt3d/activation.hpp"
#include "sm90/element.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90 {

/// Sums of the cold path: fp32, except in ieee mode, where a plain sum of many terms would be less accurate than the
/// tensor cores' two, and whose operands are any.
template <class T>
using ColdSum = std::conditional_t<std::is_same_v<T, SplitFloat>, double, float>;

/// The accumulator of one output: a plain loop over live taps, with the operands the tensor cores saw.
template <class T>
CUTLASS_DEVICE float plain_conv(MainloopParams const& m, ColdParams const& p, int n, int c, int od, int oh, int ow) {
  using Sum = ColdSum<T>;
  Sum sum = 0;
  for (int kd = 0; kd < p.kernel[0]; ++kd) {
    int const d2 = od + p.padding[0] - kd;
    if (d2 < 0 || d2 % p.stride[0] != 0 || d2 / p.stride[0] >= m.in_size[0]) continue;
    for (int kh = 0; kh < p.kernel[1]; ++kh) {
      int const h2 = oh + p.padding[1] - kh;
      if (h2 < 0 || h2 % p.stride[1] != 0 || h2 / p.stride[1] >= m.in_size[1]) continue;
      for (int kw = 0; kw < p.kernel[2]; ++kw) {
        int const w2 = ow + p.padding[2] - kw;
        if (w2 < 0 || w2 % p.stride[2] != 0 || w2 / p.stride[2] >= m.in_size[2]) continue;
        T const* x = static_cast<T const*>(m.x) + n * m.x_stride[0] + d2 / p.stride[0] * m.x_stride[2] +
                     h2 / p.stride[1] * m.x_stride[3] + w2 / p.stride[2] * m.x_stride[4];
        T const* w = static_cast<T const*>(p.weight) + c * p.weight_stride[1] + kd * p.weight_stride[2] +
                     kh * p.weight_stride[3] + kw * p.weight_stride[4];
#pragma unroll 16  // loads in flight
        for (int i = 0; i < p.in_channels; ++i) {
          sum += Sum{Element<T>::operand(x[i * m.x_stride[1]])} * Sum{Element<T>::operand(w[i * p.weight_stride[0]])};
        }
      }
    }
  }
  return static_cast<float>(sum);
}

/// Recomputes an output that is nan.
template <class T>
CUTLASS_DEVICE void recompute_output(MainloopParams const& m, EpilogueParams const& e, ColdParams const& p, int n,
                                     int c, int od, int oh, int ow) {
  if (ow >= p.out_size[2] || oh >= p.out_size[1] || od >= p.out_size[0] || c >= e.out_channels) return;
  T* y = static_cast<T*>(p.y) + n * p.y_stride[0] + c * p.y_stride[1] + od * p.y_stride[2] + oh * p.y_stride[3] +
         ow * p.y_stride[4];
  float const seen = Element<T>::to_float(load_written(y));  // the copy engine wrote it: not from a cache of this SM
  if (seen == seen) return;
  float t = plain_conv<T>(m, p, n, c, od, oh, ow);
  if (e.has_bias) t += Element<T>::to_float(static_cast<T const*>(e.bias)[c * e.bias_stride]);
  float add = 0.f;
  if (p.has_add) {
    add = Element<T>::to_float(
        static_cast<T const*>(p.add)[n * p.add_stride[0] + c * p.add_stride[1] + od * p.add_stride[2] +
                                     oh * p.add_stride[3] + ow * p.add_stride[4]]);
  }
  if (!e.add_after) t += add;
  t = apply_activation(e.activation, t, e.negative_slope);
  if (e.add_after) t += add;
  *y = Element<T>::from_float(t);
}

/// Outputs to recompute, found by all consumer threads and then shared among them: they come in clusters, which few
/// threads would meet. Where the weights were, which nothing uses by then.
struct NanList {
  static constexpr int kThreads = kGroups * 128;
  static constexpr int kMostPlanes = 48;
  int32_t* words;  // the number of entries, and the entries
  int32_t room;

  CUTLASS_DEVICE explicit NanList(KernelParams const& params) {
    extern __shared__ unsigned char dynamic_smem[];
    words = reinterpret_cast<int32_t*>(dynamic_smem);
    room = params.mainloop.weight_bytes / 4 - 1;
  }
  CUTLASS_DEVICE static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }
};

/// A D plane of the outputs of a run, as one number.
struct RunPlane {
  int run, plane;

  CUTLASS_DEVICE static int planes(SchedulerParams const& p) { return 2 * p.run_length; }
  CUTLASS_DEVICE static int number(SchedulerParams const& p, int run, int plane) { return run * planes(p) + plane; }
  CUTLASS_DEVICE static RunPlane decode(SchedulerParams const& p, int number) {
    return {number / planes(p), number % planes(p)};
  }
};

/// Recomputes the nans of `count` planes of class `cls`, of which `number(i)` is the i-th; called by all consumer
/// threads. At most kMostPlanes at a time.
template <class T, class Number>
CUTLASS_DEVICE void recompute_planes(KernelParams const& params, int cls, int count, Number&& number) {
  constexpr int kChannels = class_channels(sizeof(T));
  constexpr int kBatch = 16;  // outputs that a thread looks at together: nearly none is nan, each look is a round trip
  constexpr int kThreads = NanList::kThreads;
  constexpr int kOutputs = kChannels * 2 * kTileH * 2 * kTileW;  // of a plane
  static_assert(kOutputs % (kBatch * kThreads) == 0 && kOutputs * NanList::kMostPlanes <= (1 << 30));
  int const thread = threadIdx.x;
  ColdParams const& p = params.cold;
  EpilogueParams const& e = params.epilogue;

  struct Place {
    int n, c, od, oh, ow;
  };
  auto place = [&](int plane, int index) -> Place {
    RunPlane const at = RunPlane::decode(params.scheduler, number(plane));
    TileScheduler::Run const r = TileScheduler::decode(params.scheduler, at.run);
    int rest = index;
    int const ow = r.w * 2 * kTileW + rest % (2 * kTileW);
    rest /= 2 * kTileW;
    int const oh = r.h * 2 * kTileH + rest % (2 * kTileH);
    rest /= 2 * kTileH;
    return {r.n, cls * kChannels + rest, 2 * r.d + at.plane, oh, ow};
  };
  auto recompute_at = [&](int plane, int index) {
    Place const at = place(plane, index);
    recompute_output<T>(params.mainloop, e, p, at.n, at.c, at.od, at.oh, at.ow);
  };

  NanList const list(params);
  if (thread == 0) list.words[0] = 0;
  NanList::sync();
  for (int plane = 0; plane < count; ++plane) {
    for (int first = thread; first < kOutputs; first += kBatch * kThreads) {
      unsigned nans = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < kBatch; ++b) {
        Place const at = place(plane, first + b * kThreads);
        bool const exists =
            at.ow < p.out_size[2] && at.oh < p.out_size[1] && at.od < p.out_size[0] && at.c < e.out_channels;
        T const* const from = static_cast<T const*>(p.y) + at.n * p.y_stride[0] + at.c * p.y_stride[1] +
                              at.od * p.y_stride[2] + at.oh * p.y_stride[3] + at.ow * p.y_stride[4];
        float const seen = exists ? Element<T>::to_float(load_written(from)) : 0.f;
        nans |= static_cast<unsigned>(seen != seen) << b;
      }
      for (; nans != 0; nans &= nans - 1) {
        int const entry = atomicAdd(list.words, 1);
        int const index = first + (__ffs(static_cast<int>(nans)) - 1) * kThreads;
        if (entry < list.room) list.words[1 + entry] = plane * kOutputs + index;
      }
    }
  }
  NanList::sync();
  int const found = list.words[0];
  if (found <= list.room) {
    for (int i = thread; i < found; i += kThreads) {
      recompute_at(list.words[1 + i] / kOutputs, list.words[1 + i] % kOutputs);
    }
  } else {
    for (int i = thread; i < count * kOutputs; i += kThreads) recompute_at(i / kOutputs, i % kOutputs);
  }
  NanList::sync();
}

/// After all stores of this CTA: the nans of every run it made.
template <class T>
__device__ __noinline__ void recompute(KernelParams const& params, int cls) {
  int32_t const* owners = params.scheduler.owners + static_cast<int64_t>(cls) * params.scheduler.runs;
  for (int first = 0; first < params.scheduler.runs; first += 32) {
    int const run = first + static_cast<int>(threadIdx.x) % 32;
    bool const mine = run < params.scheduler.runs && __ldcv(owners + run) == 1 + static_cast<int>(blockIdx.x);
    for (unsigned left = __ballot_sync(0xffffffffu, mine); left != 0; left &= left - 1) {
      int const of_run = first + __ffs(static_cast<int>(left)) - 1;
      int const planes = 2 * TileScheduler::decode(params.scheduler, of_run).length;
      recompute_planes<T>(params, cls, planes,
                          [&](int plane) { return RunPlane::number(params.scheduler, of_run, plane); });
    }
  }
}

/// Where a consumer saw a nan, as far as there is room. In shared memory.
struct SuspectList {
  static constexpr int kRoom = NanList::kMostPlanes;
  int32_t added, last[kGroups];
  int32_t entry[kRoom];

  CUTLASS_DEVICE void init() {
    added = 0;
    for (int32_t& number : last) number = -1;
  }
  /// One thread of a warp. The warps of a group are about in step, so `last` keeps out most of the repetitions.
  CUTLASS_DEVICE void add(int number) {
    if (atomicExch(&last[number % kGroups], number) == number) return;
    int const at = atomicAdd(&added, 1);
    if (at < kRoom) entry[at] = number;
  }
  CUTLASS_DEVICE int count() const { return *const_cast<int32_t const volatile*>(&added); }
};

/// After all stores of this CTA: the nans of these planes.
template <class T>
__device__ __noinline__ void recompute_listed(KernelParams const& params, SuspectList const& planes, int cls) {
  int const count = planes.count();
  if (count > SuspectList::kRoom) {
    recompute<T>(params, cls);
  } else {
    recompute_planes<T>(params, cls, count, [&](int i) { return planes.entry[i]; });
  }
}

}  // namespace convt3d::sm90
