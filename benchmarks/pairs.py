# SPDX-License-Identifier: Apache-2.0
"""Two networks timed pass by pass, in turns.

A host's speed drifts by several percent within seconds and differs as much from process to process, and of
some networks it is the host that takes longest. Two passes one after the other meet the same speed: what one
network gains over the other is the median of such differences, and has a standard error.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu import Gpu

FEWEST = 20
_WARM_UP = 3

Pass = Callable[[], Any]


@dataclass
class Pairs:
    """Milliseconds of passes of two networks."""

    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def before(self) -> float:
        return statistics.median(first for first, _ in self.pairs)

    @property
    def after(self) -> float:
        return statistics.median(second for _, second in self.pairs)

    @property
    def gain(self) -> tuple[float, float]:
        """Median of the differences, first less second, and its standard error.

        The error is that of a normal distribution as wide in its middle: some passes are disturbed.
        """
        differences = [first - second for first, second in self.pairs]
        median = statistics.median(differences)
        deviation = 1.4826 * statistics.median(abs(d - median) for d in differences)
        return median, math.sqrt(math.pi / 2 / len(differences)) * deviation


@dataclass
class Passes:
    """How long passes take.

    Attributes:
        wall: from when the GPU is idle until it is done.
        host: of these, until the call returns.
        gpu: of other passes, whose launches were there before the first of them ran.
    """

    wall: Pairs
    host: Pairs
    gpu: Pairs


def time_pairs(gpu: Gpu, first: Pass, second: Pass, seconds: float, fewest: int = FEWEST) -> Passes:
    """Times two networks.

    Args:
        seconds: for the passes that are timed by the clock, and again for those on the GPU alone.
        fewest: pairs of each kind.
    """
    for _ in range(_WARM_UP):
        first()
        second()
    clocked = _in_turns(lambda call: _by_the_clock(gpu, call), first, second, seconds, fewest)
    wall, host = (Pairs([(a[at], b[at]) for a, b in clocked]) for at in (0, 1))
    enough = 2 * max(host.before, host.after)  # for the host to launch all of a pass
    return Passes(
        wall,
        host,
        Pairs(_in_turns(lambda call: gpu.time_behind(call, enough), first, second, seconds, fewest)),
    )


def _in_turns(
    timed: Callable[[Pass], Any], first: Pass, second: Pass, seconds: float, fewest: int
) -> list[tuple[Any, Any]]:
    """Results of both. Each always follows the other: behind one of its own a pass could be a faster one."""
    results: list[tuple[Any, Any]] = []
    start = time.monotonic()
    while len(results) < fewest or time.monotonic() - start < seconds:
        of_first = timed(first)
        results.append((of_first, timed(second)))
    return results


def _by_the_clock(gpu: Gpu, call: Pass) -> tuple[float, float]:
    gpu.synchronize()
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    gpu.synchronize()
    return (time.perf_counter() - start) * 1e3, (returned - start) * 1e3
