# SPDX-License-Identifier: Apache-2.0
#
# What every part of the build shares: version, build type, warnings, options.
include_guard(GLOBAL)

# The one place of the version is the Python package.
set(_convt3d_version_file "${CMAKE_CURRENT_LIST_DIR}/../../python/convt3d/_version.py")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_convt3d_version_file}")
file(STRINGS "${_convt3d_version_file}" _convt3d_version_line REGEX "^__version__ = ")
if(NOT _convt3d_version_line MATCHES "\"([0-9]+\\.[0-9]+\\.[0-9]+)\"")
  message(FATAL_ERROR "no __version__ = \"x.y.z\" in ${_convt3d_version_file}")
endif()
set(CONVT3D_VERSION "${CMAKE_MATCH_1}")

option(CONVT3D_BUILD_TESTS "Build the C++ tests (needs GoogleTest)" ON)
option(CONVT3D_BUILD_TORCH "Build the torch binding (needs torch's headers, 2.10 or newer)" OFF)
set(CONVT3D_SANITIZE "" CACHE STRING "Sanitizers for host code, as for -fsanitize=: address,undefined. For tests only")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(convt3d_warnings INTERFACE)
target_compile_options(convt3d_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)

if(CONVT3D_SANITIZE)
  # A finding must end the test: by default undefined behaviour is printed and goes on. -O1, said after the build
  # type's own level, keeps stack traces true and the build short.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${CONVT3D_SANITIZE};-fno-sanitize-recover=all>"
                      "$<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer;-O1;-g>")
  add_link_options("-fsanitize=${CONVT3D_SANITIZE}")
endif()
