// SPDX-License-Identifier: Apache-2.0
#include "dependent_launch.hpp"
#include "sm90/operand_bits.hpp"
#include "sm90/weights.hpp"

namespace convt3d::sm90 {
namespace {

template <class T>
__global__ void write_images(__grid_constant__ WeightParams const p) {
  constexpr int kElement = sizeof(T);
  constexpr int kRows = block_rows(kElement);
  let_next_kernel_start();
  constexpr int kThreads = kPrepareCtas * kPrepareThreads;
  int const index = static_cast<int>(blockIdx.x * kPrepareThreads + threadIdx.x);
  for (int i = index; i < p.classes; i += kThreads) p.counters[i] = 0;
  for (int64_t i = index; i < p.owner_count; i += kThreads) p.owners[i] = 0;

  // In 32 bits: as many weights as fit into the shared memory of all CTAs. Divisions of 64 bits would be half the code,
  // which comes from memory in each call.
  bool suspect = false;
  int const elements = p.classes * p.blocks * kRows * 32;
  for (int i = index; i < elements; i += kThreads) {
    int const k = i % 32;
    int const row = i / 32 % kRows;
    int const rest = i / 32 / kRows;
    int const slot = rest % p.blocks;
    int const cls = rest / p.blocks;
    WeightPlace const place = weight_place(p, kElement, cls, block_place(p, slot), row, k);
    decltype(operand_bits(T{})) bits = 0;
    if (place.live) {
      T const value = static_cast<T const*>(p.weight)[place.offset];
      suspect = suspect || Element<T>::suspect(value);
      bits = operand_bits(value);
    }
    unsigned char* const image = p.image + static_cast<int64_t>(rest) * kWeightBlockBytes;
    *reinterpret_cast<decltype(bits)*>(image + weight_offset(kElement, row, k)) = bits;
  }
  int const any = __syncthreads_or(suspect);
  if (threadIdx.x == 0) p.suspect[blockIdx.x] = any;
}

}  // namespace

cudaError_t prepare_weights(WeightParams const& params, convt3d_dtype dtype, cudaStream_t stream) {
  auto const kernel = dtype == CONVT3D_F16    ? write_images<__half>
                      : dtype == CONVT3D_BF16 ? write_images<__nv_bfloat16>
                                              : write_images<float>;
  kernel<<<kPrepareCtas, kPrepareThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace convt3d::sm90
