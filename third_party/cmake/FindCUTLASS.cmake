# SPDX-License-Identifier: Apache-2.0
#
# Finds CUTLASS's headers: CUTLASS_DIR (a checkout or an installation; CMake or environment variable), or the
# folder that the PyPI package nvidia-cutlass keeps them in.
#
# Sets CUTLASS_FOUND, CUTLASS_VERSION, CUTLASS_INCLUDE_DIR and CUTLASS_UTIL_INCLUDE_DIR, and defines the targets
# CUTLASS::CUTLASS (headers) and CUTLASS::util (host references and other tools, for tests).
include(Convt3dPython)
include(FindPackageHandleStandardArgs)

set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "A CUTLASS checkout; empty: search Python's packages")
if(CUTLASS_DIR)
  set(_cutlass_roots "${CUTLASS_DIR}")
  set(_cutlass_only NO_DEFAULT_PATH)
else()
  convt3d_python_package(_cutlass_package cutlass_library)
  set(_cutlass_roots "")
  if(_cutlass_package)
    set(_cutlass_roots "${_cutlass_package}/source")
  endif()
  set(_cutlass_only "")
endif()

# A folder found once is kept in the cache; forget it when it has gone, as a temporary build environment does.
if(CUTLASS_INCLUDE_DIR AND NOT EXISTS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h")
  unset(CUTLASS_INCLUDE_DIR CACHE)
  unset(CUTLASS_UTIL_INCLUDE_DIR CACHE)
endif()
find_path(CUTLASS_INCLUDE_DIR cutlass/version.h HINTS ${_cutlass_roots} PATH_SUFFIXES include ${_cutlass_only})
find_path(CUTLASS_UTIL_INCLUDE_DIR cutlass/util/reference/host/convolution.h HINTS ${_cutlass_roots}
          PATH_SUFFIXES tools/util/include include ${_cutlass_only})
mark_as_advanced(CUTLASS_INCLUDE_DIR CUTLASS_UTIL_INCLUDE_DIR)

set(CUTLASS_VERSION "")
if(CUTLASS_INCLUDE_DIR)
  file(STRINGS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h" _cutlass_lines REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) ")
  foreach(_part MAJOR MINOR PATCH)
    string(REGEX MATCH "CUTLASS_${_part} +([0-9]+)" _match "${_cutlass_lines}")
    set(_cutlass_${_part} "${CMAKE_MATCH_1}")
  endforeach()
  set(CUTLASS_VERSION "${_cutlass_MAJOR}.${_cutlass_MINOR}.${_cutlass_PATCH}")
endif()

find_package_handle_standard_args(
  CUTLASS
  REQUIRED_VARS CUTLASS_INCLUDE_DIR
  VERSION_VAR CUTLASS_VERSION
  REASON_FAILURE_MESSAGE
    "install the headers with `pip install --no-deps -r third_party/requirements/cutlass.txt`, or set CUTLASS_DIR")

if(CUTLASS_FOUND AND NOT TARGET CUTLASS::CUTLASS)
  add_library(CUTLASS::CUTLASS INTERFACE IMPORTED GLOBAL)
  target_include_directories(CUTLASS::CUTLASS SYSTEM INTERFACE "${CUTLASS_INCLUDE_DIR}")
  add_library(CUTLASS::util INTERFACE IMPORTED GLOBAL)
  target_link_libraries(CUTLASS::util INTERFACE CUTLASS::CUTLASS)
  if(CUTLASS_UTIL_INCLUDE_DIR)
    target_include_directories(CUTLASS::util SYSTEM INTERFACE "${CUTLASS_UTIL_INCLUDE_DIR}")
  endif()
endif()
