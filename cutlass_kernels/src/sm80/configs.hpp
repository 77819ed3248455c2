// SPDX-License-Identifier: Apache-2.0
//
// The tile configurations of the sm80 family, one line each. GEMM M = voxels of a class, N = output channels,
// K = taps * input channels.
#pragma once

#include <type_traits>

#include "cutlass/arch/mma.h"
#include "cutlass/bfloat16.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/half.h"
#include "cutlass/tfloat32.h"
#include "sm80/call.hpp"

namespace convt3d::sm80 {

/// Where a sum is kept that short ones are added to (short_sums.hpp).
enum class ShortIn { kNone, kRegisters, kSharedMemory };

// Operand: what the tensor cores read. Element: x, y, add and bias as the caller holds them. kMinBlocks: thread blocks
// per multiprocessor that the register budget must allow. kSumIterations: of the mainloop, for a short sum, or where
// the mainloop has its own, for what of them comes to shared memory. kKept: of a thread's sums, for which there is no
// shared memory.
template <class Operand_, class Element_, class Math_, class Tile_, class WarpTile_, class Instruction_, int kStages_,
          int kMinBlocks_, ShortIn kSums_ = ShortIn::kNone, int kSumIterations_ = 0, int kKept_ = 0>
struct Config {
  using Operand = Operand_;
  using Element = Element_;
  using Math = Math_;
  using Tile = Tile_;
  using WarpTile = WarpTile_;
  using Instruction = Instruction_;
  static constexpr int kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr ShortIn kSums = kSums_;
  static constexpr int kSumIterations = kSumIterations_;
  static constexpr int kKept = kKept_;
};

template <int M, int N, int K>
using Shape = cutlass::gemm::GemmShape<M, N, K>;
using Multiply = cutlass::arch::OpMultiplyAdd;
using Multiply3xTf32 = cutlass::arch::OpMultiplyAddFastF32;

// Measured on an H200, reference workload; docs/performance-log-sm80.md has the alternatives. 128 threads, and as much
// tile as leaves three blocks per multiprocessor without spills: the kernel is bound by instruction issue, so rows are
// set up and filters fetched for large tiles, and by latency, so a second and third block must be there. 3xTF32 keeps
// two parts of every fragment and affords only half the rows.
//
// "Long": for sums of many products (select.cpp). Sums in shared memory leave the tile as it is, and cost a device
// without room for three thread blocks one of them; there TF32 has a tile of half the size, with sums in registers.
//
// A short sum has the products of short_sum_products (sums.hpp).
template <class Half>
constexpr int kHalfSum = std::is_same_v<Half, cutlass::half_t> ? 8 : 12;
// clang-format off
using Tf32N64 = Config<cutlass::tfloat32_t, float, Multiply, Shape<128, 64, 16>, Shape<64, 32, 16>, Shape<16, 8, 8>, 3, 3>;
using Tf32N64Long = Config<cutlass::tfloat32_t, float, Multiply, Shape<128, 64, 16>, Shape<64, 32, 16>, Shape<16, 8, 8>, 3, 3, ShortIn::kSharedMemory, 16>;
using Tf32N64LongSmall = Config<cutlass::tfloat32_t, float, Multiply, Shape<64, 64, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 4, ShortIn::kRegisters, 16>;
using Tf32N128Long = Config<cutlass::tfloat32_t, float, Multiply, Shape<128, 128, 16>, Shape<64, 64, 16>, Shape<16, 8, 8>, 3, 2, ShortIn::kSharedMemory, 16, 16>;
using Tf32N96Long = Config<cutlass::tfloat32_t, float, Multiply, Shape<128, 96, 16>, Shape<64, 48, 16>, Shape<16, 8, 8>, 3, 2, ShortIn::kSharedMemory, 16, 48>;
using Tf32N32 = Config<cutlass::tfloat32_t, float, Multiply, Shape<128, 32, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 4>;
using Tf32N32Long = Config<cutlass::tfloat32_t, float, Multiply, Shape<128, 32, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 3, ShortIn::kRegisters, 16>;
using IeeeN64 = Config<float, float, Multiply3xTf32, Shape<64, 64, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 3>;
using IeeeN64Long = Config<float, float, Multiply3xTf32, Shape<64, 64, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 3, ShortIn::kSharedMemory, 32>;
using IeeeN32 = Config<float, float, Multiply3xTf32, Shape<128, 32, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 3>;
using IeeeN32Long = Config<float, float, Multiply3xTf32, Shape<128, 32, 16>, Shape<32, 32, 16>, Shape<16, 8, 8>, 3, 3, ShortIn::kSharedMemory, 32>;
template <class Half> using HalfN64 = Config<Half, Half, Multiply, Shape<128, 64, 32>, Shape<32, 64, 32>, Shape<16, 8, 16>, 3, 3>;
template <class Half> using HalfN64Long = Config<Half, Half, Multiply, Shape<128, 64, 32>, Shape<32, 64, 32>, Shape<16, 8, 16>, 3, 3, ShortIn::kSharedMemory, kHalfSum<Half>>;
template <class Half> using HalfN128 = Config<Half, Half, Multiply, Shape<128, 128, 32>, Shape<64, 64, 32>, Shape<16, 8, 16>, 3, 2>;
template <class Half> using HalfN128Long = Config<Half, Half, Multiply, Shape<128, 128, 32>, Shape<64, 64, 32>, Shape<16, 8, 16>, 3, 2, ShortIn::kSharedMemory, kHalfSum<Half>, 16>;
template <class Half> using HalfN96Long = Config<Half, Half, Multiply, Shape<128, 96, 32>, Shape<64, 48, 32>, Shape<16, 8, 16>, 3, 2, ShortIn::kSharedMemory, kHalfSum<Half>, 48>;
template <class Half> using HalfN32 = Config<Half, Half, Multiply, Shape<128, 32, 32>, Shape<32, 32, 32>, Shape<16, 8, 16>, 3, 4>;
template <class Half> using HalfN32Long = Config<Half, Half, Multiply, Shape<128, 32, 32>, Shape<32, 32, 32>, Shape<16, 8, 16>, 3, 3, ShortIn::kRegisters, kHalfSum<Half>>;
// clang-format on

}  // namespace convt3d::sm80
