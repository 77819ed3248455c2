# SPDX-License-Identifier: Apache-2.0
"""Everything besides its arguments that decides how a call runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from .._functional import observed
from .._precision import SWITCH_LOCK, conv_fp32_setting, fp32_precision

_LEFT_CAPTURE = (
    "convt3d: the result of a fused transposed convolution is not computed before something uses it, and "
    "this one was called inside the capture of a CUDA graph and is wanted outside of it, or the other way "
    "round. Capture the module that holds the convolution and what follows it, or call convt3d.unfuse()"
)

# Asked several times in every chain of steps, so without a way through modules and properties.
_C: Any = torch._C
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_is_autocast_enabled = torch.is_autocast_enabled


class Place(NamedTuple):
    """Where on a GPU work goes: the current stream, as torch names it, and whether a graph captures it."""

    stream: tuple[int, int, int]
    capturing: bool


class Ambience(NamedTuple):
    """What must be the same where a deferred call runs as where it was made."""

    device: torch.device
    place: Place | None  # None on a CPU
    grad: bool
    inference: bool
    autocast_dtype: torch.dtype | None  # None: autocast is off
    switches: tuple[str | bool, ...]  # fp32 precision; on a GPU cuDNN's enabled, benchmark, deterministic
    observed: bool  # by a torch.func transform, forward-mode AD, a dispatch mode or a trace

    @staticmethod
    def current(device: torch.device) -> Ambience:
        kind = device.type
        return tuple.__new__(  # NamedTuple's own constructor takes twice as long
            Ambience,
            (
                device,
                current_place(device),
                _is_grad_enabled(),
                _is_inference_mode_enabled(),
                torch.get_autocast_dtype(kind) if _is_autocast_enabled(kind) else None,
                current_switches(kind),
                observed(),
            ),
        )

    @contextlib.contextmanager
    def restored(self, now: Ambience) -> Iterator[None]:
        """Runs a block as if it stood where this ambience was noted; ``now`` is the one around it.

        Raises:
            RuntimeError: the capture of a CUDA graph has begun or ended in between.
        """
        with (
            # Nothing is deferred inside a transform or a mode, so the tensors are those of none.
            temporarily_clear_interpreter_stack() if now.observed else contextlib.nullcontext(),
            _disable_current_modes() if now.observed else contextlib.nullcontext(),
            _work_goes_to(self.place, now.place),
            _switched(self.switches, now.switches, self.device.type),
            self._modes(),
        ):
            yield

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        kind = self.device.type
        dtype = self.autocast_dtype or torch.get_autocast_dtype(kind)
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(kind, dtype, self.autocast_dtype is not None),
        ):
            yield


def current_switches(device_type: str) -> tuple[str | bool, ...]:
    if device_type != "cuda":
        return (fp32_precision("mkldnn", "conv"),)
    return (
        fp32_precision("cuda", "conv"),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
    )


@contextlib.contextmanager
def _switched(noted: tuple[str | bool, ...], now: tuple[str | bool, ...], device_type: str) -> Iterator[None]:
    if noted == now:
        yield
        return
    with SWITCH_LOCK:
        # What was read without the lock may have been another thread's, inside a block like this one.
        found = current_switches(device_type)
        _set_cudnn(noted[1:])
        try:
            with conv_fp32_setting(str(noted[0]), device_type):
                yield
        finally:
            _set_cudnn(found[1:])


def _set_cudnn(flags: Sequence[str | bool]) -> None:
    setters = (_C._set_cudnn_enabled, _C._set_cudnn_benchmark, _C._set_cudnn_deterministic)
    for setter, flag in zip(setters, flags, strict=False):
        setter(flag)


def current_place(device: torch.device) -> Place | None:
    if device.type != "cuda":
        return None
    return tuple.__new__(Place, (_C._cuda_getCurrentStream(device.index), is_capturing(device)))


def is_capturing(device: torch.device) -> bool:
    """Whether a graph captures what goes to the device's current stream."""
    if device.type != "cuda":
        return False
    if _C._cuda_getDevice() == device.index:
        return bool(_C._cuda_isCurrentStreamCapturing())
    with torch.cuda.device(device.index):  # torch asks the current device's stream
        return bool(_C._cuda_isCurrentStreamCapturing())


@contextlib.contextmanager
def _work_goes_to(noted: Place | None, now: Place | None) -> Iterator[None]:
    if noted is None or now is None or noted == now:
        yield
        return
    if noted.capturing != now.capturing:
        raise RuntimeError(_LEFT_CAPTURE)
    if noted.stream == now.stream:
        yield
        return
    # The network orders its streams around the place of the call, so there the work has to go; whoever
    # waited for it before it was there, waits now.
    ids = [
        {"stream_id": p.stream[0], "device_index": p.stream[1], "device_type": p.stream[2]}
        for p in (noted, now)
    ]
    there, here = (torch.cuda.Stream(**kwargs) for kwargs in ids)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(there):
        if current_place(there.device) != noted:
            raise RuntimeError(_LEFT_CAPTURE)
        yield
    here.wait_stream(there)
