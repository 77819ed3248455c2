# SPDX-License-Identifier: Apache-2.0
"""The libraries as they were built: what they export and need, the GPU code inside, the C API.

Needs no GPU. Where the libraries were not built these tests are skipped, except under
CONVT3D_REQUIRE_LIBRARY=1 (which `make test` sets), where that is a failure.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import convt3d
from convt3d import _kernel_query
from load_file import load_file

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "cutlass_kernels" / "include" / "convt3d" / "convt3d.h"
HEADERS = tuple(HEADER.with_name(f"convt3d{part}.h") for part in ("", "_backward", "_copy", "_launch"))
SOURCES = ROOT / "cutlass_kernels" / "src"
PTXAS_REPORTS = ROOT / os.environ.get("CONVT3D_BUILD_DIR", "build/native") / "ptxas"
LIB_DIR = Path(convt3d.__file__).parent / "_lib"

OK, INVALID_ARGUMENT, NOT_SUPPORTED = 0, 1, 2
AUTO, SM80, SM90 = 0, 1, 2
F32, F16, BF16 = 0, 1, 2
IEEE, TF32 = 0, 1


elf = load_file(ROOT / "scripts" / "elf.py")


def missing(what: str) -> NoReturn:
    if os.environ.get("CONVT3D_REQUIRE_LIBRARY") == "1":
        pytest.fail(what)
    pytest.skip(what)


def built(name: str) -> Path:
    path = LIB_DIR / name
    if not path.is_file():
        missing(f"{path} was not built")
    return path


@pytest.fixture(scope="module")
def kernels() -> Any:
    return elf.Elf(built("libconvt3d.so"))


@pytest.fixture(scope="module")
def binding() -> Any:
    return elf.Elf(built("libconvt3d_torch.so"))


# --- what the files need and give ---


def test_the_binding_builds_under_older_torch() -> None:
    """torch 2.11 has no macro of this name; there the binding is built against the machine's own torch."""
    for path in (ROOT / "python" / "csrc").iterdir():
        assert "STABLE_TORCH_ERROR_CODE_CHECK" not in path.read_text(), path.name


def test_binding_uses_only_the_stable_abi(binding: Any) -> None:
    """Otherwise one wheel could not serve every torch from 2.10 on."""
    names = [name for name, _ in binding.symbols()]
    # In mangled names a namespace is its length and its name.
    unstable = [n for n in names if re.search(r"[A-Z](3c10|2at)(?=\d|[A-Z])", n)]
    assert unstable == []
    foreign = [n for n, defined in binding.symbols() if not defined and "torch" in n]
    assert foreign and all(n.startswith(("aoti_torch_", "torch_")) for n in foreign), foreign


def test_binding_finds_its_neighbour_and_needs_no_python_or_cuda(binding: Any) -> None:
    assert binding.runpath() == ["$ORIGIN"]
    needed = binding.needed()
    assert {"libconvt3d.so", "libtorch.so"} <= set(needed)
    assert not [n for n in needed if re.match(r"lib(python|cuda|cudart|c10|torch_)", n)], needed


def test_kernels_need_no_driver_no_runtime_and_no_torch(kernels: Any) -> None:
    """So that the library loads everywhere; CUDA's runtime is inside, the driver is opened when used."""
    allowed = re.compile(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux-[a-z0-9-]+)\.so")
    assert all(map(allowed.match, kernels.needed())), kernels.needed()


def declared_functions() -> set[str]:
    headers = "".join(path.read_text() for path in HEADERS)
    return set(re.findall(r"CONVT3D_API [\w \*]+?\b(convt3d_\w+)\(", headers))


def test_kernels_export_the_c_interface_and_nothing_else(kernels: Any) -> None:
    declared = declared_functions()
    assert len(declared) >= 14
    exported = {name for name, defined in kernels.symbols() if defined and name}
    assert {n for n in exported if not n.startswith("_")} == declared


# --- GPU code ---


def test_gpu_code_for_sm80_and_sm90a(kernels: Any) -> None:
    code = {(c.kind, c.architecture) for c in kernels.gpu_code()}
    assert ("elf", "80") in code
    assert ("elf", "90a") in code
    # Compiled for plain sm_90, Hopper's kernels build in silence and lack wgmma.
    assert ("elf", "90") not in code
    # What GPUs newer than Hopper compile at load time.
    assert ("ptx", "80") in code


def cuda_sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.cu"))


