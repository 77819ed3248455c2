#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the libraries in build/native and puts them into python/convt3d/_lib, so that the package can be used from
# the source tree. Arguments are passed on to CMake's configure step. PYTHON: the Python whose torch, CUTLASS and
# CUDA packages are used. JOBS: parallel compilations (default: all cores).
#
# Shows one line per compilation, "[done/all seconds]", and the time of the whole build. Installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${CONVT3D_BUILD_DIR:-build/native}
python=$(command -v "${PYTHON:-python3}")
PATH="$(dirname "$python"):$PATH" # ninja and cmake from the same environment
export NINJA_STATUS="[%f/%t %es] "

# A wheel's build may have used a compiler of its temporary environment: such a folder is of no more use.
compiler=$(sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt" 2>/dev/null || true)
if [ -n "$compiler" ] && [ ! -e "$compiler" ]; then
  rm -rf "$build"
fi

generator=()
if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then
  generator=(-G Ninja)
fi

start=$(date +%s)
# The folders that a wheel's build may have left in the cache belong to its temporary environment.
cmake -S . -B "$build" "${generator[@]}" -DCONVT3D_PYTHON="$python" -DCONVT3D_BUILD_TORCH=ON \
  -DCONVT3D_TORCH_DIR= -DCUTLASS_DIR="${CUTLASS_DIR:-}" "$@"
with_cuda=$(sed -n 's/^CONVT3D_BUILT_WITH_CUDA:INTERNAL=//p' "$build/CMakeCache.txt")
if [ "$with_cuda" != ON ]; then
  # Of an earlier build with a compiler: they would pass for what is built now.
  rm -rf python/convt3d/_lib "$build"/cutlass_kernels/libconvt3d.so "$build"/python/csrc/libconvt3d_torch.so
fi
cmake --build "$build" --parallel "${JOBS:-$(nproc)}"
cmake --install "$build" --component python --prefix python/convt3d
seconds=$(($(date +%s) - start))
if [ "$with_cuda" = ON ]; then
  echo "convt3d: CUDA build done in $seconds s: $(cd python/convt3d/_lib && ls -1 *.so | tr '\n' ' ')"
else
  echo "convt3d: host-only build done in $seconds s: no CUDA kernels, see the configure messages above"
fi
