# SPDX-License-Identifier: Apache-2.0
#
# Finds a CUDA compiler before the CUDA language is enabled. scripts/find_nvcc.py decides which one will do, here and
# for the wheel's build: the machine's own toolkit first (CMAKE_CUDA_COMPILER, CUDACXX, PATH, /usr/local/cuda), then
# PyPI's packages (third_party/requirements/cuda.txt), which unpack to site-packages/nvidia/cu13.
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

set(_nvcc_arguments "")
if(CMAKE_CUDA_COMPILER)
  list(APPEND _nvcc_arguments --nvcc "${CMAKE_CUDA_COMPILER}")
else()
  if(NOT CONVT3D_SYSTEM_CUDA)
    list(APPEND _nvcc_arguments --no-system)
  endif()
  convt3d_python_package(_nvcc_packages nvidia.cu13)
  list(APPEND _nvcc_arguments --packages ${_nvcc_packages})
endif()

unset(NVCC_EXECUTABLE)
unset(NVCC_LIBRARY_DIR)
set(_nvcc_reason
    "no CUDA toolkit on this machine, and `pip install -r third_party/requirements/cuda.txt` would bring a compiler")
convt3d_pythons(_nvcc_pythons)
if(_nvcc_pythons)
  list(GET _nvcc_pythons 0 _nvcc_python)
  execute_process(COMMAND "${_nvcc_python}" "${CMAKE_CURRENT_LIST_DIR}/../../scripts/find_nvcc.py" ${_nvcc_arguments}
                  OUTPUT_VARIABLE _nvcc_found ERROR_VARIABLE _nvcc_passed_over OUTPUT_STRIP_TRAILING_WHITESPACE
                  ERROR_STRIP_TRAILING_WHITESPACE)
  if(_nvcc_passed_over)
    message(STATUS "convt3d: ${_nvcc_passed_over}")
  endif()
  list(LENGTH _nvcc_found _nvcc_fields)
  if(_nvcc_fields EQUAL 5)
    list(GET _nvcc_found 0 NVCC_EXECUTABLE)
    list(GET _nvcc_found 1 NVCC_VERSION)
    list(GET _nvcc_found 2 NVCC_ROOT)
    list(GET _nvcc_found 3 NVCC_INCLUDE_DIR)
    list(GET _nvcc_found 4 NVCC_LIBRARY_DIR)
  endif()
else()
  set(_nvcc_reason "no Python 3, which looks for the compiler: name one with -DCONVT3D_PYTHON=<python>")
  message(STATUS "convt3d: ${_nvcc_reason}")
endif()

find_package_handle_standard_args(NVCC REQUIRED_VARS NVCC_EXECUTABLE NVCC_LIBRARY_DIR VERSION_VAR NVCC_VERSION
                                  REASON_FAILURE_MESSAGE "${_nvcc_reason}")
