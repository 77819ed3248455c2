# SPDX-License-Identifier: Apache-2.0
"""Measures one row: checks convt3d's result first, then times the contestants in interleaved runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv_transpose3d

import _paths  # noqa: F401 (finds convt3d and the tests' accuracy bound)
import convt3d
from check import check
from convt3d._activations import ACTIVATIONS
from floor import Ceilings, floor
from gpu import Gpu
from results import FAILED, WRONG, RowResult, Timing
from workloads import Row

RUNS = 5
_WARMUP_CALLS = 3
_RUN_SECONDS = 0.04
_LEAST_CALLS, _MOST_CALLS = 5, 100
_HOST_CALLS = 50

SMALL_BYTES = 100_000_000
"""Rows that move less are small: the host's time per call is measured too."""

Inputs = dict[str, Tensor]
Contestant = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def draw(row: Row, device: str) -> Inputs:
    """Fresh normal inputs in the row's layout; weights scaled so that outputs are of order 1."""
    w = row.workload
    taps = w.kernel[0] * w.kernel[1] * w.kernel[2]
    terms = w.cin * taps / (w.stride[0] * w.stride[1] * w.stride[2])
    inputs = {}
    for name, shape in w.shapes().items():
        memory_format = row.memory_format if len(shape) == 5 else torch.contiguous_format
        values = torch.empty(shape, dtype=row.dtype, device=device, memory_format=memory_format)
        inputs[name] = values.normal_(std=max(1.0, terms) ** -0.5 if name == "weight" else 1.0)
    return inputs


def ours(row: Row) -> Contestant:
    """One call, as a user writes it: the precision is PyTorch's switch's."""
    w = row.workload

    def fused(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor) -> Tensor:
        return convt3d.conv_transpose3d(
            x,
            weight,
            bias,
            *w.convolution(),
            add=add,
            activation=w.activation,
            negative_slope=w.negative_slope,
        )

    return fused


def eager(row: Row) -> Contestant:
    """The unfused operators."""
    w = row.workload
    stride, padding, output_padding = w.convolution()
    activation, slope = ACTIVATIONS[w.activation].forward, w.negative_slope

    def unfused(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor) -> Tensor:
        t = conv_transpose3d(x, weight, bias, stride, padding, output_padding) + add
        return activation(t, slope)

    return unfused


def convolution_alone(row: Row) -> Contestant:
    """What a launch-bound call is compared with: eager's transposed convolution without the rest."""
    stride, padding, output_padding = row.workload.convolution()

    def alone(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor) -> Tensor:
        return conv_transpose3d(x, weight, bias, stride, padding, output_padding)

    return alone


@dataclass
class _Runner:
    """Times the contestants of one row over its input sets."""

    gpu: Gpu
    sets: list[Inputs]
    flush: bool

    def bind(self, contestant: Contestant, count: int) -> list[Callable[[], object]]:
        """``count`` calls that take turns at the input sets; outputs are dropped."""

        def bound(inputs: Inputs) -> Callable[[], object]:
            arguments = (inputs["input"], inputs["weight"], inputs.get("bias"), inputs["add"])
            return lambda: contestant(*arguments)

        return [bound(self.sets[i % len(self.sets)]) for i in range(count)]

    def warm_up(self, contestant: Contestant) -> int:
        """Runs it until compilers and libraries have settled; returns how many calls make a run."""
        self.gpu.time(self.bind(contestant, _WARMUP_CALLS), self.flush)
        once = statistics.median(self.gpu.time(self.bind(contestant, _WARMUP_CALLS), self.flush)) * 1e-3
        return max(_LEAST_CALLS, min(_MOST_CALLS, round(_RUN_SECONDS / max(once, 1e-6))))

    def run(self, contestant: Contestant, calls: int) -> float:
        """The median of one run, milliseconds."""
        return statistics.median(self.gpu.time(self.bind(contestant, calls), self.flush))

    def host_us(self, contestant: Contestant) -> float:
        """Median microseconds until a call returns, with nothing in the GPU's queue."""
        times = []
        for call in self.bind(contestant, _HOST_CALLS):
            self.gpu.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        self.gpu.synchronize()
        return statistics.median(times) * 1e6


def measure(row: Row, gpu: Gpu, shard: int, ceilings: Ceilings, with_compile: bool = True) -> RowResult:
    """One row. What convt3d gets wrong or raises is in the result's status, not an exception."""
    byte_count, flops = row.work()
    least = floor(byte_count, flops, row.mode, ceilings)
    result = RowResult(
        row.name,
        shard,
        problem={**asdict(row.workload), "mode": row.mode, "layout": row.layout},
        bytes=byte_count,
        flops=flops,
        floor_ms=least.seconds * 1e3,
        floor_bound=least.bound,
    )
    try:
        with torch.no_grad(), gpu.tf32(row.allow_tf32):
            # Two sets at least, so that no call sees the inputs of the one before.
            sets = [draw(row, gpu.device) for _ in range(2)]
            result.input_sets, result.l2_flushed = len(sets), gpu.fits_in_cache(byte_count)
            _explain(row, sets[0], result)
            checked = check(row, sets[0], ours(row), result.path)
            result.max_abs_error, result.bound_share = checked.max_abs_error, checked.bound_share
            result.samples_checked = checked.samples
            if checked.message:
                result.status, result.message = WRONG, checked.message
            else:
                _time(row, _Runner(gpu, sets, result.l2_flushed), result, with_compile)
    except Exception as error:
        # A sticky CUDA error comes back at the caller's next synchronisation.
        result.status, result.message, result.times = FAILED, describe(error), {}
    return result


def _explain(row: Row, inputs: Inputs, result: RowResult) -> None:
    w = row.workload
    e = convt3d.explain(
        inputs["input"],
        inputs["weight"],
        inputs.get("bias"),
        *w.convolution(),
        add=inputs["add"],
        activation=w.activation,
        negative_slope=w.negative_slope,
    )
    result.path, result.refused = e.path, e.refused


def _time(row: Row, runner: _Runner, result: RowResult, with_compile: bool) -> None:
    contestants = {"convt3d": ours(row), "eager": eager(row)}
    if with_compile:
        torch._dynamo.reset()  # each row compiles afresh, for its own static shapes
        compiled: Any = torch.compile(eager(row), dynamic=False)
        contestants["compile"] = compiled
    small = result.bytes < SMALL_BYTES
    if small:
        contestants["conv"] = convolution_alone(row)
    for name, contestant in contestants.items():
        timing = result.times[name] = Timing()
        try:
            timing.calls = runner.warm_up(contestant)
        except Exception as error:
            if name == "convt3d":
                raise
            timing.failure = describe(error)
    running = {name: call for name, call in contestants.items() if not result.times[name].failure}
    for _ in range(RUNS):
        for name, contestant in running.items():
            result.times[name].runs_ms.append(runner.run(contestant, result.times[name].calls))
    if small:
        for name, contestant in running.items():
            result.times[name].host_us = runner.host_us(contestant)


def describe(error: Exception) -> str:
    """Class and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
