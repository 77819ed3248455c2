# SPDX-License-Identifier: Apache-2.0
"""Timing: medians, interleaved over the candidates, on whatever device the work runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_L2_MULTIPLE = 4  # tensors of fewer L2 sizes than this could be found in the cache again
_FLUSH_BYTES = 512 * 2**20


def milliseconds(call: Callable[[], object], device: str) -> float:
    """One run of ``call``: CUDA events on a GPU, the wall clock on a CPU."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def medians(
    calls: Mapping[str, Callable[[], object]], device: str, warmup: int, rounds: int
) -> dict[str, float]:
    """Median milliseconds of each call; rounds are interleaved so that drift hits all alike."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
    return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(rounds: int = 20, gibibytes: float = 1.0) -> float:
    """Bytes per second, read and written together, of a large device-to-device copy on the current GPU."""
    source = torch.rand(int(gibibytes * 2**28), device="cuda")
    target = torch.empty_like(source)
    best = medians({"copy": lambda: target.copy_(source)}, "cuda", warmup=3, rounds=rounds)["copy"]
    return 2 * source.numel() * source.element_size() / (best * 1e-3)


class GpuTimer:
    """Times work on the current CUDA device as it runs in a network: the host ahead, the cache cold."""

    device = "cuda"

    def __init__(self) -> None:
        self.properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._flush_buffer: torch.Tensor | None = None

    def fits_in_cache(self, byte_count: int) -> bool:
        """Whether part of a call's tensors could still be in the L2 cache from the call before."""
        return byte_count < _L2_MULTIPLE * int(self.properties.L2_cache_size)

    def flush_cache(self) -> None:
        """Fills the L2 cache with clean lines of something else.

        By reading: after a write the timed call would pay for writing the dirty lines back. Half a gigabyte
        also keeps the GPU busy while the host enqueues the timed call: what is timed is the GPU's work.
        """
        if self._flush_buffer is None:
            self._flush_buffer = torch.rand(_FLUSH_BYTES // 4, device=self.device)
        self._flush_buffer.sum()

    def time(self, calls: Sequence[Callable[[], object]], flush: bool) -> list[float]:
        """Milliseconds of GPU time of each call, in order; whatever a call launches is inside.

        Nothing waits in between: the host runs ahead of the GPU as it does in a network.
        """
        event: Any = torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in calls]
        self.synchronize()
        for call, (begin, end) in zip(calls, pairs, strict=True):
            if flush:
                self.flush_cache()
            begin.record()
            call()
            end.record()
        self.synchronize()
        return [float(begin.elapsed_time(end)) for begin, end in pairs]

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class CpuTimer:
    """The same by the wall clock, where the work runs on a CPU."""

    device = "cpu"

    def fits_in_cache(self, byte_count: int) -> bool:
        return False

    def time(self, calls: Sequence[Callable[[], object]], flush: bool) -> list[float]:
        return [milliseconds(call, "cpu") for call in calls]


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    timer: GpuTimer | CpuTimer,
    byte_count: int,
    runs: int,
    seconds: float,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of each call: one median for each of ``runs`` runs, which take turns.

    Args:
        byte_count: that a call moves; where the cache could hold that, it is flushed before each call.
        seconds: that one run of one call takes, roughly; at least three calls.
        progress: called after each run of each call, and once for each call before that.
    """
    flush = timer.fits_in_cache(byte_count)
    counts = {}
    for name, call in calls.items():
        timer.time([call] * 3, flush)  # compilers and libraries settle
        once = statistics.median(timer.time([call] * 3, flush)) * 1e-3
        counts[name] = max(3, min(100, round(seconds / max(once, 1e-6))))
        progress()
    medians_of: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            medians_of[name].append(statistics.median(timer.time([call] * counts[name], flush)))
            progress()
    return medians_of