def report_of(source: Path) -> str:
    """What ptxas said about a source's kernels in the last build."""
    tail = "src_" + str(source.relative_to(SOURCES)).replace("/", "_") + ".o.log"
    found = [p for p in PTXAS_REPORTS.glob("*.log") if p.name.endswith(tail)]
    if not found:
        missing(f"no compiler report for {source.name} under {PTXAS_REPORTS}")
    return max(found, key=lambda p: p.stat().st_mtime).read_text()


ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@pytest.mark.parametrize("source", cuda_sources(), ids=lambda p: str(p.relative_to(SOURCES)))
def test_no_kernel_spills(source: Path) -> None:
    built("libconvt3d.so")
    report = report_of(source)
    kernels = list(ENTRY.finditer(report))
    assert len(kernels) == report.count("Compiling entry function"), "the report was not understood"
    if source.parent.name == "instances":  # there for its kernels
        assert kernels, "no kernel in the report"
    spills = [k.groupdict() for k in kernels if int(k["stores"]) + int(k["loads"]) > 0]
    assert spills == []


@pytest.mark.parametrize("source", cuda_sources(), ids=lambda p: str(p.relative_to(SOURCES)))
def test_no_wgmma_is_serialised(source: Path) -> None:
    """ptxas waits behind every wgmma where it finds no other way, and says why (C7510 to C7520)."""
    built("libconvt3d.so")
    found = [line for line in report_of(source).splitlines() if "serialized" in line]
    assert found == []


def test_every_family_has_kernels_in_the_report() -> None:
    built("libconvt3d.so")
    architectures: dict[str, set[str]] = {}
    for source in cuda_sources():
        family = source.relative_to(SOURCES).parts[0]
        architectures.setdefault(family, set()).update(k["arch"] for k in ENTRY.finditer(report_of(source)))
    assert architectures["sm80"] == {"sm_80", "sm_90a"}
    assert architectures["prepare"] == {"sm_80", "sm_90a"}
    assert architectures.get("sm90", {"sm_90a"}) == {"sm_90a"}


# --- the C interface, through ctypes ---

C_TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
}


def c_struct(name: str) -> type[ctypes.Structure]:
    """A struct of the header as ctypes sees it: the header is the only place where it is written down."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", text, re.DOTALL)
    assert body is not None
    fields: list[tuple[str, Any]] = []
    for kind, field, length in re.findall(r"(\w+) (\w+)(?:\[(\d+)\])?;", body[1]):
        fields.append((field, C_TYPES[kind] * int(length) if length else C_TYPES[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Problem, Device, Plan = c_struct("convt3d_problem"), c_struct("convt3d_device"), c_struct("convt3d_plan")
H200 = Device(compute_capability=90, multiprocessors=132)
A100 = Device(compute_capability=80, multiprocessors=108)
TURING = Device(compute_capability=75, multiprocessors=40)


@pytest.fixture(scope="module")
def library() -> Any:
    lib = ctypes.CDLL(str(built("libconvt3d.so")))
    lib.convt3d_version.restype = ctypes.c_char_p
    lib.convt3d_kernel_name.restype = ctypes.c_char_p
    lib.convt3d_activation_name.restype = ctypes.c_char_p
    return lib


@pytest.mark.parametrize("name", ["convt3d_problem", "convt3d_device", "convt3d_plan"])
def test_package_describes_the_same_structs(name: str) -> None:
    """The package repeats the header's structs for ctypes; a drift would hand the library garbage."""
    ours = {"convt3d_problem": "_CProblem", "convt3d_device": "_CDevice", "convt3d_plan": "_CPlan"}[name]
    package, header = getattr(_kernel_query, ours), c_struct(name)
    assert [field for field, _ in package._fields_] == [field for field, _ in header._fields_]
    layout = [(getattr(header, f).offset, getattr(header, f).size) for f, _ in header._fields_]
    assert [(getattr(package, f).offset, getattr(package, f).size) for f, _ in package._fields_] == layout


def ask(function: Any, *arguments: Any) -> tuple[int, str]:
    """Calls a function whose last two parameters are the message and its capacity."""
    message = ctypes.create_string_buffer(256)
    converted = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]
    status = function(*converted, message, ctypes.c_size_t(len(message)))
    return status, message.value.decode()


def dense(shape: list[int], channels_last: bool) -> list[int]:
    order = [1, 4, 3, 2, 0] if channels_last else [4, 3, 2, 1, 0]
    strides, step = [0] * 5, 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return strides


def reference(channels_last: bool = True, **changes: Any) -> Any:
    """x (128, 32, 16, 16, 16) -> y (128, 64, 32, 32, 32): k3 s2 p1 op1, bias, add, x_hardswish."""
    p = Problem(batch=128, in_channels=32, out_channels=64, groups=1, has_bias=1, has_add=1, activation=10)
    p.dtype, p.precision = F32, TF32
    p.x_alignment = p.add_alignment = p.y_alignment = 16
    for name, value in (
        ("in_size", 16),
        ("kernel", 3),
        ("stride", 2),
        ("padding", 1),
        ("output_padding", 1),
        ("dilation", 1),
    ):
        setattr(p, name, (value,) * 3)
    for name, value in changes.items():
        setattr(p, name, value)
    out = [
        (p.in_size[i] - 1) * p.stride[i]
        - 2 * p.padding[i]
        + p.dilation[i] * (p.kernel[i] - 1)
        + p.output_padding[i]
        + 1
        for i in range(3)
    ]
    p.x_stride = tuple(dense([p.batch, p.in_channels, *p.in_size], channels_last))
    p.weight_stride = tuple(dense([p.in_channels, p.out_channels, *p.kernel], False))
    p.y_stride = p.add_stride = tuple(dense([p.batch, p.out_channels, *out], channels_last))
    p.bias_stride = 1
    return p


