# SPDX-License-Identifier: Apache-2.0
"""Upsampling into a concatenation, on nnU-Net's decoder steps: convt3d, eager, and torch.compile.

    python benchmarks/cat.py                 # all rows, in about two minutes; JSON in out/benchmarks/cat.json
    python benchmarks/cat.py --rows '*/fp16/*'

Each row is checked first (both parts, on memory that held nan), then timed as run.py does it: GPU time of
whole calls, medians of interleaved runs, the L2 cache flushed where the tensors would fit into it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401 (finds convt3d and the tests' accuracy bound)
import convt3d
import report
from accuracy import judge, mode_of
from cases import Case, Tensors
from convt3d import _native
from floor import floor
from gpu import Gpu
from workloads import ROWS, Row

RUNS, WARMUP, SECONDS = 5, 5, 0.03
COLUMNS = (
    "row", "into the slice", "convt3d cat ms", "convt3d + cat ms", "eager ms", "compile ms", "floor ms",
    "÷ floor", "× eager", "× compile", "of bound",
)  # fmt: skip


def rows(pattern: str) -> list[Row]:
    """nnU-Net's steps in the modes that networks run; the skip has as many channels as the result."""
    chosen = [r for r in ROWS if r.workload.name.startswith("nnunet-") and r.mode in ("fp16", "tf32")]
    return [row for row in chosen if fnmatchcase(row.name, pattern)]


def draw(row: Row) -> dict[str, Tensor]:
    shapes = row.workload.shapes()
    made = {}
    for name, key, std in (
        ("x", "input", 1.0),
        ("w", "weight", 0.1),
        ("b", "bias", 1.0),
        ("skip", "add", 1.0),
    ):
        values = torch.empty(shapes[key], dtype=row.dtype, device="cuda").normal_(std=std)
        made[name] = values.contiguous(memory_format=row.memory_format) if values.dim() == 5 else values
    return made


