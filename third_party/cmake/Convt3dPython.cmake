# SPDX-License-Identifier: Apache-2.0
#
# Python here is only a way to find files: packages on PyPI carry CUTLASS's headers, CUDA's compiler and torch's
# headers. No package is imported, so a broken or GPU-only installation does no harm.
include_guard(GLOBAL)

set(CONVT3D_PYTHON "" CACHE FILEPATH "Python whose packages are searched first")

# convt3d_pythons(<out>): the Pythons of this machine that are asked, in this order.
function(convt3d_pythons out)
  find_program(CONVT3D_SYSTEM_PYTHON NAMES python3 python)
  mark_as_advanced(CONVT3D_SYSTEM_PYTHON)
  set(found "")
  foreach(python IN ITEMS "${CONVT3D_PYTHON}" "$ENV{VIRTUAL_ENV}/bin/python"
                          "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../.venv/bin/python" "${CONVT3D_SYSTEM_PYTHON}")
    if(python AND EXISTS "${python}")
      list(APPEND found "${python}")
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# convt3d_python_package(<out> <module>): the folder of an installed module in the first Python that has it, or
# "". A namespace package such as `nvidia` can have several folders: <out> is then a list.
function(convt3d_python_package out module)
  set(code "import importlib.util as u; s = u.find_spec('${module}'); print(';'.join(s.submodule_search_locations) if s else '')")
  set(folders "")
  convt3d_pythons(pythons)
  foreach(python IN LISTS pythons)
    if(NOT folders)
      # -P/-I would also hide an installation overlay given by PYTHONPATH, as pip's isolated builds do.
      execute_process(COMMAND "${python}" -c "${code}" OUTPUT_VARIABLE folders ERROR_QUIET
                      OUTPUT_STRIP_TRAILING_WHITESPACE WORKING_DIRECTORY "${CMAKE_BINARY_DIR}")
    endif()
  endforeach()
  set(${out} "${folders}" PARENT_SCOPE)
endfunction()
