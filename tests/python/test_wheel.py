# SPDX-License-Identifier: Apache-2.0
"""The wheel: its name, what is inside, and that the package in it works.

Built from what the build folder holds already, so this takes seconds after `make test`'s build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import convt3d

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "native" / "cutlass_kernels" / "libconvt3d.so"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path, **environment: str) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder))
    run(sys.executable, "-m", "pip", "wheel", ".", *options, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not BUILT.is_file():
        what = f"{BUILT} was not built"
        if os.environ.get("CONVT3D_REQUIRE_LIBRARY") == "1":
            pytest.fail(what)
        pytest.skip(what)
    return build_wheel(tmp_path_factory.mktemp("wheel"), CONVT3D_CUDA="1")


def test_one_file_for_every_python(wheel: Path) -> None:
    version = re.escape(convt3d.__version__)
    assert re.fullmatch(rf"convt3d-{version}-py3-none-(manylinux_\d+_\d+|linux)_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 20e6


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"convt3d-{convt3d.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        tags = archive.read(f"{info}/WHEEL").decode()
        notices = archive.read(f"{info}/licenses/THIRD_PARTY_NOTICES").decode()
    assert {"convt3d/_lib/libconvt3d.so", "convt3d/_lib/libconvt3d_torch.so", "convt3d/py.typed"} <= set(
        names
    )
    assert f"{info}/licenses/LICENSE" in names
    # Compiled templates of CUTLASS and NVIDIA's runtime are inside: their notices must be, too.
    assert "CUTLASS" in notices and "Redistributions in binary form must reproduce" in notices
    assert "CUDA Runtime" in notices
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python" / "convt3d").rglob("*.py")}
    assert sources <= set(names)
    # Of the C++ and CUDA sources, what convt3d.include_paths() promises, and no more.
    shipped = [n for n in names if n.endswith((".cu", ".cpp", ".hpp", ".h"))]
    assert {"convt3d/_include/convt3d/convt3d.h", "convt3d/_include/sm80/sm80.cu"} <= set(shipped)
    assert all(n.startswith("convt3d/_include/") for n in shipped)
    assert not [n for n in names if n.startswith("tests")]
    assert "Requires-Dist: torch>=2.10" in metadata
    assert "Root-Is-Purelib: false" in tags


USE = """
import ctypes, pathlib, torch, convt3d
home = pathlib.Path(convt3d.__file__).parent
assert home.parent == pathlib.Path({folder!r}), home
x, w = torch.randn(1, 2, 3, 3, 3, dtype=torch.float64), torch.randn(2, 3, 3, 3, 3, dtype=torch.float64)
skip = torch.randn(1, 3, 6, 6, 6, dtype=torch.float64)
y = convt3d.conv_transpose3d(x, w, None, 2, 1, 1, add=skip, activation="relu")
t = torch.nn.functional.conv_transpose3d(x, w, None, 2, 1, 1) + skip
torch.testing.assert_close(y, t.relu())
(include,) = convt3d.include_paths()
assert pathlib.Path(include) == home / "_include" and (home / "_include" / "family.hpp").is_file()
print("libraries:", sorted(p.name for p in home.glob("_lib/*.so")))
if (home / "_lib" / "libconvt3d.so").exists():
    ctypes.CDLL(str(home / "_lib" / "libconvt3d.so"))
"""


def use(wheel: Path, folder: Path) -> str:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(folder),
    )
    run(*pip, str(wheel))
    # Ahead of everything else, also of the source tree that this test itself may run from.
    return run(sys.executable, "-c", USE.format(folder=str(folder)), PYTHONPATH=str(folder))


def test_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    assert "['libconvt3d.so', 'libconvt3d_torch.so']" in use(wheel, tmp_path)


def test_pure_package_without_kernels(wheel: Path, tmp_path: Path) -> None:
    """What a machine without a CUDA compiler builds."""
    pure = build_wheel(tmp_path / "dist", CONVT3D_CUDA="0")
    assert pure.name == f"convt3d-{convt3d.__version__}-py3-none-any.whl"
    assert "libraries: []" in use(pure, tmp_path / "site")


def tracked_files() -> set[str]:
    try:
        done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git, which knows the project's files, is not installed")
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return {name for name in done.stdout.split("\n") if name and (ROOT / name).is_file()}


def test_source_archive_is_complete(tmp_path: Path) -> None:
    """An unpacked archive is a checkout: builds, tests, benchmarks and pages are all in it."""
    tracked = tracked_files()
    code = f"import build_backend; print(build_backend.build_sdist({str(tmp_path)!r}))"
    run(sys.executable, "-c", code, PYTHONPATH=str(ROOT / "scripts"))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert tracked - names == set()
    assert not [name for name in names if name.endswith(".so")]
    assert archive.stat().st_size < 2e6


def test_source_archive_installs(tmp_path: Path) -> None:
    """As `pip install convt3d-*.tar.gz` does it, on a machine without a CUDA compiler."""
    code = f"import build_backend; print(build_backend.build_sdist({str(tmp_path)!r}))"
    run(sys.executable, "-c", code, PYTHONPATH=str(ROOT / "scripts"))
    (archive,) = tmp_path.glob("*.tar.gz")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    )
    site = tmp_path / "site"
    run(*pip, "--target", str(site), str(archive), CONVT3D_CUDA="0")
    out = run(sys.executable, "-c", USE.format(folder=str(site)), PYTHONPATH=str(site))
    assert "libraries: []" in out
