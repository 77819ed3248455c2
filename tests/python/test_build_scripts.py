# SPDX-License-Identifier: Apache-2.0
"""scripts/: which compiler will do, and which systems a wheel is for."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from load_file import load_file

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name: str) -> Any:
    return load_file(SCRIPTS / f"{name}.py")


find_nvcc = load("find_nvcc")
platform_tag = load("platform_tag").platform_tag


@pytest.fixture
def toolkit(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder that looks like CUDA's, and gives its nvcc."""

    def make(version: str, *, header: bool = True, library: str | None = "lib64") -> Path:
        root = tmp_path / f"cuda-{version}-{header}-{library}"
        nvcc = root / "bin" / "nvcc"
        for folder in ("bin", "include", library or "lib"):
            (root / folder).mkdir(parents=True)
        if header:
            (root / "include" / "cuda_runtime_api.h").touch()
        if library:
            (root / library / "libcudart_static.a").touch()
        nvcc.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release x, V{version}"; exit; fi\n'
            f"echo '#$ TOP={root}/bin/..' >&2; exit 1\n"
        )
        nvcc.chmod(0o755)
        return nvcc

    return make


def test_a_toolkit_is_taken_with_its_folders(toolkit: Callable[..., Path]) -> None:
    nvcc = toolkit("12.5.99", library="lib")
    found = find_nvcc.inspect(nvcc)
    root = nvcc.parents[1]
    assert found == find_nvcc.Toolkit(nvcc, "12.5.99", root, root / "include", root / "lib")


def test_an_old_or_incomplete_toolkit_is_passed_over_with_the_reason(
    toolkit: Callable[..., Path], tmp_path: Path
) -> None:
    silent = tmp_path / "nvcc"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    bad = {
        toolkit("11.8.89"): "version 11.8.89 is older than 12.5",
        toolkit("13.0.1", header=False): "there is no cuda_runtime_api.h under",
        toolkit("13.0.2", library=None): "there is no libcudart_static.a under",
        silent: "it does not answer as nvcc does",
        tmp_path / "absent": "it does not run",
    }
    good = toolkit("13.0.3")
    found, passed_over = find_nvcc.find([*bad, good])
    assert found is not None and found.nvcc == good
    assert len(passed_over) == len(bad)
    for line, (nvcc, reason) in zip(passed_over, bad.items(), strict=True):
        assert line.startswith(f"passing over {nvcc}: {reason}")
    assert find_nvcc.find(bad)[0] is None


def test_the_command_prints_five_fields_or_nothing(toolkit: Callable[..., Path]) -> None:
    def run(nvcc: Path) -> tuple[int, str, str]:
        command = [sys.executable, str(SCRIPTS / "find_nvcc.py"), "--nvcc", str(nvcc)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    nvcc = toolkit("13.0.88")
    root = nvcc.parents[1]
    assert run(nvcc) == (0, f"{nvcc};13.0.88;{root};{root}/include;{root}/lib64\n", "")
    status, out, error = run(toolkit("12.0.1"))
    assert (status, out) == (1, "") and "older than 12.5" in error


def test_candidates_in_their_order(toolkit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named, on_path, package = toolkit("13.0.1"), toolkit("13.0.2"), toolkit("13.0.3")
    monkeypatch.setenv("CUDACXX", str(named))
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=":")
    packages = [package.parents[1]]
    assert list(find_nvcc.candidates(packages))[:2] == [named, on_path]
    assert list(find_nvcc.candidates(packages))[-1] == package
    assert list(find_nvcc.candidates(packages, system=False)) == [package]


class Library:
    def __init__(self, *versions: str, needed: tuple[str, ...] = ("libc.so.6", "libstdc++.so.6")) -> None:
        self._versions, self._needed = set(versions), list(needed)

    def needed(self) -> list[str]:
        return self._needed

    def symbol_versions(self) -> set[str]:
        return self._versions


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        pytest.param(("GLIBC_2.2.5",), "manylinux_2_17", id="never_below_2_17"),
        pytest.param(("GLIBC_2.34", "GLIBCXX_3.4.9"), "manylinux_2_34", id="new_glibc"),
        pytest.param(("GLIBC_2.17", "GLIBCXX_3.4.29"), "manylinux_2_34", id="new_libstdcxx"),
        pytest.param(("GLIBC_2.32", "GLIBCXX_3.4.26", "CXXABI_1.3.9"), "manylinux_2_32", id="both"),
        pytest.param(("GLIBCXX_3.4.20",), "manylinux_2_24", id="between_two_systems"),
        pytest.param(("GCC_12.0.0",), "manylinux_2_35", id="libgcc"),
        pytest.param(("GLIBCXX_3.4.99",), "linux", id="unknown_libstdcxx"),
        pytest.param(("GLIBC_PRIVATE",), "linux", id="private_symbol"),
        pytest.param(("OPENSSL_3.0.0",), "linux", id="another_library"),
    ],
)
def test_platform_tag_heeds_every_runtime(versions: tuple[str, ...], tag: str) -> None:
    assert platform_tag([Library("GLIBC_2.5"), Library(*versions)]) == f"{tag}_{platform.machine()}"


def test_a_foreign_library_makes_no_manylinux_wheel() -> None:
    assert platform_tag([Library(needed=("libpython3.11.so.1.0",))]) == f"linux_{platform.machine()}"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("host", "gtest"), [("true", True), ("false", True), ("true", False)])
def test_the_log_of_make_test_ends_with_the_verdict(tmp_path: Path, host: str, gtest: bool) -> None:
    (tmp_path / "Makefile").write_text((SCRIPTS.parent / "Makefile").read_text())
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "gpu_torch.py").write_text("")
    for name, status in (("setup_env.sh", int(not gtest)), ("build_native.sh", 0)):
        (scripts / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (scripts / name).chmod(0o755)
    parts = ["TEST_CPP=true", f"TEST_HOST={host}", "TEST_PYTHON=true", f"PYTHON={sys.executable}"]
    # Of a make that runs these tests, the inner one would know and name its directory last.
    env = {name: value for name, value in os.environ.items() if name not in {"MAKELEVEL", "MAKEFLAGS"}}
    done = subprocess.run(["make", "test", *parts], cwd=tmp_path, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert "==== Python tests" in lines and "==== build" in lines
    if not gtest:
        assert done.returncode != 0 and lines[-4:-2] == ["==== verdict", "test: Python tests passed"]
        assert "NOT built" in lines[-2] and lines[-1] == "test: FAILED"
    elif host == "false":
        wanted = "test: C++ tests passed, host code under sanitizers FAILED, Python tests passed"
        assert done.returncode != 0 and lines[-3:] == ["==== verdict", wanted, "test: FAILED"]
    else:
        assert done.returncode == 0 and lines[-1] == "test: everything passed"
