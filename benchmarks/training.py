# SPDX-License-Identifier: Apache-2.0
"""Measures a training step, forward and backward, in time and memory; see docs/benchmarks.md.

    python benchmarks/training.py [--rows PATTERN] [--no-compile] [--output DIR]

Prints a table, and writes ``training.json``. Exit status: 0; 1 where a row is wrong or failed; 2 where
nothing could be measured: bad arguments, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401 (finds convt3d)
import report
from gpu import Gpu
from measure import RUNS, Inputs, describe, draw, eager, ours
from results import FAILED, OK, WRONG, Timing
from workloads import Row, select

DEFAULT_ROWS = "reference/tf32/*"

Step = Callable[[Inputs], Sequence[Tensor]]
"""A forward and a backward pass; returns the gradients in the order of the inputs."""

_CALLS = 10
_WARMUP_CALLS = 3
_CHECKED_SAMPLES = 2
_GIB = 2**30

# convt3d's error may be at most this many times eager's.
_ALLOWED = 1.5
COLUMNS = (
    "row",
    "convt3d ms",
    "± %",
    "forward ms",
    "eager ms",
    "× eager",
    "compile ms",
    "× compile",
    "peak GiB",
    "eager GiB",
    "compile GiB",
    "error",
    "eager's",
)


@dataclass
class TrainingRow:
    """One row of the results.

    Attributes:
        forward_ms: convt3d's forward pass alone, as in training.
        peak_bytes: by contestant; the most memory that a step holds above inputs, parameters and grad_output.
        errors: by contestant; the largest of the gradients' errors against float64, ||error|| / ||gradient||,
            over the first samples.
    """

    name: str
    status: str = OK
    message: str = ""
    times: dict[str, Timing] = field(default_factory=dict)
    forward_ms: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times": {name: t.to_json() for name, t in self.times.items()}}


def step(function: Callable[..., Tensor]) -> Step:
    """A training step around ``function(x, weight, bias, add)``; every tensor gets a gradient."""

    def run(inputs: Inputs) -> Sequence[Tensor]:
        out = function(inputs["input"], inputs["weight"], inputs.get("bias"), inputs["add"])
        leaves = [tensor for name, tensor in inputs.items() if name != "grad_output"]
        return torch.autograd.grad(out, leaves, inputs["grad_output"])

    return run


def training_inputs(row: Row, device: str) -> Inputs:
    """Leaves that want gradients, and a gradient of the output in the output's layout."""
    inputs = {name: tensor.requires_grad_() for name, tensor in draw(row, device).items()}
    inputs["grad_output"] = torch.randn_like(inputs["add"]).detach()
    return inputs


def gradient_errors(row: Row, inputs: Inputs, contestants: dict[str, Step]) -> dict[str, float]:
    """Each contestant's largest error against float64 over the first samples, in norms, per gradient.

    Norms, because a single element says little: where the derivative jumps, TF32 may land on the other side.
    """

    def part(dtype: torch.dtype) -> Inputs:
        cut = {
            name: tensor.detach()[:_CHECKED_SAMPLES] if tensor.dim() == 5 and name != "weight" else tensor
            for name, tensor in inputs.items()
        }
        leaves = {name: tensor.detach().to(dtype).clone() for name, tensor in cut.items()}
        return {name: leaf.requires_grad_(name != "grad_output") for name, leaf in leaves.items()}

    exact = step(eager(row))(part(torch.float64))
    errors = {}
    for name, contestant in contestants.items():
        got = contestant(part(row.dtype))
        errors[name] = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True))
    return errors


def measure(row: Row, gpu: Gpu, with_compile: bool) -> TrainingRow:
    """One row; what convt3d gets wrong or raises is in its status."""
    result = TrainingRow(row.name)
    contestants = {"convt3d": step(ours(row)), "eager": step(eager(row))}
    try:
        with gpu.tf32(row.allow_tf32):
            inputs = training_inputs(row, gpu.device)
            result.errors = gradient_errors(row, inputs, contestants)
            if not result.errors["convt3d"] <= _ALLOWED * result.errors["eager"]:
                result.status, result.message = WRONG, f"errors of the gradients: {result.errors}"
                return result
            if with_compile:
                torch._dynamo.reset()
                contestants["compile"] = step(torch.compile(eager(row), dynamic=False))
            _time(gpu, contestants, inputs, result)
            forward = ours(row)
            arguments = (inputs["input"], inputs["weight"], inputs.get("bias"), inputs["add"])
            result.forward_ms = statistics.median(
                gpu.time([lambda: forward(*arguments)] * _CALLS, flush=False)
            )
    except Exception as error:
        result.status, result.message = FAILED, describe(error)
    return result