def test_version(library: Any) -> None:
    assert library.convt3d_version().decode() == convt3d.__version__


def test_names(library: Any) -> None:
    assert [library.convt3d_kernel_name(k) for k in (SM80, SM90, 99)] == [b"sm80", b"sm90", None]
    assert library.convt3d_activation_name(0) == b"none"
    assert library.convt3d_activation_name(10) == b"x_hardswish"
    assert library.convt3d_activation_name(11) is None


def test_output_size(library: Any) -> None:
    out = (ctypes.c_int64 * 3)()
    assert ask(library.convt3d_output_size, reference(), out) == (OK, "")
    assert list(out) == [32, 32, 32]


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("channels_last", [True, False])
def test_reference_is_valid_and_supported(library: Any, dtype: int, channels_last: bool) -> None:
    problem = reference(channels_last, dtype=dtype)
    assert ask(library.convt3d_validate, problem) == (OK, "")
    for device in (H200, A100):
        assert ask(library.convt3d_supported, problem, SM80, device) == (OK, "")


@pytest.mark.parametrize("precision", [IEEE, TF32])
def test_plan(library: Any, precision: int) -> None:
    plan = Plan()
    assert ask(library.convt3d_make_plan, reference(precision=precision), SM80, A100, plan) == (OK, "")
    assert plan.kernel == SM80
    # At least the weights, prepared; at most a few copies of x besides.
    assert 27 * 32 * 64 * 4 <= plan.workspace_bytes <= 4 * 128 * 32 * 16**3 * 4
    assert ask(library.convt3d_make_plan, reference(precision=precision), AUTO, H200, plan) == (OK, "")
    assert plan.kernel in (SM80, SM90)


def test_older_gpus_are_refused_with_a_reason(library: Any) -> None:
    plan = Plan()
    for function in (
        lambda: ask(library.convt3d_supported, reference(), SM80, TURING),
        lambda: ask(library.convt3d_make_plan, reference(), AUTO, TURING, plan),
    ):
        status, message = function()
        assert status == NOT_SUPPORTED
        assert message
    # Hopper's instructions are not on an A100.
    status, message = ask(library.convt3d_supported, reference(), SM90, A100)
    assert status == NOT_SUPPORTED
    assert message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": 0}, "groups"),
        ({"groups": 3}, "groups"),
        ({"stride": (2, 0, 2)}, "stride"),
        ({"padding": (-1, 1, 1)}, "padding"),
        ({"output_padding": (2, 1, 1)}, "output_padding"),
        ({"dilation": (1, 1, 0)}, "dilation"),
        ({"kernel": (3, 3, 0)}, "kernel"),
        ({"batch": -1}, "batch"),
        ({"dtype": 7}, "dtype"),
        ({"activation": 11}, "activation"),
        ({"precision": 2}, "precision"),
    ],
)
def test_bad_arguments_are_named(library: Any, changes: dict[str, Any], named: str) -> None:
    problem = reference()
    for name, value in changes.items():
        setattr(problem, name, value)
    status, message = ask(library.convt3d_validate, problem)
    assert status == INVALID_ARGUMENT
    assert named in message


def test_message_is_cut_to_its_capacity(library: Any) -> None:
    problem = reference()
    problem.groups = 0
    message = ctypes.create_string_buffer(b"\xff" * 16)
    assert library.convt3d_validate(ctypes.byref(problem), message, ctypes.c_size_t(8)) == INVALID_ARGUMENT
    assert len(message.value) == 7
    assert message.raw[8:16] == b"\xff" * 8
    assert library.convt3d_validate(ctypes.byref(problem), None, ctypes.c_size_t(0)) == INVALID_ARGUMENT


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_device_is_an_answer(library: Any) -> None:
    status, message = ask(library.convt3d_current_device, Device())
    assert status == NOT_SUPPORTED
    assert "CUDA" in message


# --- the binding, where torch has no CUDA ---


def test_binding_declines_cpu_tensors() -> None:
    """Also proves that the binding loads here, and that its operator's schema and boxing agree."""
    torch.ops.load_library(str(built("libconvt3d_torch.so")))
    x, weight = torch.randn(1, 2, 3, 3, 3), torch.randn(2, 4, 2, 2, 2)
    ones, zeros = [1, 1, 1], [0, 0, 0]
    arguments = (x, weight, torch.zeros(4), ones, zeros, zeros, 1, ones, None, 0, 0, 0.01, 0, 0, 0)
    assert torch.ops.convt3d_native.forward(*arguments) is None
