# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d bench``: one call against eager PyTorch and torch.compile, on this machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._precision import conv_fp32_switch
from .._version import __version__
from .call import CallSpec
from .console import Console
from .picture import save_bars
from .progress import Progress
from .timing import CpuTimer, GpuTimer, copy_bandwidth, interleaved

_RUNS = 5


def bench(
    console: Console, spec: CallSpec, output: Path, device: str = "auto", with_compile: bool = True
) -> int:
    """Times the call; prints a table, and saves ``bench.json`` and ``bench.png``.

    Args:
        output: folder for both, made if missing.
        device: "auto", "cpu" or "cuda".
        with_compile: whether torch.compile takes part.

    Returns:
        0, or 1 where the device is not there, the call is refused, the folder cannot be made, or convt3d's
        result is not PyTorch's.
    """
    on_gpu = torch.cuda.is_available()
    if device == "cuda" and not on_gpu:
        console.line("There is no GPU that torch can use; `python -m convt3d info` says more.")
        return 1
    device = ("cuda" if on_gpu else "cpu") if device == "auto" else device
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    timer = GpuTimer() if device == "cuda" else CpuTimer()
    title = f"{spec.describe()}, {str(spec.dtype).removeprefix('torch.')}, {spec.layout}"
    console.line(title)
    console.line(f"on {name}")
    with torch.no_grad(), conv_fp32_switch(spec.precision, device):
        bandwidth = copy_bandwidth() if device == "cuda" else None
        try:
            output.mkdir(parents=True, exist_ok=True)  # before minutes of timing
            tensors = spec.draw(device)
            explanation = spec.explain(tensors, bandwidth)
        except (RuntimeError, ValueError, NotImplementedError, OverflowError, OSError) as error:
            console.line(str(error))
            return 1
        most = 3 if with_compile else 2
        with Progress(2 + (1 + _RUNS) * most, quiet=True) as progress:
            progress.stage("compiling for torch.compile" if with_compile else "setting up")
            calls, skipped = _contestants(spec, tensors, with_compile)
            progress.step()
            progress.stage("comparing the results")
            wrong = _differs(calls["convt3d"](), calls["PyTorch eager"](), spec)
            progress.step()
            if not wrong:
                progress.stage("timing")
                seconds = 0.04 if device == "cuda" else 0.3
                times = interleaved(calls, timer, spec.byte_count(), _RUNS, seconds, progress.step)
        if wrong:
            console.line(f"WRONG: {wrong}")
            return 1
    medians = {call: statistics.median(runs) for call, runs in times.items()}
    floor = None if bandwidth is None else spec.byte_count() / bandwidth * 1e3
    _print(console, times, medians, floor, explanation.path)
    if explanation.path == "cpu":
        console.line(
            "On a CPU convt3d runs PyTorch's convolution: there is nothing to gain, and 16-bit types, "
            "computed in fp32, are slower."
        )
    for what, why in skipped.items():
        console.line(f"{what} was left out: {why}")
    record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": name,
        "convt3d": __version__,
        "torch": torch.__version__,
        "call": {**asdict(spec), "dtype": str(spec.dtype)},
        "path": explanation.path,
        "refused": explanation.refused,
        "bytes": spec.byte_count(),
        "flops": explanation.flops,
        "copy_bytes_per_second": bandwidth,
        "floor_ms": floor,
        "runs_ms": times,
        "median_ms": medians,
        "left_out": skipped,
    }
    file = output / "bench.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    console.line(f"numbers: {file}")
    console.line(save_bars(medians, output / "bench.png", f"{title}\n{name}", floor))
    return 0


def _contestants(
    spec: CallSpec, tensors: dict[str, Tensor], with_compile: bool
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """What is timed, and why something is not."""
    calls: dict[str, Callable[[], Tensor]] = {
        "convt3d": partial(spec.ours, tensors),
        "PyTorch eager": partial(spec.theirs, tensors),
    }
    if not with_compile:
        return calls, {}
    torch._dynamo.reset()
    compiled: Any = torch.compile(spec.theirs, dynamic=False)
    try:
        compiled(tensors)
    except Exception as error:  # it needs a compiler and Triton
        lines = str(error).strip().splitlines() or [""]
        return calls, {"torch.compile": f"{type(error).__name__}: {lines[0][:160]}"}
    calls["torch.compile"] = partial(compiled, tensors)
    return calls, {}


def _differs(ours: Tensor, theirs: Tensor, spec: CallSpec) -> str:
    """A coarse comparison, so that nothing is timed that is plainly wrong; `check` is the fine one."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{tuple(ours.shape)} {ours.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}"
    error = float((ours.float() - theirs.float()).abs().max())
    scale = float(theirs.float().abs().max())
    limit = 2e-2 if spec.dtype in (torch.float32, torch.float64) else 6e-2
    return "" if error <= limit * max(scale, 1.0) else f"differs from PyTorch by {error:.2e}"


def _print(
    console: Console,
    times: dict[str, list[float]],
    medians: dict[str, float],
    floor: float | None,
    path: str,
) -> None:
    columns = ["what", "path", "ms", "± %", "convt3d's speed against it"]
    columns += ["time / byte floor"] if floor is not None else []
    rows = []
    for name, median in medians.items():
        spread = (max(times[name]) - min(times[name])) / 2 / median * 100
        row = [name, path if name == "convt3d" else "-", f"{median:.4g}", f"{spread:.1f}"]
        row.append(f"{median / medians['convt3d']:.2f}x")
        rows.append([*row, *([f"{median / floor:.2f}"] if floor is not None else [])])
    console.table("medians of interleaved runs", columns, rows)