def _time(gpu: Gpu, contestants: dict[str, Step], inputs: Inputs, result: TrainingRow) -> None:
    for name, contestant in list(contestants.items()):
        timing = result.times[name] = Timing(calls=_CALLS)
        try:
            gpu.time([lambda c=contestant: c(inputs)] * _WARMUP_CALLS, flush=False)  # type: ignore[misc]
            result.peak_bytes[name] = gpu.peak_bytes(lambda c=contestant: c(inputs))  # type: ignore[misc]
        except Exception as error:
            if name == "convt3d":
                raise
            timing.failure = describe(error)
            del contestants[name]
    for _ in range(RUNS):
        for name, contestant in contestants.items():
            calls = [lambda c=contestant: c(inputs)] * _CALLS  # type: ignore[misc]
            result.times[name].runs_ms.append(statistics.median(gpu.time(calls, flush=False)))


def cells(row: TrainingRow) -> list[str]:
    """The row as the table shows it, in the order of COLUMNS."""
    if row.status != OK:
        return [row.name, row.status.upper(), *[""] * (len(COLUMNS) - 2)]
    mine = row.times["convt3d"]
    out = [row.name, f"{mine.median_ms:.3f}", f"{mine.spread * 100:.1f}", f"{row.forward_ms:.3f}"]
    for other in ("eager", "compile"):
        theirs = row.times.get(other)
        if theirs is None or theirs.failure:
            out += ["" if theirs is None else "failed", ""]
        else:
            out += [f"{theirs.median_ms:.3f}", f"{theirs.median_ms / mine.median_ms:.2f}"]
    peaks = (row.peak_bytes.get(name) for name in ("convt3d", "eager", "compile"))
    out += ["" if peak is None else f"{peak / _GIB:.2f}" for peak in peaks]
    return [*out, *(f"{row.errors[name]:.1e}" for name in ("convt3d", "eager"))]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        rows = select(arguments.rows)
    except ValueError as error:
        print(f"benchmarks/training.py: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("benchmarks/training.py: this measures an NVIDIA GPU, and there is none here", file=sys.stderr)
        return 2
    return run(Gpu(), rows, arguments.compile, arguments.output)


def run(gpu: Gpu, rows: Sequence[Row], with_compile: bool, folder: Path) -> int:
    """Measures ``rows``, prints them and writes the file, anew after every row; returns the exit status."""
    out = report.console()
    results: list[TrainingRow] = []
    machine = gpu.describe()
    file = folder / "training.json"
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        result = measure(row, gpu, with_compile)
        results.append(result)
        gpu.release()
        file.write_text(json.dumps({"machine": machine, "rows": [r.to_json() for r in results]}, indent=1))
    out.line(
        f"GPU {machine['gpu']}, {machine['date']}, convt3d {machine['convt3d']} ({machine['commit']}), "
        f"torch {machine['torch']}, cuDNN {machine['cudnn']} (benchmark={machine['cudnn_benchmark']})"
    )
    out.table(
        "A training step, forward and backward: median of five interleaved runs; peak memory above inputs, "
        "parameters and grad_output",
        COLUMNS,
        [*map(cells, results)],
    )
    for result in results:
        if result.status != OK:
            out.line(f"{result.status.upper()}: {result.name}: {result.message}")
        for name, timing in result.times.items():
            if timing.failure:
                out.line(f"{name} failed: {result.name}: {timing.failure}")
    out.line(f"results: {file}")
    return 0 if all(result.status == OK for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/training.py", description="Measures a training step in time and memory."
    )
    add = parser.add_argument
    add(
        "--rows",
        metavar="PATTERN",
        default=DEFAULT_ROWS,
        help="names or globs, by commas, as run.py --list prints them (default: %(default)s)",
    )
    add("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    add("--output", metavar="DIR", type=Path, default=Path("out/benchmarks"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
