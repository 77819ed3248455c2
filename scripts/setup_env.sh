#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the local virtual environment .venv and installs what is asked for:
#
#   scripts/setup_env.sh runtime|test|lint|docs|release|build|cutlass|cuda|gtest|has-gtest...
#
# Does nothing for what is there already. `cuda` brings PyPI's compiler only where the machine has none that can
# build the kernels (or CONVT3D_SYSTEM_CUDA=0 hides it).
# `gtest` is Debian's libgtest-dev: installed with apt-get when run as root, else the command is printed and the
# status is 1. `has-gtest` installs nothing and only says whether it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
requirements=third_party/requirements

say() { printf 'setup: %s\n' "$*"; }

apt_install() {
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "installing $* with apt-get"
    apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
      { apt-get update >/dev/null && apt-get install -y --no-install-recommends "$@" >/dev/null; }
  else
    say "MISSING: please run   apt-get install $*   as root, then try again" >&2
    exit 1
  fi
}

make_venv() {
  [ -x .venv/bin/python ] && return
  say "creating .venv"
  # Debian's python3 comes without ensurepip; its absence leaves a half-made folder behind.
  python3 -c 'import ensurepip' 2>/dev/null || apt_install python3-venv
  python3 -m venv .venv
}

# pip_install <name> <pip arguments...>: at most once for a given state of the requirement files.
pip_install() {
  local name=$1 stamp
  shift
  stamp=.venv/.installed-$name-$(cat $requirements/*.txt | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && return
  say "installing $name packages into .venv"
  .venv/bin/python -m pip install --disable-pip-version-check -qq "$@"
  rm -f .venv/.installed-"$name"-*
  touch "$stamp"
}

has_gtest() {
  printf '#include <gtest/gtest.h>\n' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1
}

for part in "$@"; do
  case $part in gtest | has-gtest) ;; *) make_venv ;; esac
  case $part in
    runtime | lint | docs | release) pip_install "$part" -r "$requirements/$part.txt" ;;
    test)
      pip_install test -r "$requirements/test.txt"
      # Their own requirements would bring packages that no test needs, and might replace the pinned torch.
      pip_install networks --no-deps -r "$requirements/networks.txt"
      ;;
    build)
      pip_install build -r "$requirements/build.txt"
      command -v cmake >/dev/null || pip_install cmake 'cmake>=3.25,<4'
      ;;
    cutlass) [ -n "${CUTLASS_DIR:-}" ] || pip_install cutlass --no-deps -r "$requirements/cutlass.txt" ;;
    cuda) .venv/bin/python scripts/find_nvcc.py >/dev/null || pip_install cuda -r "$requirements/cuda.txt" ;;
    gtest) has_gtest || apt_install libgtest-dev ;;
    has-gtest) has_gtest || { say "GoogleTest is missing (Debian: libgtest-dev)" >&2; exit 1; } ;;
    *) say "unknown part: $part" >&2; exit 2 ;;
  esac
done
