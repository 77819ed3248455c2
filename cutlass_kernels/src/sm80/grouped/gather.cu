// SPDX-License-Identifier: Apache-2.0
//
// Any geometry: a thread gathers a few positions of one residue class, tap by tap.
#include "sm80/grouped/params.hpp"

namespace convt3d::sm80::grouped {
namespace {

// Grid: (tile of positions, block of channels, sample) in x, class in y.
template <class T, bool kTf32, bool kPairs, bool kLanesAreChannels>
__global__ void __launch_bounds__(kThreads, 2) gather_kernel(__grid_constant__ Params const p) {
  constexpr int kOutputs = kPairs ? 2 : 1;  // of a position, along W
  constexpr int kChannels = kLanesAreChannels ? kLaneChannels : 1;
  extern __shared__ float weights[];

  int tile, channel_block, n;
  p.position_tiles(n, tile, static_cast<int>(blockIdx.x));
  p.channel_blocks(n, channel_block, n);
  int residue[3];
  int rest = blockIdx.y;
  residue[2] = kPairs ? 0 : rest % p.stride[2];
  if (!kPairs) rest /= p.stride[2];
  residue[1] = rest % p.stride[1];
  residue[0] = rest / p.stride[1];
  load_weights<kTf32, kChannels, T>(p, channel_block * kChannels, weights);
  __syncthreads();

  int const lane = kLanesAreChannels ? threadIdx.x % kLaneChannels : 0;
  int const channel = channel_block * kChannels + lane;
  if (channel >= p.out_channels) return;
  int all = 1;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    int const step = kPairs && axis == 2 ? 2 : p.stride[axis];
    all *= p.out_size[axis] > residue[axis] ? (p.out_size[axis] - residue[axis] - 1) / step + 1 : 0;
  }
  Plane<T> const plane(p, n, channel);
  Residue const in_d = p.residues[0][residue[0]];
  Residue const in_h = p.residues[1][residue[1]];
  int const taps = p.kernel[0] * p.kernel[1] * p.kernel[2];

#pragma unroll 1
  for (int step = tile * kSteps; step < (tile + 1) * kSteps; ++step) {
    int at[kPositions][3];  // within the class
    bool inside[kPositions];
    int x_offset[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      int const thread = static_cast<int>(threadIdx.x);
      // Lanes along W are neighbours; where they are channels, a thread's own positions are.
      int const position = kLanesAreChannels ? (step * (kThreads / kChannels) + thread / kChannels) * kPositions + i
                                             : (step * kPositions + i) * kThreads + thread;
      inside[i] = position < all;
      int row;
      p.residues[2][residue[2]].count(row, at[i][2], position);
      in_h.count(at[i][0], at[i][1], row);
      x_offset[i] = at[i][0] * p.x_stride[0] + at[i][1] * p.x_stride[1] + at[i][2] * p.x_stride[2];
    }

    if (!inside[0]) return;  // nor is any that follows

    // `sum` takes in `part` from time to time: rounding errors grow with the additions to one number.
    float sum[kPositions][kOutputs] = {}, part[kPositions][kOutputs] = {};
    int products = 0;  // of a part, at most
#pragma unroll 1
    for (int input = 0; input < p.inputs; ++input) {
      T const* const x = plane.x + input * p.x_stride_c;
      float const* const of_input = weights + input * taps * kChannels + lane;
#pragma unroll 1
      for (int a = 0; a < in_d.taps; ++a) {
        int const from_d = in_d.base - a * p.input_step[0];
        int const tap_d = (in_d.first_tap + a * p.tap_step[0]) * p.kernel[1];
#pragma unroll 1
        for (int b = 0; b < in_h.taps; ++b) {
          int const from_h = in_h.base - b * p.input_step[1];
          int const row = from_d * p.x_stride[0] + from_h * p.x_stride[1];
          int const tap_h = (tap_d + in_h.first_tap + b * p.tap_step[1]) * p.kernel[2];
          bool in_row[kPositions];
#pragma unroll
          for (int i = 0; i < kPositions; ++i) {
            in_row[i] = inside[i] && unsigned(at[i][0] + from_d) < unsigned(p.in_size[0]) &&
                        unsigned(at[i][1] + from_h) < unsigned(p.in_size[1]);
          }
#pragma unroll
          for (int j = 0; j < kOutputs; ++j) {
            Residue const& in_w = p.residues[2][kPairs ? j : residue[2]];
            int from_w = in_w.base;
            int tap = tap_h + in_w.first_tap;
#pragma unroll 1
            for (int c = in_w.taps; c > 0; --c) {
              float const factor = of_input[tap * kChannels];
              int const column = row + from_w * p.x_stride[2];
              float value[kPositions];
              bool live[kPositions];
#pragma unroll
              for (int i = 0; i < kPositions; ++i) {
                live[i] = in_row[i] && unsigned(at[i][2] + from_w) < unsigned(p.in_size[2]);
                value[i] = live[i] ? operand<kTf32>(x + (x_offset[i] + column)) : 0.f;
              }
              // A tap outside x is no product with zero, since its weight may be infinite.
#pragma unroll
              for (int i = 0; i < kPositions; ++i)
                part[i][j] = live[i] ? fmaf(value[i], factor, part[i][j]) : part[i][j];
              from_w -= p.input_step[2];
              tap += p.tap_step[2];
            }
          }
          products += p.row_products;
          if (products < p.part_products) continue;
          products = 0;
#pragma unroll
          for (int i = 0; i < kPositions * kOutputs; ++i) {
            sum[i / kOutputs][i % kOutputs] += part[i / kOutputs][i % kOutputs];
            part[i / kOutputs][i % kOutputs] = 0.f;
          }
        }
      }
    }

#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      if (!inside[i]) continue;
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) sum[i][j] += part[i][j];
      finish<kOutputs>(p, plane, sum[i], at[i][0] * p.stride[0] + residue[0], at[i][1] * p.stride[1] + residue[1],
                       at[i][2] * p.stride[2] + residue[2]);
    }
  }
}

template <class T, bool kTf32>
void launch(Problem const& p, Params const& params, dim3 grid, size_t shared_bytes, cudaStream_t stream) {
  auto const kernel =
      in_pairs(p)
          ? (lanes_are_channels(p) ? gather_kernel<T, kTf32, true, true> : gather_kernel<T, kTf32, true, false>)
          : (lanes_are_channels(p) ? gather_kernel<T, kTf32, false, true> : gather_kernel<T, kTf32, false, false>);
  kernel<<<grid, kThreads, shared_bytes, stream>>>(params);
}

}  // namespace

void launch_gather(Problem const& p, Params const& params, dim3 grid, size_t shared_bytes, cudaStream_t stream) {
  auto const of_type = p.dtype == CONVT3D_F16    ? launch<__half, false>
                       : p.dtype == CONVT3D_BF16 ? launch<__nv_bfloat16, false>
                       : uses_tf32(p)            ? launch<float, true>
                                                 : launch<float, false>;
  of_type(p, params, grid, shared_bytes, stream);
}

}  // namespace convt3d::sm80::grouped
