// SPDX-License-Identifier: Apache-2.0
//
// The pre-pass: brings x and the weights into the form that the implicit-GEMM kernels read, in one launch.
//
//   x       any strides (N, C, D, H, W)        -> packed NDHWC, channels padded with zeros to a multiple, or, sample by
//                                                 sample, one such tensor after the other of a block of channels each
//   weight  any strides (Cin, Cout, kD, kH, kW) -> per residue class, packed KTRSC with that class's taps only
//
// In tf32 mode both are rounded to TF32 on the way. The pre-pass runs in every call: a cache keyed by pointer or
// version would miss in-place updates through `.data`, and would be stale in a replayed CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "prepare/copies.hpp"

namespace convt3d::prepare {

// Residue classes a single launch can describe; stride 4 in three dimensions.
constexpr int kMaxClasses = 64;

// One class of the filter. Triples are (D, H, W).
struct FilterClass {
  int32_t taps[3];
  int32_t first_tap[3];
  int32_t tap_step[3];
  int64_t begin;  // of the class in the packed filter, in elements
};

struct Params {
  // x: sizes and strides (N, C, D, H, W). x_out null: x is used as it is.
  void const* x_in;
  void* x_out;
  int64_t x_size[5];
  int64_t x_stride[5];
  int32_t x_block;        // channels of a block, a multiple of 4; 0: all of them are one
  int64_t x_flat_stride;  // spacing of a sample's voxels where (D, H, W) are one equally spaced run, else -1
  bool x_dense;           // x is packed NDHWC, 16-byte aligned, its channels a multiple of 4

  void const* weight;
  void* filter;
  int64_t weight_stride[5];  // (Cin, Cout, kD, kH, kW)
  int32_t k_channels;        // Cin, and padded
  int32_t k_channels_padded;
  int32_t c_channels;  // Cout, and padded
  int32_t c_channels_padded;
  int64_t filter_size;       // elements of the packed filter
  int32_t const* condition;  // device memory: nothing is done where it holds zero; null: always
  int32_t class_count;
  FilterClass classes[kMaxClasses];
};
static_assert(sizeof(Params) <= 4096, "CUDA guarantees 4 KiB of kernel parameters");

// x of a problem, and where its copy goes, packed with `channels` in each voxel; no copy: null.
inline void set_x(Params& params, Problem const& p, void const* x, void* copy, int64_t channels) {
  Size5 const size = x_shape(p), stride = effective_stride(size, p.x_stride);
  params.x_in = x;
  params.x_out = copy;
  for (int axis = 0; axis < 5; ++axis) {
    params.x_size[axis] = size[axis];
    params.x_stride[axis] = stride[axis];
  }
  params.x_flat_stride = flat_stride(p.in_size, stride.v + 2);
  params.k_channels = static_cast<int32_t>(p.in_channels);
  params.k_channels_padded = static_cast<int32_t>(channels);
}

// element_size 4 or 2; round_tf32 needs 4. Enqueues on `stream`, with at most `max_blocks` blocks.
cudaError_t launch(Params const& params, int element_size, bool round_tf32, cudaStream_t stream,
                   int max_blocks = INT32_MAX);

}  // namespace convt3d::prepare
