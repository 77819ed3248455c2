# SPDX-License-Identifier: Apache-2.0
"""The CUDA libraries: where they are, whether they load, and the one call into them.

Loaded at the first CUDA call, never at import, so that the package imports anywhere. Where they cannot be
loaded the reason is kept for ``info`` and ``explain``.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIB_DIR = Path(__file__).resolve().parent / "_lib"
KERNELS_LIBRARY = LIB_DIR / "libconvt3d.so"
BINDING_LIBRARY = LIB_DIR / "libconvt3d_torch.so"

KERNEL_ENV = "CONVT3D_KERNEL"
"""Environment variable, read in every call: auto, sm80, sm90, or aten (no kernel of ours)."""

# ``convt3d_kernel`` in convt3d.h; -1 is ours: use ATen.
KERNEL_CODES = {"": 0, "auto": 0, "sm80": 1, "sm90": 2, "aten": -1}
USE_ATEN = -1


@dataclass(frozen=True)
class Native:
    """The loaded binding, or why there is none."""

    forward: Any = None
    reason: str = ""

    @property
    def available(self) -> bool:
        return self.forward is not None


# How a failed call into LibTorch's stable ABI begins its message.
_TORCH_CALL_FAILED = "API call failed"

_load_library: Any = torch.ops.load_library
_lock = threading.Lock()
_native: Native | None = None


def native() -> Native:
    """The binding, loaded once per process."""
    global _native
    if _native is None:
        with _lock:
            if _native is None:
                _native = _load()
    return _native


def _load() -> Native:
    if torch.version.cuda is None:
        return Native(reason="this torch was built without CUDA")
    for path in (KERNELS_LIBRARY, BINDING_LIBRARY):
        if not path.is_file():
            return Native(reason=f"{path} does not exist: the package was built without its CUDA library")
    try:
        _load_library(str(BINDING_LIBRARY))
        return Native(forward=torch.ops.convt3d_native.forward.default)
    except (OSError, AttributeError, RuntimeError) as error:
        return Native(reason=f"{BINDING_LIBRARY} does not load: {error}")


def requested_kernel() -> int:
    """The code that ``CONVT3D_KERNEL`` asks for.

    Raises:
        ValueError: an unknown name.
    """
    name = os.environ.get(KERNEL_ENV, "")
    try:
        return KERNEL_CODES[name]
    except KeyError:
        names = ", ".join(n for n in KERNEL_CODES if n)
        raise ValueError(
            f"convt3d: the environment variable {KERNEL_ENV} must be one of {names}, got {name!r}"
        ) from None


def call(
    forward: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int, int],
    padding: tuple[int, int, int],
    output_padding: tuple[int, int, int],
    groups: int,
    dilation: tuple[int, int, int],
    add: Tensor | None,
    add_order: int,
    activation: int,
    negative_slope: float,
    precision: int,
    kernel: int,
    channels_last: bool,
) -> Tensor | None:
    """The kernels' result for 5-D CUDA tensors, or None where they do not take the call."""
    try:
        result = forward(
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            add,
            add_order,
            activation,
            negative_slope,
            precision,
            kernel,
            int(channels_last),
        )
    except RuntimeError as error:
        # A call of ours into torch failed before anything was launched: as a rule, memory ran out. The
        # binding can only say so as a RuntimeError; ATen, tried next, raises torch's error, or succeeds.
        if _TORCH_CALL_FAILED in str(error):
            return None
        raise
    return result  # type: ignore[no-any-return]
