# SPDX-License-Identifier: Apache-2.0
"""Everything that touches the GPU's clock, caches and settings. Tests put a stand-in in its place."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import torch

import _paths
import convt3d
from convt3d import _native
from convt3d.cli.info import driver_version
from convt3d.cli.timing import GpuTimer, copy_bandwidth, medians
from floor import Ceilings

Call = Callable[[], object]

_MATRIX = 8192
_MOST_CYCLES = 2e9  # of a second


class Gpu(GpuTimer):
    """The current CUDA device."""

    @property
    def name(self) -> str:
        return str(self.properties.name)

    def peak_bytes(self, call: Call) -> int:
        """The most memory that a call holds above what was there before it."""
        self.synchronize()
        self.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before

    def release(self) -> None:
        """Gives memory that no tensor uses back, so that rows do not fragment one another's."""
        torch.cuda.empty_cache()

    @contextmanager
    def tf32(self, allowed: bool) -> Iterator[None]:
        """PyTorch's switch for convolutions; put back afterwards."""
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before

    def time_behind(self, call: Call, milliseconds: float) -> float:
        """Milliseconds of the GPU's work alone.

        Args:
            milliseconds: for which the GPU is kept busy first, while the host launches. About a thousand
                launches can wait; behind these the host goes on as the GPU does.
        """
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        self.synchronize()
        torch.cuda._sleep(round(milliseconds * 1e-3 * _MOST_CYCLES))
        begin.record()
        call()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end))

    def ceilings(self) -> Ceilings:
        """Measured now: a copy of a gigabyte, and square matrix products of random values."""
        copy = copy_bandwidth()
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            rates = [self._matrix_rate(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        self.release()
        return Ceilings(copy, *rates)

    def _matrix_rate(self, dtype: torch.dtype) -> float:
        a, b = (torch.randn(_MATRIX, _MATRIX, device=self.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        milliseconds = medians(
            {"product": lambda: torch.matmul(a, b, out=out)}, self.device, warmup=5, rounds=20
        )["product"]
        return 2 * _MATRIX**3 / (milliseconds * 1e-3)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to compare numbers."""
        native = _native.native()
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "gpu": self.name,
            "driver": _driver(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "convt3d": convt3d.__version__,
            "convt3d_library": "loaded" if native.available else native.reason,
            "commit": commit(),
        }


def _driver() -> str:
    """The driver's own version where nvidia-smi is there, and the CUDA version it supports."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        version = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return driver_version()
    return f"{version}, {driver_version()}"


def commit() -> str | None:
    """The source's commit: CONVT3D_COMMIT where it is set, else git's answer, "+" for a changed tree."""
    if named := os.environ.get("CONVT3D_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_paths.ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
