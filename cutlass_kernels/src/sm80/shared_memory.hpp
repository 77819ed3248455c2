// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the current device.
#pragma once

#include <cuda_runtime_api.h>

namespace convt3d::sm80 {

constexpr int kReservedBytes = 1024;  // of each thread block, by the system

struct SharedMemory {
  int of_multiprocessor = 0, of_block = 0;  // bytes; 0 where no device can be asked
};

inline SharedMemory shared_memory() {
  int device = 0;
  SharedMemory room;
  if (cudaGetDevice(&device) != cudaSuccess) return room;
  cudaDeviceGetAttribute(&room.of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&room.of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return room;
}

}  // namespace convt3d::sm80
