#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds a CUDA compiler that can build the kernels: the one place that decides which nvcc will do.

CMake (third_party/cmake/FindNVCC.cmake), setup_env.sh and the wheel's build (build_inputs.py) ask here, so
that none of them counts on a compiler that another one refuses. A file called nvcc is not enough: its version
and the headers and libraries beside it are looked at, since distributions ship old or incomplete toolkits.

    find_nvcc.py [--no-system] [--nvcc FILE] [--packages FOLDER...]

prints the compiler, its version, the toolkit's folder, its headers' and its libraries' folder, separated by
";", and ends with status 0; or prints nothing and ends with status 1. What was passed over, and why, goes to
stderr.
Standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# sm_90a's instructions need 12.3 or newer to compile well; CUTLASS 4 asks for 12 at least.
MINIMUM = (12, 5)  # cudaGetDriverEntryPointByVersion


@dataclass(frozen=True)
class Toolkit:
    """``include`` and ``library`` are the folders of cuda_runtime_api.h and libcudart_static.a."""

    nvcc: Path
    version: str
    root: Path
    include: Path
    library: Path


class Unusable(Exception):
    """Why a compiler will not do."""


def _ask(nvcc: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([str(nvcc), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unusable(f"it does not run ({error})") from error
    return done.stdout + done.stderr


def inspect(nvcc: Path) -> Toolkit:
    """The toolkit around a compiler. Raises Unusable with the reason where it cannot build the kernels."""
    version = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", _ask(nvcc, "--version"))
    # nvcc says where it lives, also where PATH holds a wrapper script (then fails: there is no such file).
    root_line = re.search(r"^#\$ TOP=(.+)$", _ask(nvcc, "-v", "__convt3d_where"), re.MULTILINE)
    if version is None or root_line is None:
        raise Unusable("it does not answer as nvcc does")
    found = ".".join(version.groups())
    if tuple(map(int, version.groups()[:2])) < MINIMUM:
        raise Unusable(f"version {found} is older than {MINIMUM[0]}.{MINIMUM[1]}")
    root = Path(os.path.normpath(root_line[1].strip()))
    target = f"targets/{platform.machine()}-linux"
    # `lib64` in a toolkit, `lib` in PyPI's packages, `targets` in a distribution's or a cross toolkit.
    libraries = [root / name for name in ("lib64", "lib", f"{target}/lib", "targets/sbsa-linux/lib")]
    library = next((folder for folder in libraries if (folder / "libcudart_static.a").is_file()), None)
    headers = [root / "include", root / target / "include", root / "targets/sbsa-linux/include"]
    include = next((folder for folder in headers if (folder / "cuda_runtime_api.h").is_file()), None)
    if library is None or include is None:
        missing = "libcudart_static.a" if library is None else "cuda_runtime_api.h"
        raise Unusable(f"there is no {missing} under {root}")
    return Toolkit(nvcc, found, root, include, library)


def candidates(packages: Iterable[Path], system: bool = True) -> Iterator[Path]:
    """Where a compiler may be: CUDACXX, PATH, /usr/local/cuda, then folders of PyPI's nvidia.cu13."""
    names: list[str | None] = []
    if system:
        names += [os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"]
    names += [str(folder / "bin" / "nvcc") for folder in packages]
    paths = [shutil.which(name) for name in names if name]
    yield from dict.fromkeys(Path(path) for path in paths if path)


def find(paths: Iterable[Path]) -> tuple[Toolkit | None, list[str]]:
    """The first usable toolkit, and a line for each compiler that was passed over before it."""
    passed_over = []
    for nvcc in paths:
        try:
            return inspect(nvcc), passed_over
        except Unusable as reason:
            passed_over.append(f"passing over {nvcc}: {reason}")
    return None, passed_over


def system_is_hidden() -> bool:
    return os.environ.get("CONVT3D_SYSTEM_CUDA") == "0"


def main() -> int:
    parser = argparse.ArgumentParser(description="Finds a CUDA compiler that can build the kernels.")
    parser.add_argument("--no-system", action="store_true", help="hide the machine's own toolkit")
    parser.add_argument("--nvcc", type=Path, help="consider this one alone")
    parser.add_argument("--packages", type=Path, nargs="*", default=[], help="folders of PyPI's nvidia.cu13")
    arguments = parser.parse_args()
    if arguments.nvcc is not None:
        paths = [arguments.nvcc]
    else:
        paths = list(candidates(arguments.packages, not (arguments.no_system or system_is_hidden())))
    toolkit, passed_over = find(paths)
    print(*passed_over, sep="\n", end="\n" if passed_over else "", file=sys.stderr)
    if toolkit is None:
        return 1
    fields = (toolkit.nvcc, toolkit.version, toolkit.root, toolkit.include, toolkit.library)
    print(*fields, sep=";")
    return 0


if __name__ == "__main__":
    sys.exit(main())
