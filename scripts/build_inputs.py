# SPDX-License-Identifier: Apache-2.0
"""What a build of the wheel needs beside setuptools, and where it is on this machine.

pip builds in an environment of its own that hides what is installed. The CUDA library needs only *files* of
other packages (CUTLASS's headers, torch's headers, perhaps CUDA's compiler), so they are taken from the
environment that pip was started from where they are there, and asked for where not.

Environment variables:
    CONVT3D_CUDA: auto (kernels where there is a CUDA compiler; the default), 1 (kernels always; the compiler
        from PyPI if need be) or 0 (a pure CPU package).
    CONVT3D_SYSTEM_CUDA: 0 hides the machine's CUDA toolkit.
    CUTLASS_DIR: a CUTLASS checkout.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import find_nvcc

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "third_party" / "requirements"
FETCHED_CUTLASS = ROOT / "build" / "cutlass"
MINIMUM_TORCH = (2, 10)


def cuda_mode() -> str:
    """ "auto", "on" or "off"."""
    value = os.environ.get("CONVT3D_CUDA", "auto").lower()
    for mode, names in {"auto": ("auto", ""), "on": ("1", "on"), "off": ("0", "off")}.items():
        if value in names:
            return mode
    raise SystemExit(f"convt3d: CONVT3D_CUDA must be auto, 1 or 0, not {value!r}")


def _outer_environment() -> dict[str, str]:
    # pip's isolated build puts its overlay, and what hides the rest, on PYTHONPATH.
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}


def package_folders(module: str) -> list[Path]:
    """Folders of an installed module, in this environment or the one around it. Nothing is imported."""
    code = (
        f"import importlib.util as u; s = u.find_spec({module!r}); "
        "print(*(s.submodule_search_locations if s else []), sep='\\n')"
    )
    for environment in (dict(os.environ), _outer_environment()):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/"
        )
        if done.returncode == 0 and done.stdout.strip():
            return [Path(line) for line in done.stdout.split("\n") if line]
    return []


@functools.cache
def find_compiler() -> find_nvcc.Toolkit | None:
    """The machine's toolkit or PyPI's packages, as CMake will find it."""
    system = not find_nvcc.system_is_hidden()
    toolkit, passed_over = find_nvcc.find(find_nvcc.candidates(package_folders("nvidia.cu13"), system))
    for line in passed_over:
        print(f"convt3d: {line}", file=sys.stderr, flush=True)
    return toolkit


def find_torch() -> Path | None:
    """The folder of a torch new enough to build against."""
    for folder in package_folders("torch"):
        version = folder / "version.py"
        match = re.search(r"__version__ = '(\d+)\.(\d+)", version.read_text()) if version.is_file() else None
        if match and tuple(map(int, match.groups())) >= MINIMUM_TORCH:
            return folder
    return None


def find_cutlass() -> Path | None:
    """A folder with include/cutlass/version.h."""
    roots = [Path(os.environ["CUTLASS_DIR"])] if os.environ.get("CUTLASS_DIR") else []
    roots += [folder / "source" for folder in package_folders("cutlass_library")]
    roots.append(FETCHED_CUTLASS / "cutlass_library" / "source")
    return next((r for r in roots if (r / "include" / "cutlass" / "version.h").is_file()), None)


def wants_kernels() -> bool:
    return cuda_mode() == "on" or (cuda_mode() == "auto" and find_compiler() is not None)


def _pins(name: str) -> list[str]:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def build_requirements() -> list[str]:
    """Packages for pip's build environment."""
    if not wants_kernels():
        return []
    found = []
    if shutil.which("cmake") is None:
        found.append("cmake>=3.25,<4")
    if shutil.which("ninja") is None:
        found.append("ninja>=1.11")
    if find_compiler() is None:
        found += _pins("cuda")
    if find_torch() is None:
        found += [pin for pin in _pins("runtime") if pin.startswith("torch==")]
    if find_cutlass() is None:
        found.append("pip")  # to fetch it without what it depends on, see fetch_cutlass
    return found


def fetch_cutlass() -> Path:
    """CUTLASS's headers from PyPI into build/. As a build requirement pip would also install what the package
    depends on: scipy, cuda-python and more, none of which is used."""
    print("convt3d: fetching CUTLASS's headers", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "-qq", "--disable-pip-version-check"]
    requirements = str(REQUIREMENTS / "cutlass.txt")
    done = subprocess.run([*command, "--target", str(FETCHED_CUTLASS), "--upgrade", "-r", requirements])
    root = find_cutlass()
    if done.returncode != 0 or root is None:
        raise SystemExit(
            "convt3d: CUTLASS's headers are missing and could not be fetched. Install them with\n"
            f"    pip install --no-deps -r {requirements}\n"
            "or set CUTLASS_DIR to a checkout, or CONVT3D_CUDA=0 for a package without CUDA kernels."
        )
    return root
