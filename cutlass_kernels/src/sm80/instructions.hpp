// SPDX-License-Identifier: Apache-2.0
//
// Loads into shared memory and from it, and products by mma.sync: of the kernels that are not CUTLASS's implicit GEMM.
#pragma once

#include "cute/arch/mma_sm80.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/cutlass.h"
#include "cutlass/half.h"
#include "cutlass/tfloat32.h"

namespace convt3d::sm80 {

/// 16 bytes, asynchronously: copied or, where `copy` is false, zeroed without a look at `from`. Nothing if not `live`.
CUTLASS_DEVICE void copy_or_zero(uint32_t to, void const* from, bool copy, bool live = true) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %3, 0;\n"
      "  @p cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(copy ? 16 : 0), "r"(int(live))
      : "memory");
}

CUTLASS_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Until no more than `kPending` of the thread's groups of copies are under way.
template <int kPending>
CUTLASS_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

CUTLASS_DEVICE void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

CUTLASS_DEVICE void load_matrices_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

CUTLASS_DEVICE uint32_t load_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

/// acc += 16 rows of x by 8 output channels, of one step.
CUTLASS_DEVICE void multiply(cutlass::half_t, float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                          c[3]);
}
CUTLASS_DEVICE void multiply(cutlass::bfloat16_t, float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                            c[3]);
}
CUTLASS_DEVICE void multiply(cutlass::tfloat32_t, float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                           c[3]);
}

}  // namespace convt3d::sm80
