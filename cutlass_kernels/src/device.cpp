// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdint>

#include "dispatch.hpp"

#if CONVT3D_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace convt3d {

#if CONVT3D_WITH_CUDA

namespace {

// What does not change, by ordinal: 0, or a device's numbers in one word.
std::atomic<uint64_t> known[64];

}  // namespace

Status current_device(convt3d_device* device, Message& message) {
  int ordinal = 0, major = 0, minor = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  bool const cacheable = error == cudaSuccess && ordinal >= 0 && ordinal < int(sizeof known / sizeof known[0]);
  if (cacheable) {
    uint64_t const packed = known[ordinal].load(std::memory_order_relaxed);
    if (packed != 0) {
      *device = convt3d_device{static_cast<int32_t>(packed >> 32), static_cast<int32_t>(packed & UINT32_MAX)};
      return CONVT3D_OK;
    }
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error != cudaSuccess) {
    cudaGetLastError();  // a missing driver is an answer here, not an error for the caller's next CUDA call
    return message.fail(CONVT3D_NOT_SUPPORTED, "no usable CUDA device: %s", cudaGetErrorString(error));
  }
  *device = convt3d_device{10 * major + minor, multiprocessors};
  if (cacheable) {
    uint64_t const capability = static_cast<uint64_t>(device->compute_capability);
    known[ordinal].store(capability << 32 | static_cast<uint64_t>(multiprocessors), std::memory_order_relaxed);
  }
  return CONVT3D_OK;
}

int32_t current_ordinal() {
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) == cudaSuccess) return ordinal;
  cudaGetLastError();
  return -1;
}

#else

int32_t current_ordinal() { return -1; }

Status current_device(convt3d_device*, Message& message) {
  return message.fail(CONVT3D_NOT_SUPPORTED, "this library was built without CUDA");
}

#endif

}  // namespace convt3d
