// SPDX-License-Identifier: Apache-2.0
#include "dispatch.hpp"

#if CONVT3D_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace convt3d {

#if CONVT3D_WITH_CUDA

Status current_device(convt3d_device* device, Message& message) {
  int ordinal = 0, major = 0, minor = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error != cudaSuccess) {
    cudaGetLastError();  // a missing driver is an answer here, not an error for the caller's next CUDA call
    return message.fail(CONVT3D_NOT_SUPPORTED, "no usable CUDA device: %s", cudaGetErrorString(error));
  }
  *device = convt3d_device{10 * major + minor, multiprocessors};
  return CONVT3D_OK;
}

#else

Status current_device(convt3d_device*, Message& message) {
  return message.fail(CONVT3D_NOT_SUPPORTED, "this library was built without CUDA");
}

#endif

}  // namespace convt3d
