// SPDX-License-Identifier: Apache-2.0
//
// Depthwise, with a kernel of 3 x 3, 5 x 5 or 7 x 7 in (H, W) at stride 2 (MedNeXt's): a thread computes a column
// of cells (grouped.hpp), so that a value of x is loaded once for all the taps in (H, W) that meet it, and a weight
// once for all cells.
#pragma once

#include "sm80/grouped/params.hpp"

namespace convt3d::sm80::grouped {

// One sum from its definition.
template <class T, bool kTf32>
__device__ float exact_sum(Params const& p, T const* x, float const* weights, int channels, int d, int h, int w) {
  Residue const& in_d = p.residues[0][d % p.stride[0]];
  Residue const& in_h = p.residues[1][h % p.stride[1]];
  Residue const& in_w = p.residues[2][w % p.stride[2]];
  float sum = 0.f;
  for (int a = 0; a < in_d.taps; ++a) {
    int const z = d / p.stride[0] + in_d.base - a * p.input_step[0];
    if (unsigned(z) >= unsigned(p.in_size[0])) continue;
    for (int b = 0; b < in_h.taps; ++b) {
      int const row = h / p.stride[1] + in_h.base - b * p.input_step[1];
      if (unsigned(row) >= unsigned(p.in_size[1])) continue;
      for (int c = 0; c < in_w.taps; ++c) {
        int const column = w / p.stride[2] + in_w.base - c * p.input_step[2];
        if (unsigned(column) >= unsigned(p.in_size[2])) continue;
        int const tap =
            ((in_d.first_tap + a * p.tap_step[0]) * p.kernel[1] + in_h.first_tap + b * p.tap_step[1]) * p.kernel[2] +
            in_w.first_tap + c * p.tap_step[2];
        T const* const from = x + (z * p.x_stride[0] + row * p.x_stride[1] + column * p.x_stride[2]);
        sum = fmaf(operand<kTf32>(from), weights[tap * channels], sum);
      }
    }
  }
  return sum;
}

// Grid: (tile of positions, block of channels, sample) in x, residue along D in y.
template <class T, bool kTf32, int K, bool kLanesAreChannels>
__global__ void __launch_bounds__(kThreads, 2) cells_kernel(__grid_constant__ Params const p) {
  using Cell = grouped::Cell<K>;
  constexpr int S = 2;
  constexpr int kCells = Cell::kCells, kWindow = Cell::kWindow;
  constexpr int kChannels = kLanesAreChannels ? kLaneChannels : 1;
  extern __shared__ float weights[];

  int tile, channel_block, n;
  p.position_tiles(n, tile, static_cast<int>(blockIdx.x));
  p.channel_blocks(n, channel_block, n);
  int const residue = blockIdx.y;
  load_weights<kTf32, kChannels, T>(p, channel_block * kChannels, weights);
  __syncthreads();

  int const lane = kLanesAreChannels ? threadIdx.x % kLaneChannels : 0;
  int const channel = channel_block * kChannels + lane;
  if (channel >= p.out_channels) return;
  Plane<T> const plane(p, n, channel);
  Residue const in_d = p.residues[0][residue];
  int const depth = p.out_size[0] > residue ? (p.out_size[0] - residue - 1) / p.stride[0] + 1 : 0;

#pragma unroll 1
  for (int step = tile * kSteps; step < (tile + 1) * kSteps; ++step) {
    int const thread = static_cast<int>(threadIdx.x);
    int const position = step * (kThreads / kChannels) + thread / kChannels;
    int at_d, at_h, at_w;
    p.columns(at_h, at_w, position);
    p.row_blocks(at_d, at_h, at_h);
    at_h *= kCells;
    if (at_d >= depth) return;  // so are all positions that follow

    int const first_row = at_h + p.shift[0] + Cell::kFirst, first_column = at_w + p.shift[1] + Cell::kFirst;
    int offset[kWindow];
    bool in_column[kWindow];
#pragma unroll
    for (int m = 0; m < kWindow; ++m) {
      offset[m] = (first_column + m) * p.x_stride[2];
      in_column[m] = unsigned(first_column + m) < unsigned(p.in_size[2]);
    }

    float sum[kCells][S][S] = {};
#pragma unroll 1
    for (int a = 0; a < in_d.taps; ++a) {
      int const z = at_d + in_d.base - a * p.input_step[0];
      if (unsigned(z) >= unsigned(p.in_size[0])) continue;
      float const* const taps = weights + (in_d.first_tap + a * p.tap_step[0]) * (K * K * kChannels) + lane;
      T const* const slice = plane.x + z * p.x_stride[0];
#pragma unroll
      for (int u = 0; u < kCells + kWindow - 1; ++u) {
        bool const in_row = unsigned(first_row + u) < unsigned(p.in_size[1]);
        T const* const row = slice + (first_row + u) * p.x_stride[1];
        float value[kWindow];
#pragma unroll
        for (int m = 0; m < kWindow; ++m) {
          value[m] = in_row && in_column[m] ? operand<kTf32>(row + offset[m]) : 0.f;
        }
#pragma unroll
        for (int cell = 0; cell < kCells; ++cell) {
          if (u - cell < 0 || u - cell >= kWindow) continue;
#pragma unroll
          for (int i = 0; i < S; ++i) {
            int const tap_h = Cell::tap(i, u - cell);
            if (tap_h < 0 || tap_h >= K) continue;
#pragma unroll
            for (int m = 0; m < kWindow; ++m) {
#pragma unroll
              for (int j = 0; j < S; ++j) {
                int const tap_w = Cell::tap(j, m);
                if (tap_w < 0 || tap_w >= K) continue;
                sum[cell][i][j] = fmaf(value[m], taps[(tap_h * K + tap_w) * kChannels], sum[cell][i][j]);
              }
            }
          }
        }
      }
    }

    int const d = at_d * p.stride[0] + residue, w = at_w * S;
    bool has_nan = false;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
#pragma unroll
      for (int i = 0; i < S; ++i) {
        int const h = (at_h + cell) * S + i;
        if (h >= p.out_size[1]) continue;
#pragma unroll
        for (int j = 0; j < S; ++j) has_nan = has_nan || sum[cell][i][j] != sum[cell][i][j];
        finish<S>(p, plane, sum[cell][i], d, h, w);
      }
    }
    // Values outside x were multiplied as zeros, and zero times an infinite weight is nan. What came out nan is
    // computed again from the taps that really reach it.
    if (!has_nan) continue;
#pragma unroll 1
    for (int k = 0; k < kCells * S * S; ++k) {
      int const h = at_h * S + k / S, column = w + k % S;
      if (h >= p.out_size[1] || column >= p.out_size[2]) continue;
      float const again = exact_sum<T, kTf32>(p, plane.x, weights + lane, kChannels, d, h, column);
      finish<1>(p, plane, &again, d, h, column);
    }
  }
}

template <class T, bool kTf32>
void launch_cells(Problem const& p, Params const& params, dim3 grid, size_t shared_bytes, cudaStream_t stream) {
  auto const launch = [&](auto kernel) { kernel<<<grid, kThreads, shared_bytes, stream>>>(params); };
  auto const of_kernel = [&](auto k) {
    constexpr int K = decltype(k)::value;
    launch(lanes_are_channels(p) ? cells_kernel<T, kTf32, K, true> : cells_kernel<T, kTf32, K, false>);
  };
  if (p.kernel[1] == 3) {
    of_kernel(std::integral_constant<int, 3>{});
  } else if (p.kernel[1] == 5) {
    of_kernel(std::integral_constant<int, 5>{});
  } else {
    of_kernel(std::integral_constant<int, 7>{});
  }
}

}  // namespace convt3d::sm80::grouped
