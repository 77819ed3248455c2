# SPDX-License-Identifier: Apache-2.0
"""Questions to the kernel library through its C interface (``convt3d.h``): which kernel, and why not another.

The library needs no torch and no GPU to answer, so this works on any machine where the library was built.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._precision import PRECISION_CODES
from ._problem import Problem

_Int64x3 = ctypes.c_int64 * 3
_Int64x5 = ctypes.c_int64 * 5
_OK = 0
_MESSAGE_BYTES = 512

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

KERNELS = {"sm90": 2, "sm80": 1}
"""Kernel families, fastest first, with their ``convt3d_kernel`` codes."""


class _CProblem(ctypes.Structure):
    """``convt3d_problem``."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("in_channels", ctypes.c_int64),
        ("out_channels", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("in_size", _Int64x3),
        ("kernel", _Int64x3),
        ("stride", _Int64x3),
        ("padding", _Int64x3),
        ("output_padding", _Int64x3),
        ("dilation", _Int64x3),
        ("x_stride", _Int64x5),
        ("weight_stride", _Int64x5),
        ("bias_stride", ctypes.c_int64),
        ("add_stride", _Int64x5),
        ("y_stride", _Int64x5),
        ("x_alignment", ctypes.c_int32),
        ("add_alignment", ctypes.c_int32),
        ("y_alignment", ctypes.c_int32),
        ("has_bias", ctypes.c_int32),
        ("has_add", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("add_order", ctypes.c_int32),
        ("negative_slope", ctypes.c_float),
    )


class _CDevice(ctypes.Structure):
    """``convt3d_device``."""

    _fields_ = (("compute_capability", ctypes.c_int32), ("multiprocessors", ctypes.c_int32))


class _CPlan(ctypes.Structure):
    """``convt3d_plan``."""

    _fields_ = (
        ("kernel", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("workspace_bytes", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class Device:
    """A GPU to ask about, there or not."""

    compute_capability: int
    multiprocessors: int


@dataclass(frozen=True)
class Answer:
    """Which kernel the library chooses.

    Attributes:
        kernel: "sm90", "sm80", or "" for none.
        refused: reason by kernel, for every kernel that does not support the call.
        workspace_bytes: device memory the chosen kernel needs beside the output.
    """

    kernel: str
    refused: dict[str, str]
    workspace_bytes: int


def library() -> Any:
    """The kernel library, or None where it was not built, does not load, or is of another version."""
    return _library(_native.KERNELS_LIBRARY)[0]


def why_no_library() -> str:
    """Why :func:`library` is None; empty where it is not."""
    return _library(_native.KERNELS_LIBRARY)[1]


@functools.cache
def _library(path: Path) -> tuple[Any, str]:
    lib, reason = _native.open_kernels(path)
    if lib is None:
        return None, reason
    problem, message = ctypes.POINTER(_CProblem), (ctypes.c_char_p, ctypes.c_size_t)
    device, plan = ctypes.POINTER(_CDevice), ctypes.POINTER(_CPlan)
    try:
        lib.convt3d_current_device.argtypes = (device, *message)
        lib.convt3d_supported.argtypes = (problem, ctypes.c_int, device, *message)
        lib.convt3d_make_plan.argtypes = (problem, ctypes.c_int, device, plan, *message)
    except AttributeError as error:
        return None, f"{path} is not the kernel library: {error}"
    return lib, ""


def version() -> str | None:
    lib = library()
    return None if lib is None else lib.convt3d_version().decode()


NO_DRIVER = "no NVIDIA driver (libcuda.so.1 not found)"


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed, of whatever version."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def current_device() -> tuple[Device | None, str]:
    """The library's view of the current CUDA device, or None and why it cannot use one."""
    lib = library()
    if lib is None:
        return None, why_no_library()
    device, message = _CDevice(), ctypes.create_string_buffer(_MESSAGE_BYTES)
    if lib.convt3d_current_device(ctypes.byref(device), message, _MESSAGE_BYTES) != _OK:
        # Without a driver CUDA's runtime finds that of version 0 too old.
        return None, message.value.decode() if has_driver() else NO_DRIVER
    return Device(device.compute_capability, device.multiprocessors), ""


def ask(
    problem: Problem,
    precision: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    device: Device,
    kernel: int,
    y: Tensor | None = None,
) -> Answer:
    """Which kernel runs the call on ``device`` when ``kernel`` (0: any) is asked for; needs the library.

    ``y`` is where the result goes, if not to a tensor of its own.
    """
    lib = library()
    dtype = _DTYPE_CODES.get(problem.dtype)
    if dtype is None:
        return Answer("", dict.fromkeys(KERNELS, f"no kernel for {problem.dtype}"), 0)
    description = _describe(problem, dtype, precision, input, weight, bias, add, y)
    c_device = _CDevice(device.compute_capability, device.multiprocessors)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    refused = {}
    for name, code in KERNELS.items():
        if lib.convt3d_supported(
            ctypes.byref(description), code, ctypes.byref(c_device), message, _MESSAGE_BYTES
        ):
            refused[name] = message.value.decode()
    plan = _CPlan()
    status = lib.convt3d_make_plan(
        ctypes.byref(description), kernel, ctypes.byref(c_device), ctypes.byref(plan), message, _MESSAGE_BYTES
    )
    if status != _OK:
        for name in () if kernel else KERNELS:  # those that could, but are not worth it
            refused.setdefault(name, message.value.decode())
        return Answer("", refused, 0)
    chosen = next((name for name, code in KERNELS.items() if code == plan.kernel), "")
    return Answer(chosen, refused, plan.workspace_bytes)


def _describe(
    problem: Problem,
    dtype: int,
    precision: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    y: Tensor | None,
) -> _CProblem:
    x = input if problem.batched else input.unsqueeze(0)
    wide_add = None if add is None else add.expand(problem.output_shape_5d)
    if y is None:
        y = torch.empty(problem.output_shape_5d, device="meta", memory_format=problem.memory_format)
    elif not problem.batched:
        y = y.unsqueeze(0)
    return _CProblem(
        batch=int(problem.batch),
        in_channels=int(problem.in_channels),
        out_channels=int(problem.out_channels),
        groups=int(problem.groups),
        in_size=_Int64x3(*problem.in_size),
        kernel=_Int64x3(*problem.kernel),
        stride=_Int64x3(*problem.stride),
        padding=_Int64x3(*problem.padding),
        output_padding=_Int64x3(*problem.output_padding),
        dilation=_Int64x3(*problem.dilation),
        x_stride=_Int64x5(*x.stride()),
        weight_stride=_Int64x5(*weight.stride()),
        bias_stride=0 if bias is None else bias.stride(0),
        add_stride=_Int64x5(*(wide_add.stride() if wide_add is not None else (0,) * 5)),
        y_stride=_Int64x5(*y.stride()),
        x_alignment=_alignment(x),
        add_alignment=16 if add is None else _alignment(add),
        y_alignment=_alignment(y),
        has_bias=int(bias is not None),
        has_add=int(add is not None),
        dtype=dtype,
        precision=PRECISION_CODES[precision],
        activation=problem.activation.code,
        add_order=0 if problem.add_before else 1,
        negative_slope=float(problem.negative_slope),
    )


def _alignment(tensor: Tensor) -> int:
    """Bytes, at most 16. A tensor without memory counts as one whose storage is well aligned."""
    has_memory = tensor.device.type != "meta" and not isinstance(
        tensor, torch._subclasses.fake_tensor.FakeTensor
    )
    address = tensor.data_ptr() if has_memory else int(tensor.storage_offset()) * tensor.element_size()
    return min(16, (address | 16) & -(address | 16))