def contestants(row: Row) -> dict[str, Callable[..., Tensor]]:
    spatial = row.workload.convolution()

    def fused(x: Tensor, w: Tensor, b: Tensor, skip: Tensor) -> Tensor:
        return convt3d.conv_transpose3d_cat(x, w, b, *spatial, skip=skip)

    def then_cat(x: Tensor, w: Tensor, b: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([convt3d.conv_transpose3d(x, w, b, *spatial), skip], 1)

    def eager(x: Tensor, w: Tensor, b: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([torch.nn.functional.conv_transpose3d(x, w, b, *spatial), skip], 1)

    torch._dynamo.reset()
    compiled: Any = torch.compile(eager, dynamic=False)
    return {"fused": fused, "then_cat": then_cat, "eager": eager, "compile": compiled}


def check(row: Row, t: dict[str, Tensor], call: Callable[..., Tensor]) -> tuple[str, float]:
    """The kernel that wrote into the slice ("" for none), and the share of the accuracy bound that was used.

    Raises:
        AssertionError: a wrong value.
    """
    took: list[bool] = []
    loaded = _native.native()

    def spy(operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            out = operator(*arguments)
            took.append(out is not None and out is not False)
            return out

        return call

    w = row.workload
    case = Case(
        batch=1, cin=w.cin, cout=w.cout, size=w.size, kernel=w.kernel, stride=w.stride, padding=w.padding,
        output_padding=w.output_padding, dtype=row.dtype, add="none", precision="tf32",
    )  # fmt: skip
    n, c, *size = w.shapes()["add"]
    poison = torch.full((n, 2 * c, *size), float("nan"), dtype=row.dtype, device="cuda")
    del poison
    # The short way, and the one behind it where the library does not copy the skip.
    _native._native = replace(loaded, quick_cat=spy(loaded.quick_cat), forward_into=spy(loaded.forward_into))
    try:
        out = call(t["x"], t["w"], t["b"], t["skip"])
    finally:
        _native._native = loaded
    assert torch.equal(out[:, c:], t["skip"]), f"{row.name}: the skip is not what it was"
    spatial = row.workload.convolution()
    path = convt3d.explain(t["x"], t["w"], t["b"], *spatial, skip=t["skip"]).path
    assert any(took) == path.startswith("sm"), f"{row.name}: {path} was to run"
    last = Tensors(t["x"][-1:], t["w"], t["b"], None)
    verdict = judge(case, last, out[-1:, :c], mode_of(case, True, path))
    assert not verdict.failure, verdict.failure
    return path if any(took) else "", verdict.share


def time_row(
    gpu: Gpu, sets: list[dict[str, Tensor]], calls: dict[str, Callable[..., Tensor]]
) -> dict[str, float]:
    """Median milliseconds by contestant."""

    def bound(call: Callable[..., Tensor], count: int) -> list[Callable[[], object]]:
        arguments = [tuple(t[name] for name in ("x", "w", "b", "skip")) for t in sets]
        return [partial(call, *arguments[i % len(sets)]) for i in range(count)]

    moved = 2 * sum(t.numel() * t.element_size() for t in sets[0].values())
    flush = gpu.fits_in_cache(moved)
    counts = {}
    for name, call in calls.items():
        gpu.time(bound(call, WARMUP), flush)
        once = statistics.median(gpu.time(bound(call, WARMUP), flush)) * 1e-3
        counts[name] = max(5, min(100, round(SECONDS / once)))
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(RUNS):
        for name, call in calls.items():
            runs[name].append(statistics.median(gpu.time(bound(call, counts[name]), flush)))
    return {name: statistics.median(times) for name, times in runs.items()}


def measure(row: Row, gpu: Gpu, ceilings: Any) -> dict[str, Any]:
    sets = [draw(row) for _ in range(2)]
    calls = contestants(row)
    into_slice, share = check(row, sets[0], calls["fused"])
    # x, the weight and the bias once, the skip and the result once each; the result holds both parts.
    result_bytes = 2 * sets[0]["skip"].numel() * row.dtype.itemsize
    moved = sum(t.numel() * row.dtype.itemsize for t in sets[0].values()) + result_bytes
    least = floor(moved, row.work()[1], row.mode, ceilings)
    times = time_row(gpu, sets, calls)
    return {
        "name": row.name, "into_slice": into_slice, "bound_share": share, "bytes": moved,
        "floor_ms": least.seconds * 1e3, "ms": times,
    }  # fmt: skip


def cells(result: dict[str, Any]) -> list[str]:
    ms = result["ms"]
    best = ms["fused"]
    return [
        result["name"], result["into_slice"] or "no",
        *(report.milliseconds(ms[name]) for name in ("fused", "then_cat", "eager", "compile")),
        report.milliseconds(result["floor_ms"]), f"{best / result['floor_ms']:.2f}",
        f"{ms['eager'] / best:.2f}", f"{ms['compile'] / best:.2f}", f"{result['bound_share']:.2f}",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", default="*", help="a glob over row names, such as '*/fp16/ndhwc'")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"), help="default: %(default)s")
    arguments = parser.parse_args()
    chosen = rows(arguments.rows)
    if not chosen:
        parser.error(f"no row is called {arguments.rows!r}")
    if not torch.cuda.is_available():
        print("cat.py: there is no NVIDIA GPU that torch can use: nothing to measure", file=sys.stderr)
        return 2
    gpu = Gpu()
    console = report.console()
    ceilings = gpu.ceilings()
    results = []
    arguments.output.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), gpu.tf32(True):
        for row in chosen:
            results.append(measure(row, gpu, ceilings))
            console.step(", ".join(cells(results[-1])))
            gpu.release()
            text = json.dumps({**gpu.describe(), "ceilings": vars(ceilings), "rows": results}, indent=1)
            (arguments.output / "cat.json").write_text(text)
    console.table(f"{gpu.name}: conv_transpose3d_cat", COLUMNS, [cells(result) for result in results])
    slower = [r["name"] for r in results if r["ms"]["fused"] > min(r["ms"]["eager"], r["ms"]["compile"])]
    if slower:
        console.line(f"not the fastest: {', '.join(slower)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
