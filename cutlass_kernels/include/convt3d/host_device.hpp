// SPDX-License-Identifier: Apache-2.0
//
// One spelling for functions that run on both sides. Empty for a plain C++ compiler, so that the
// mathematics of this folder is tested on machines without a CUDA toolkit.
#pragma once

#if defined(__CUDACC__)
#define CONVT3D_HOST_DEVICE __host__ __device__ __forceinline__
// nvcc warns when a __host__ __device__ template is instantiated with a callable of one side only, although
// no such call is ever made from the other side. Placed before the template, this switches that check off.
#define CONVT3D_NO_EXEC_CHECK _Pragma("nv_exec_check_disable")
#else
#define CONVT3D_HOST_DEVICE inline
#define CONVT3D_NO_EXEC_CHECK
#endif
