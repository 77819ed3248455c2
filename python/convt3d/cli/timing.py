# SPDX-License-Identifier: Apache-2.0
"""Timing for the demo: medians, interleaved over the candidates, on whatever device the work runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


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
