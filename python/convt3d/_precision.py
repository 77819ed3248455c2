# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of fp32 multiplications: what "default", "ieee" and "tf32" mean, and how each is enforced.

"default" follows PyTorch's switch at the moment the operator runs, so nothing is baked into a traced graph.
An explicit precision holds on every path. ATen's operators that cannot be told run under
:func:`conv_fp32_switch`, which holds one lock and, for as long, PyTorch's global switch. What reads that
switch without the lock (a "default" call, or PyTorch's own convolutions, in another thread meanwhile) sees
the temporary setting.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["default", "ieee", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("default", "ieee", "tf32")
"""What the operator's schema takes; the Python functions say None for "default"."""

# The kernels' codes, ``convt3d_precision`` in convt3d.h.
PRECISION_CODES = {"ieee": 0, "tf32": 1}

SWITCH_LOCK = threading.RLock()
# A fork waits for the blocks of other threads: the child would inherit their lock and their setting for good.
os.register_at_fork(
    before=SWITCH_LOCK.acquire, after_in_parent=SWITCH_LOCK.release, after_in_child=SWITCH_LOCK.release
)


def _backend(device_type: str) -> Any:
    return torch.backends.cudnn if device_type == "cuda" else torch.backends.mkldnn


def _read_switch(device_type: str) -> str:
    """PyTorch's setting for convolutions: "tf32", "ieee", "bf16" (CPU only) or "none" (nothing was set)."""
    return fp32_precision("cuda" if device_type == "cuda" else "mkldnn", "conv")


def _by_attribute(backend: str, operator: str) -> str:
    module: Any = torch.backends.cudnn if backend == "cuda" else torch.backends.mkldnn
    setting: str = getattr(module, operator).fp32_precision
    return setting


fp32_precision: Callable[[str, str], str] = getattr(torch._C, "_get_fp32_precision_getter", _by_attribute)
"""PyTorch's setting for a backend ("cuda", "mkldnn") and an operator ("conv"); in a seventh of the time of
the attribute where torch has the function behind it."""


_cudnn_allows_tf32: Callable[[], bool] = torch._C._get_cudnn_allow_tf32
_flags_differ = False


def conv_precision() -> str:
    """What "default" means for fp32 on CUDA right now: "tf32" or "ieee"."""
    global _flags_differ
    if not _flags_differ:
        # A quarter of the other's time. It speaks for all of cuDNN, and raises once its settings differ: from
        # then on that of convolutions alone is asked.
        try:
            return "tf32" if _cudnn_allows_tf32() else "ieee"
        except RuntimeError:
            _flags_differ = True
    return "tf32" if fp32_precision("cuda", "conv") == "tf32" else "ieee"


def schema_precision(precision: str | None) -> str:
    """The operator's word for what a user gives as ``precision``.

    Raises:
        TypeError: not a string.
        ValueError: anything but None, "ieee" and "tf32".
    """
    if precision is None:
        return "default"
    if precision in ("ieee", "tf32"):
        return precision
    if not isinstance(precision, str):
        raise TypeError(
            f"convt3d: precision must be a string, got {precision!r} ({type(precision).__name__})"
        )
    raise ValueError(f"convt3d: precision must be None, 'ieee' or 'tf32', got {precision!r}")


def resolve_precision(precision: str, device_type: str) -> str:
    """Resolves to "ieee" or "tf32" for fp32 multiplications on ``device_type`` right now.

    "default" is tf32 exactly where PyTorch's own CUDA convolutions use it, and ieee on a CPU.
    """
    if precision != "default":
        return precision
    if device_type != "cuda":
        return "ieee"
    return conv_precision()


@contextmanager
def conv_fp32_switch(precision: str, device_type: str) -> Iterator[None]:
    """Runs a block with PyTorch's convolution switch saying ``precision``; "default" leaves it alone.

    An explicit precision holds the lock for the whole block, also where the switch says the same already:
    that may be another thread's temporary setting, gone as soon as that thread leaves its block.
    On a CPU both explicit precisions mean true fp32 arithmetic (tf32 rounds its operands beforehand).
    Behind the block the switch reads as before; what it does when a more general setting changes later is in
    :func:`_as_found`.
    """
    if precision == "default" or device_type not in ("cpu", "cuda"):
        yield
        return
    with conv_fp32_setting(precision if device_type == "cuda" else "ieee", device_type):
        yield


@contextmanager
def conv_fp32_setting(setting: str, device_type: str) -> Iterator[None]:
    """Runs a block with PyTorch's convolution switch of a "cuda" or "cpu" device at ``setting``.

    As :func:`conv_fp32_switch`, for any value that the switch can have ("none" is set as "ieee").
    """
    global _flags_differ
    conv = _backend(device_type).conv
    with SWITCH_LOCK:
        before = _read_switch(device_type)
        if before == setting or {before, setting} == {"none", "ieee"}:
            yield
            return
        found, differed = _as_found(conv, before), _flags_differ
        # "none" would follow the more general settings as they are now.
        conv.fp32_precision = "ieee" if setting == "none" else setting
        try:
            yield
        finally:
            conv.fp32_precision = found
            _flags_differ = differed  # what a call has seen meanwhile was this block's own setting


def _as_found(conv: Any, before: str) -> str:
    """What to write back so that ``conv`` reads ``before`` again and goes on following what it followed.

    "none" follows the more general settings (``torch.backends.fp32_precision`` and the like). Torch does not
    tell a value that was inherited from the same value set here. Reduced precision is taken to be inherited,
    "ieee" to be set here, so that a wrong guess never lets a later change lower the precision. PyTorch's
    initial state, tf32 until a general setting is made, cannot be written: behind the block it is a "tf32"
    set here.
    """
    if before in ("none", "ieee"):
        return before
    conv.fp32_precision = "none"
    inherited: str = conv.fp32_precision
    return "none" if inherited == before else before


# TF32 keeps 10 of fp32's 23 mantissa bits.
_DROPPED = 13
_HALF_MINUS_ONE = (1 << (_DROPPED - 1)) - 1
_KEEP = ~((1 << _DROPPED) - 1)
_LARGEST_TF32 = 0x7F7FE000
_EXPONENT = 0x7F800000
_SIGN = -0x80000000


def round_to_tf32(tensor: Tensor) -> Tensor:
    """fp32 values rounded to TF32: to nearest, ties to even, as PyTorch's TF32 convolutions round operands.

    Args:
        tensor: float32, any shape and strides.

    Returns:
        A new float32 tensor. Infinities and nans pass through unchanged; finite values that would round to
        infinity become the largest TF32 value instead.
    """
    bits = tensor.view(torch.int32)
    lowest_kept = (bits >> _DROPPED) & 1
    rounded = (bits + (_HALF_MINUS_ONE + lowest_kept)) & _KEEP
    overflowed = (rounded & _EXPONENT) == _EXPONENT
    rounded = torch.where(overflowed, (bits & _SIGN) | _LARGEST_TF32, rounded)
    rounded = torch.where((bits & _EXPONENT) == _EXPONENT, bits, rounded)
    return rounded.view(torch.float32)
