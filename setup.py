# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA libraries with CMake and puts them into the package.

One wheel for every Python: nothing in it is tied to a Python version, so its tag is ``py3-none-<platform>``.
Without a CUDA compiler the result is a pure Python package that runs on the CPU and through ATen; scripts/
build_inputs.py says how that is decided.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import build_inputs  # noqa: E402
from elf import Elf  # noqa: E402
from platform_tag import platform_tag  # noqa: E402


def say(text: str) -> None:
    print(f"convt3d: {text}", file=sys.stderr, flush=True)


def compiler_is_gone(cache: Path) -> bool:
    """Whether a build folder was made with a compiler that pip's temporary environment has taken along."""
    match = re.search(
        r"^CMAKE_CUDA_COMPILER:\w+=(.+)$", cache.read_text() if cache.is_file() else "", re.MULTILINE
    )
    return match is not None and not Path(match[1]).exists()


def native_build(destination: Path) -> None:
    """Builds build/native, reusing what is there, and installs ``_lib`` under ``destination``."""
    cutlass = build_inputs.find_cutlass() or build_inputs.fetch_cutlass()
    torch = build_inputs.find_torch()
    if torch is None:
        raise SystemExit(
            "convt3d: building the CUDA library needs torch 2.10 or newer (its headers and libtorch.so)"
        )
    build = ROOT / "build" / "native"
    if compiler_is_gone(build / "CMakeCache.txt"):
        shutil.rmtree(build)
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t %es] "}
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DCONVT3D_CUDA=ON", "-DCONVT3D_BUILD_TORCH=ON"]
    configure += [
        f"-DCONVT3D_PYTHON={sys.executable}",
        f"-DCUTLASS_DIR={cutlass}",
        f"-DCONVT3D_TORCH_DIR={torch}",
    ]
    if not (build / "CMakeCache.txt").exists():
        # `make test` builds in the same folder: what it has chosen stays.
        configure += ["-DCONVT3D_BUILD_TESTS=OFF", *(["-G", "Ninja"] if shutil.which("ninja") else [])]
        compiler = build_inputs.find_compiler()
        if compiler is not None:
            # Perhaps of the environment around pip's, which CMake cannot see.
            configure.append(f"-DCMAKE_CUDA_COMPILER={compiler.nvcc}")
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 1)
    say("building the CUDA library (minutes, unless it is there already)")
    # CMake's and ninja's lines are the progress: pip shows them with -v, and always when the build fails.
    subprocess.run(configure, check=True, env=environment)
    targets = ["--target", "convt3d", "convt3d_torch"]
    subprocess.run(
        ["cmake", "--build", str(build), "--parallel", jobs, *targets], check=True, env=environment
    )
    install = ["cmake", "--install", str(build), "--component", "python", "--prefix", str(destination)]
    subprocess.run(install, check=True, env=environment)


def install_sources(package: Path) -> None:
    """Puts what convt3d.include_paths() promises into ``_include``: the C interface and the sm80 family."""
    kernels, destination = ROOT / "cutlass_kernels", package / "_include"
    shutil.rmtree(destination, ignore_errors=True)  # of an earlier build
    shutil.copytree(kernels / "include", destination)
    for folder in ("prepare", "sm80"):
        shutil.copytree(kernels / "src" / folder, destination / folder)
    for file in (
        "dependent_launch.hpp",
        "device.cpp",
        "dispatch.hpp",
        "family.hpp",
        "groups.hpp",
        "message.hpp",
    ):
        shutil.copy(kernels / "src" / file, destination)


class BuildPy(build_py):
    """Adds the libraries to the package, in the source tree for an editable installation, and the sources."""

    def run(self) -> None:
        super().run()
        package = ROOT / "python" / "convt3d" if self.editable_mode else Path(self.build_lib) / "convt3d"
        if not self.editable_mode:
            shutil.rmtree(package / "_lib", ignore_errors=True)  # of an earlier build
            install_sources(package)
        if build_inputs.wants_kernels():
            native_build(package)
        else:
            why = (
                "CONVT3D_CUDA=0"
                if build_inputs.cuda_mode() == "off"
                else "no CUDA compiler that can build the kernels on this machine"
            )
            say(
                f"{why}: a package WITHOUT CUDA kernels (CPU, and ATen on GPUs). "
                "CONVT3D_CUDA=1 builds them, with a compiler from PyPI if need be."
            )


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        libraries = sorted(Path(self.bdist_dir).glob("**/_lib/*.so")) if self.bdist_dir else []
        if not build_inputs.wants_kernels():
            return "py3", "none", "any"
        if not libraries:
            # Asked before the files are there (metadata only), pip wants no more than a plausible tag.
            libraries = sorted((ROOT / "build").glob("lib*/convt3d/_lib/*.so"))
        return "py3", "none", platform_tag(map(Elf, libraries))


class ConvT3dDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        # Puts the package into platlib, which is where files with machine code belong.
        return build_inputs.wants_kernels()


setup(distclass=ConvT3dDistribution, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
