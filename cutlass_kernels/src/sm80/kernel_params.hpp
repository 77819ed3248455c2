// SPDX-License-Identifier: Apache-2.0
//
// What the host hands to an sm80 kernel: one entry per residue class, and the tail of the operator.
//
// All residue classes of a problem run in one grid. A class is a unit-stride dgrad whose output is a strided
// sub-lattice of y, so an entry holds CUTLASS's own iterator parameters for the class and, beside them, the map
// from the class's GEMM rows to addresses in y and add.
#pragma once

#include <cstdint>

#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/fast_math.h"
#include "sm80/call.hpp"

namespace convt3d::sm80 {

// Classes per launch. Stride 2 in three dimensions has exactly 8; a larger stride takes several launches. The
// limit comes from the 4 KiB of kernel parameters that CUDA guarantees everywhere.
constexpr int kMaxClassesPerLaunch = 8;

// Address of the class's output voxel (n, d, h, w), in elements, channel 0:
// base + n * stride_n + d * stride_d + h * stride_h + w * stride_w.
struct Lattice {
  int64_t base;
  int64_t stride[4];

  CUTLASS_HOST_DEVICE int64_t offset(int n, int d, int h, int w) const {
    return base + n * stride[0] + d * stride[1] + h * stride[2] + w * stride[3];
  }
};

// Everything behind the matrix product: bias, add, activation and the output tensor. Pointers are to the launch's
// first sample.
struct TailParams {
  void const* bias = nullptr;  // null: no bias
  void const* add = nullptr;   // null: no add
  void* y = nullptr;
  int64_t bias_stride = 0;
  int64_t add_channel_stride = 0;
  int64_t y_channel_stride = 0;
  int channels = 0;  // Cout
  int activation = 0;
  float negative_slope = 0.f;
  bool add_after = false;
  // Whole-access loads and stores: channel stride 1, every row start aligned and Cout a multiple of the access.
  bool vector_add = false;
  bool vector_y = false;
};

template <class Mma>
struct ClassParams {
  cutlass::conv::Conv3dProblemSize size;  // N, D, H, W: the class's outputs; Z, P, Q: x; T, R, S: the class's taps
  typename Mma::IteratorA::Params iterator_x;
  typename Mma::IteratorB::Params iterator_filter;
  typename Mma::IteratorB::Element const* filter;  // KTRSC, taps of this class only
  int64_t x_block_step;                            // see Call
  int rows;                                        // GEMM M = N * D * H * W
  int k_iterations;                                // 0 where no tap reaches the class
  float cut_share;                                 // of a sum: what it gets back (sums.hpp)
  Lattice y;
  Lattice add;
};

template <class Mma>
struct KernelParams {
  ClassParams<Mma> classes[kMaxClassesPerLaunch];
  int class_count;
  int column_tiles;          // GEMM N tiles
  int tiles;                 // GEMM M tiles times those
  int mixed_tiles;           // of so many all classes together, of the rest one class after the other
  int blocks;                // of the whole grid; what is launched may be fewer
  bool stash;                // behind the kernel's shared memory there is room for a stash (short_sums.hpp)
  bool pairs;                // a thread block computes two classes, neighbours along W, of as many rows
  int32_t const* condition;  // see Call
  typename Mma::IteratorA::Element const* x;
  TailParams tail;
};

}  // namespace convt3d::sm80
