# SPDX-License-Identifier: Apache-2.0
#
# Finds a CUDA compiler before the CUDA language is enabled. The machine's own toolkit comes first
# (CMAKE_CUDA_COMPILER, CUDACXX, PATH, /usr/local/cuda), then PyPI's packages (third_party/requirements/cuda.txt),
# which unpack to site-packages/nvidia/cu13.
#
# CONVT3D_SYSTEM_CUDA=OFF (CMake), =0 (environment) skips the machine's toolkit.
#
# Sets NVCC_FOUND, NVCC_EXECUTABLE, NVCC_VERSION, NVCC_ROOT (the toolkit's folder), NVCC_INCLUDE_DIR and
# NVCC_LIBRARY_DIR (the folder of libcudart_static.a: `lib64` in a toolkit, `lib` in PyPI's packages).
include(Convt3dPython)
include(FindPackageHandleStandardArgs)

set(_nvcc_system ON)
if("$ENV{CONVT3D_SYSTEM_CUDA}" STREQUAL "0")
  set(_nvcc_system OFF)
endif()
option(CONVT3D_SYSTEM_CUDA "Use a CUDA toolkit that is installed on the machine" ${_nvcc_system})

# _nvcc_describe(<nvcc>): sets the result variables of a compiler that can be used, and leaves them otherwise.
macro(_nvcc_describe candidate)
  # nvcc prints where it lives, also when PATH holds a wrapper script; CMake itself asks in this way.
  execute_process(COMMAND "${candidate}" -v __convt3d_where OUTPUT_VARIABLE _nvcc_out ERROR_VARIABLE _nvcc_out)
  execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE _nvcc_release ERROR_QUIET)
  if(_nvcc_out MATCHES "TOP=([^\r\n]+)" AND _nvcc_release MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
    string(REGEX MATCH "V([0-9]+\\.[0-9]+\\.[0-9]+)" _match "${_nvcc_release}")
    set(_nvcc_version "${CMAKE_MATCH_1}")
    string(REGEX MATCH "TOP=([^\r\n]+)" _match "${_nvcc_out}")
    get_filename_component(_nvcc_root "${CMAKE_MATCH_1}" ABSOLUTE)
    unset(_nvcc_cudart)
    foreach(_dir lib64 lib targets/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux/lib targets/sbsa-linux/lib)
      if(NOT _nvcc_cudart AND EXISTS "${_nvcc_root}/${_dir}/libcudart_static.a")
        set(_nvcc_cudart "${_nvcc_root}/${_dir}")
      endif()
    endforeach()
    if(NOT _nvcc_cudart OR NOT EXISTS "${_nvcc_root}/include/cuda_runtime_api.h")
      message(STATUS "Passing over ${candidate}: no cuda_runtime_api.h or libcudart_static.a under ${_nvcc_root}")
    elseif(NVCC_FIND_VERSION AND _nvcc_version VERSION_LESS NVCC_FIND_VERSION)
      message(STATUS "Passing over ${candidate}: version ${_nvcc_version} is older than ${NVCC_FIND_VERSION}")
    else()
      set(NVCC_EXECUTABLE "${candidate}")
      set(NVCC_VERSION "${_nvcc_version}")
      set(NVCC_ROOT "${_nvcc_root}")
      set(NVCC_INCLUDE_DIR "${_nvcc_root}/include")
      set(NVCC_LIBRARY_DIR "${_nvcc_cudart}")
    endif()
  endif()
endmacro()

unset(NVCC_EXECUTABLE)
set(_nvcc_candidates "")
if(CMAKE_CUDA_COMPILER)
  list(APPEND _nvcc_candidates "${CMAKE_CUDA_COMPILER}")
elseif(CONVT3D_SYSTEM_CUDA)
  find_program(_nvcc_on_path nvcc NO_CACHE)
  list(APPEND _nvcc_candidates "$ENV{CUDACXX}" "${_nvcc_on_path}" /usr/local/cuda/bin/nvcc)
endif()
if(NOT CMAKE_CUDA_COMPILER)
  convt3d_python_package(_nvcc_packages nvidia.cu13)
  foreach(_dir IN LISTS _nvcc_packages)
    list(APPEND _nvcc_candidates "${_dir}/bin/nvcc")
  endforeach()
endif()
foreach(_nvcc IN LISTS _nvcc_candidates)
  if(NOT NVCC_EXECUTABLE AND EXISTS "${_nvcc}")
    _nvcc_describe("${_nvcc}")
  endif()
endforeach()

find_package_handle_standard_args(
  NVCC
  REQUIRED_VARS NVCC_EXECUTABLE NVCC_LIBRARY_DIR
  VERSION_VAR NVCC_VERSION
  REASON_FAILURE_MESSAGE
    "no CUDA toolkit on this machine, and `pip install -r third_party/requirements/cuda.txt` would bring a compiler")
