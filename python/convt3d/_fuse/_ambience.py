# SPDX-License-Identifier: Apache-2.0
"""Everything besides its arguments that decides how a call runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_LEFT_CAPTURE = (
    "convt3d: the result of a fused transposed convolution is not computed before something uses it, and "
    "this one was called inside the capture of a CUDA graph and is wanted outside of it, or the other way "
    "round. Capture the module that holds the convolution and what follows it, or call convt3d.unfuse()"
)


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

    @staticmethod
    def current(device: torch.device) -> Ambience:
        # Looked at several times in a chain: NamedTuple's own constructor takes twice as long.
        kind = device.type
        return tuple.__new__(
            Ambience,
            (
                device,
                current_place(device),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            ),
        )

    @contextlib.contextmanager
    def restored(self, now: Ambience) -> Iterator[None]:
        """Runs a block as if it stood where this ambience was noted; ``now`` is the one around it.

        Raises:
            RuntimeError: the capture of a CUDA graph has begun or ended in between.
        """
        with _work_goes_to(self.place, now.place), self.modes():
            yield

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """The gradient mode, inference mode and autocast alone, which also a backward pass needs."""
        kind = self.device.type
        dtype = self.autocast_dtype or torch.get_autocast_dtype(kind)
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(kind, dtype, self.autocast_dtype is not None),
        ):
            yield


def current_place(device: torch.device) -> Place | None:
    if device.type != "cuda":
        return None
    c: Any = torch._C
    return tuple.__new__(Place, (c._cuda_getCurrentStream(device.index), c._cuda_isCurrentStreamCapturing()))


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
