// SPDX-License-Identifier: Apache-2.0
//
// The kernel's instances, those for channels that are neighbours in y and add and those for others in a file each.
#pragma once

#include "sm90/product/kernel.hpp"
#include "sm90/product/launch.hpp"

namespace convt3d::sm90::product {

template <class T, template <class> class Walk, int kBlocks, bool kApart>
cudaError_t launch_kernel(ProductParams const& k, int blocks, cudaStream_t stream) {
  using Of = Kernel<T, Walk<T>, kBlocks, kApart>;
  auto* const function = kernel<T, Walk, kBlocks, kApart>;
  cudaError_t const error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Of::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>((k.warpgroups + 1) * 128));
  config.dynamicSmemBytes = static_cast<size_t>(k.stages) * stage_bytes(k.warpgroups) + sizeof(typename Of::Shared) +
                            (kBlocks > 1 ? cluster_bytes(kBlocks) : 0) + 1024;  // the last to align the stages
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kBlocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, function, k);
}

template <template <class> class Walk, int kBlocks, bool kApart>
cudaError_t launch_type(int32_t dtype, ProductParams const& k, int blocks, cudaStream_t stream) {
  if (dtype == CONVT3D_F16) return launch_kernel<__half, Walk, kBlocks, kApart>(k, blocks, stream);
  if (dtype == CONVT3D_BF16) return launch_kernel<__nv_bfloat16, Walk, kBlocks, kApart>(k, blocks, stream);
  return launch_kernel<float, Walk, kBlocks, kApart>(k, blocks, stream);
}

/// For `launch_pairs` and `launch_apart`.
template <bool kApart>
cudaError_t launch_instance(Launch const& l, ProductParams const& k, cudaStream_t stream) {
  if constexpr (!kApart) {
    if (l.rows) return launch_type<WalkRows, 1, kApart>(l.dtype, k, l.blocks, stream);
  }
  if (l.of_cluster == 4) return launch_type<WalkBoxes, 4, kApart>(l.dtype, k, l.blocks, stream);
  if (l.of_cluster == 2) return launch_type<WalkBoxes, 2, kApart>(l.dtype, k, l.blocks, stream);
  return launch_type<WalkBoxes, 1, kApart>(l.dtype, k, l.blocks, stream);
}

}  // namespace convt3d::sm90::product
