# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d info``: what is here, what runs, and why not more."""

from __future__ import annotations

import ctypes
import platform

import torch

from .. import _kernel_query, _native
from .._precision import resolve_precision
from .._problem import Problem
from .._version import __version__
from ..reference import BATCH, IN_CHANNELS, KERNEL_SIZE, OUT_CHANNELS, OUTPUT_PADDING, PADDING, SIZE, STRIDE
from .console import Console

# A GPU that each family was written for: one that refuses the reference workload there is not in the library.
_HOME = {"sm90": _kernel_query.Device(90, 132), "sm80": _kernel_query.Device(80, 108)}


def info(console: Console) -> int:
    """Prints the report; always succeeds."""
    console.table("convt3d on this machine", ("what", "value"), _machine())
    console.table("kernels", ("kernel", "compiled in", "usable here", "why not"), _kernels())
    return 0


def driver_version() -> str:
    """The CUDA version that the installed NVIDIA driver supports, or why there is none."""
    if not _kernel_query.has_driver():
        return _kernel_query.NO_DRIVER
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
        return "an NVIDIA driver that does not answer"
    return f"supports CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _machine() -> list[tuple[str, str]]:
    rows = [
        ("convt3d", __version__),
        ("Python", platform.python_version()),
        ("torch", f"{torch.__version__}, {_torch_cuda()}"),
        ("driver", driver_version()),
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            rows.append(
                (
                    f"GPU {index}",
                    f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, "
                    f"{p.total_memory / 2**30:.0f} GiB",
                )
            )
    else:
        rows.append(("GPU", "none that torch can use"))
    version = _kernel_query.version()
    rows.append(
        (
            "kernel library",
            f"{version}, {_native.KERNELS_LIBRARY}"
            if version is not None
            else f"not used: {_kernel_query.why_no_library()}",
        )
    )
    native = _native.native()
    rows.append(("torch binding", "loaded" if native.available else f"not loaded: {native.reason}"))
    rows.append(("default precision on CUDA", resolve_precision("default", "cuda")))
    return rows


def _torch_cuda() -> str:
    return "built without CUDA" if torch.version.cuda is None else f"built with CUDA {torch.version.cuda}"


def compiled_in() -> dict[str, bool]:
    """Whether each family is in the kernel library; asks the library, not the GPU."""
    there = _kernel_query.library() is not None
    return {
        name: there and name not in _ask_about_reference(_HOME[name], "tf32").refused
        for name in _kernel_query.KERNELS
    }


def _kernels() -> list[tuple[str, str, str, str]]:
    """Whether each family is in the library, and runs the reference workload here."""
    rows = []
    device, reason = _kernel_query.current_device()
    native = _native.native()
    if device is not None and not native.available:
        device, reason = None, native.reason
    answer = None
    if device is not None:
        answer = _ask_about_reference(device, resolve_precision("default", "cuda"))
    for name, compiled in compiled_in().items():
        refusal = reason if answer is None else answer.refused.get(name, "")
        rows.append((name, _yes(compiled), _yes(not refusal), refusal))
    rows.append(("aten + tail", "-", "yes", "" if torch.cuda.is_available() else "on the CPU only: no GPU"))
    return rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _ask_about_reference(device: _kernel_query.Device, precision: str) -> _kernel_query.Answer:
    x = torch.empty(BATCH, IN_CHANNELS, *SIZE, device="meta")
    weight = torch.empty(IN_CHANNELS, OUT_CHANNELS, *(KERNEL_SIZE,) * 3, device="meta")
    bias = torch.empty(OUT_CHANNELS, device="meta")
    add = torch.empty(BATCH, OUT_CHANNELS, *(size * STRIDE for size in SIZE), device="meta")
    problem = Problem.create(
        x,
        weight,
        bias,
        (STRIDE,) * 3,
        (PADDING,) * 3,
        (OUTPUT_PADDING,) * 3,
        1,
        (1,) * 3,
        add,
        "before",
        "x_hardswish",
        0.0,
        precision,
    )
    return _kernel_query.ask(problem, precision, x, weight, bias, add, device, 0)
