# SPDX-License-Identifier: Apache-2.0
#
# Decides once per build whether CUDA code is built, and enables the language if so. Included by the root and by
# cutlass_kernels/ (which can be built alone), in the scope that both use. Sets CONVT3D_WITH_CUDA.
include_guard(GLOBAL)

set(CONVT3D_CUDA "AUTO" CACHE STRING "Build the CUDA kernels: AUTO (where a compiler is found), ON or OFF")
set_property(CACHE CONVT3D_CUDA PROPERTY STRINGS AUTO ON OFF)

set(CONVT3D_WITH_CUDA OFF)
if(CONVT3D_CUDA STREQUAL "AUTO" OR CONVT3D_CUDA)
  find_package(NVCC QUIET)
  find_package(CUTLASS 4.2 QUIET)
  if(NVCC_FOUND AND CUTLASS_FOUND)
    set(CONVT3D_WITH_CUDA ON)
  else()
    set(_convt3d_missing "")
    if(NOT NVCC_FOUND)
      string(APPEND _convt3d_missing
             "\n  a CUDA compiler (12.5 or newer): a toolkit, or `pip install -r third_party/requirements/cuda.txt`")
    endif()
    if(NOT CUTLASS_FOUND)
      string(APPEND _convt3d_missing "\n  CUTLASS (4.2 or newer): CUTLASS_DIR, or `pip install --no-deps -r "
             "third_party/requirements/cutlass.txt`")
    endif()
    if(CONVT3D_CUDA STREQUAL "AUTO")
      message(STATUS "convt3d: NO CUDA KERNELS in this build, only the host code and its tests. Missing:${_convt3d_missing}")
    else()
      message(FATAL_ERROR "convt3d: CONVT3D_CUDA=${CONVT3D_CUDA}, but this is missing:${_convt3d_missing}")
    endif()
  endif()
endif()

# For build_native.sh, which reports it: libraries of an earlier build may still lie about.
set(CONVT3D_BUILT_WITH_CUDA "${CONVT3D_WITH_CUDA}" CACHE INTERNAL "Whether the last configuration builds the kernels")

if(CONVT3D_WITH_CUDA)
  set(CMAKE_CUDA_COMPILER "${NVCC_EXECUTABLE}")
  # PyPI's nvcc looks for its runtime in lib64 while the package has lib: CMake's compiler test must link too.
  set(ENV{LIBRARY_PATH} "${NVCC_LIBRARY_DIR}:$ENV{LIBRARY_PATH}")
  # Every target names its own. CMake would otherwise settle for the compiler's default, sm_75.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80)
  endif()
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  message(STATUS "convt3d: CUDA ${NVCC_VERSION} (${NVCC_ROOT}), CUTLASS ${CUTLASS_VERSION} (${CUTLASS_INCLUDE_DIR})")
endif()
