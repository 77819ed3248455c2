// SPDX-License-Identifier: Apache-2.0
//
// Non-finite operands. A weight block multiplies x by zeros where a tap is not live, and inf * 0 is nan, so a CTA
// that met operands which are not surely finite looks at its outputs again after all stores: every nan in y is
// recomputed by the definition, over live taps alone. Nothing of this costs anything on finite data.
#pragma once

#include "convt3d/activation.hpp"
#include "sm90/element.hpp"
#include "sm90/tile_scheduler.hpp"

namespace convt3d::sm90 {

/// The accumulator of one output: a plain fp32 loop over live taps, with the operands the tensor cores saw.
template <class T>
CUTLASS_DEVICE float plain_conv(MainloopParams const& m, ColdParams const& p, int n, int c, int od, int oh, int ow) {
  float sum = 0.f;
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
        for (int i = 0; i < p.in_channels; ++i) {
          sum += Element<T>::operand(x[i * m.x_stride[1]]) * Element<T>::operand(w[i * p.weight_stride[0]]);
        }
      }
    }
  }
  return sum;
}

/// Recomputes an output that is nan.
template <class T>
CUTLASS_DEVICE void recompute_output(MainloopParams const& m, EpilogueParams const& e, ColdParams const& p, int n,
                                     int c, int od, int oh, int ow) {
  if (ow >= p.out_size[2] || oh >= p.out_size[1] || od >= p.out_size[0] || c >= e.out_channels) return;
  T* y = static_cast<T*>(p.y) + n * p.y_stride[0] + c * p.y_stride[1] + od * p.y_stride[2] + oh * p.y_stride[3] +
         ow * p.y_stride[4];
  float const seen = Element<T>::to_float(__ldcv(y));  // the copy engine wrote it: not from a cache of this SM
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

/// Recomputes the nans of one run of class `cls`; called by `threads` threads together.
template <class T>
CUTLASS_DEVICE void recompute_run(KernelParams const& params, int cls, int run, int thread, int threads) {
  constexpr int kChannels = class_channels(sizeof(T));
  TileScheduler::Run const r = TileScheduler::decode(params.scheduler, run);
  int const outputs = 2 * r.length * kChannels * 2 * kTileH * 2 * kTileW;
  for (int i = thread; i < outputs; i += threads) {
    int rest = i;
    int const ow = r.w * 2 * kTileW + rest % (2 * kTileW);
    rest /= 2 * kTileW;
    int const oh = r.h * 2 * kTileH + rest % (2 * kTileH);
    rest /= 2 * kTileH;
    int const c = cls * kChannels + rest % kChannels;
    int const od = 2 * r.d + rest / kChannels;
    recompute_output<T>(params.mainloop, params.epilogue, params.cold, r.n, c, od, oh, ow);
  }
}

/// After all stores of this CTA: the nans of every run it made.
template <class T>
__device__ __noinline__ void recompute(KernelParams const& params, int cls, int thread, int threads) {
  int32_t const volatile* owners = params.scheduler.owners + static_cast<int64_t>(cls) * params.scheduler.runs;
  for (int run = 0; run < params.scheduler.runs; ++run) {
    if (owners[run] == 1 + static_cast<int>(blockIdx.x)) recompute_run<T>(params, cls, run, thread, threads);
  }
}

}  // namespace convt3d::sm90
