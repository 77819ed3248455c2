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
  int64_t const index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t const threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = index; i < p.classes; i += threads) p.counters[i] = 0;
  for (int64_t i = index; i < p.owner_count; i += threads) p.owners[i] = 0;

  bool suspect = false;
  int64_t const elements = static_cast<int64_t>(p.classes) * p.blocks * kRows * 32;
  for (int64_t i = index; i < elements; i += threads) {
    int const k = static_cast<int>(i % 32);
    int const row = static_cast<int>(i / 32 % kRows);
    int64_t const rest = i / 32 / kRows;
    int const slot = static_cast<int>(rest % p.blocks);
    int const cls = static_cast<int>(rest / p.blocks);
    WeightPlace const place = weight_place(p, kElement, cls, block_place(p, slot), row, k);
    decltype(operand_bits(T{})) bits = 0;
    if (place.live) {
      T const value = static_cast<T const*>(p.weight)[place.offset];
      suspect = suspect || Element<T>::suspect(value);
      bits = operand_bits(value);
    }
    unsigned char* const image = p.image + rest * kWeightBlockBytes;
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
