# SPDX-License-Identifier: Apache-2.0
"""The machine code of the kernels as they were built: that the instructions they were written for are in it.

A wgmma or a tensor map that the compiler could not use would leave a kernel right and slow. Needs the built
library and NVIDIA's disassembler (third_party/requirements/test.txt), no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from test_library import built, missing

KERNEL_OF = {
    "sm90": re.compile(r"^_ZN7convt3d4sm90(6stream)?6kernelI"),
    "product": re.compile(r"^_ZN7convt3d4sm907product6kernelI"),
    "sm80": re.compile(r"^_ZN7convt3d4sm8012dgrad_kernelI"),
}


def disassemble(option: str) -> str:
    """What cuobjdump prints of the library's code for SM90."""
    library = built("libconvt3d.so")
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [*(str(p) for p in packages.glob("*/bin")), "/usr/local/cuda/bin", os.environ.get("PATH", "")]
    path = os.pathsep.join(folders)
    program = shutil.which("cuobjdump", path=path)
    if program is None or shutil.which("nvdisasm", path=path) is None:
        missing("cuobjdump and nvdisasm are not installed")
    done = subprocess.run(
        [program, option, "-arch", "sm_90a", str(library)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    """SASS by mangled kernel name."""
    functions = re.split(r"^\s*Function : (\S+)\s*$", disassemble("-sass"), flags=re.MULTILINE)
    return dict(zip(functions[1::2], functions[2::2], strict=True))


@pytest.fixture(scope="module")
def registers() -> dict[str, int]:
    """Of a thread as a kernel starts, by mangled name."""
    usage = re.findall(r"Function (\S+):\s+REG:(\d+)", disassemble("-res-usage"))
    return {name: int(count) for name, count in usage}


def kernels(code: dict[str, str], family: str) -> dict[str, str]:
    found = {name: sass for name, sass in code.items() if KERNEL_OF[family].match(name)}
    assert found, f"no {family} kernel among {len(code)} functions"
    return found


@pytest.mark.parametrize("instruction", ["HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"])
def test_sm90_kernels_use_hoppers_units(code: dict[str, str], instruction: str) -> None:
    """wgmma, tensor-map loads and stores, register reallocation: in every kernel of the family."""
    without = [name for name, sass in kernels(code, "sm90").items() if f" {instruction}" not in sass]
    assert without == []


@pytest.mark.parametrize("instruction", ["HGMMA", "UTMALDG", "USETMAXREG"])
def test_product_kernels_use_hoppers_units(code: dict[str, str], instruction: str) -> None:
    """wgmma, tensor-map loads, register reallocation; their outputs go to memory by ordinary stores."""
    found = kernels(code, "product")
    # Three types; rows, and boxes by one, two or four blocks with channels in pairs or apart.
    assert len(found) == 21, list(found)
    without = {name for name, sass in found.items() if f" {instruction}" not in sass}
    in_clusters = {name for name in found if "WalkBoxesELi2E" in name or "WalkBoxesELi4E" in name}
    assert without == (in_clusters if instruction == "USETMAXREG" else set())


def test_setmaxnreg_goes_the_way_of_its_instruction(code: dict[str, str], registers: dict[str, int]) -> None:
    """.inc to fewer registers than a thread has, or .dec to more, is an illegal instruction on the GPU, and
    no compiler says so. Nor that there are too few for all: then the last ones wait for ever."""
    for name, sass in kernels(code, "product").items():
        if "USETMAXREG" in sass:
            assert registers[name] * 512 == 65536, name  # with three computing warpgroups
    for name, sass in (kernels(code, "sm90") | kernels(code, "product")).items():
        if "USETMAXREG" not in sass:
            continue  # which ones may be without is asserted above
        moves = re.findall(r"USETMAXREG\.(TRY_ALLOC|DEALLOC)\S* (?:UP\d, )?0x([0-9a-f]+)", sass)
        assert len(moves) == len(re.findall(r"\bUSETMAXREG\b", sass)), name
        assert {kind for kind, _ in moves} == {"TRY_ALLOC", "DEALLOC"}, name
        for kind, count in moves:
            more = int(count, 16) - registers[name]
            assert more >= 0 if kind == "TRY_ALLOC" else more <= 0, name


def test_every_type_has_its_own_wgmma(code: dict[str, str]) -> None:
    shapes = {m for sass in kernels(code, "sm90").values() for m in re.findall(r" HGMMA\.(\S+)", sass)}
    for kind in (".TF32", ".BF16"):
        assert any(kind in shape for shape in shapes), (kind, shapes)
    # fp16 is what the name says where it says nothing else.
    assert any(".TF32" not in shape and ".BF16" not in shape for shape in shapes), shapes


def test_sm80_kernels_use_tensor_cores(code: dict[str, str]) -> None:
    without = [name for name, sass in kernels(code, "sm80").items() if " HMMA" not in sass]
    assert without == []


def test_no_kernel_touches_local_memory_in_a_loop_of_products(code: dict[str, str]) -> None:
    """Spills show as local loads and stores between the products."""
    for family, product in (("sm90", " HGMMA"), ("product", " HGMMA"), ("sm80", " HMMA")):
        for name, sass in kernels(code, family).items():
            lines = [line for line in sass.splitlines() if re.search(r"\b(HGMMA|HMMA|LDL|STL)\b", line)]
            products = [i for i, line in enumerate(lines) if product in line]
            between = lines[products[0] : products[-1] + 1]
            assert not [line for line in between if re.search(r"\b(LDL|STL)\b", line)], name


def test_no_kernel_has_an_activation_at_each_of_its_outputs(code: dict[str, str]) -> None:
    """All of them at each of a thread's 128 outputs are 70 thousand instructions, which no cache holds: they
    took eight times as long as their arithmetic."""
    for family in ("sm90", "product"):
        for name, sass in kernels(code, family).items():
            count = len(re.findall(r"^\s+/\*[0-9a-f]{4,6}\*/", sass, flags=re.MULTILINE))
            assert 500 < count < 28_000, (name, count)
