# SPDX-License-Identifier: Apache-2.0
"""Results in words: where and how, the table, small rows' host time, and what is not as it should be."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import _paths  # noqa: F401 (finds convt3d)
from convt3d.cli.console import Console
from results import OK, Results, RowResult, verdict

COLUMNS = (
    "row",
    "path",
    "convt3d ms",
    "± %",
    "floor ms",
    "of",
    "÷ floor",
    "eager ms",
    "× eager",
    "compile ms",
    "× compile",
    "max error",
    "of bound",
)
SMALL_COLUMNS = (
    "small row",
    "convt3d host µs",
    "eager host µs",
    "compile host µs",
    "conv alone host µs",
    "convt3d GPU µs",
    "eager GPU µs",
    "compile GPU µs",
    "conv alone GPU µs",
)
_CONTESTANTS = ("convt3d", "eager", "compile", "conv")


def console() -> Console:
    """rich at a terminal, plain text elsewhere: a file should not be folded to 80 columns."""
    return Console(plain=not sys.stdout.isatty())


def milliseconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def cells(row: RowResult) -> list[str]:
    """The row as the table shows it, in the order of COLUMNS."""
    if row.status != OK:
        return [row.name, row.path, row.status.upper(), *[""] * (len(COLUMNS) - 3)]
    ratio = row.floor_ratio
    out = [
        row.name,
        row.path,
        _time(row, "convt3d"),
        f"{row.times['convt3d'].spread * 100:.1f}",
        milliseconds(row.floor_ms),
        row.floor_bound,
        "" if ratio is None else f"{ratio:.2f}",
    ]
    for other in ("eager", "compile"):
        speedup = row.speedup(other)
        out += [_time(row, other), "" if speedup is None else f"{speedup:.2f}"]
    out += ["" if row.max_abs_error is None else f"{row.max_abs_error:.1e}"]
    return [*out, "" if row.bound_share is None else f"{row.bound_share:.2f}"]


def small_cells(row: RowResult) -> list[str]:
    """Host and GPU microseconds, in the order of SMALL_COLUMNS."""
    hosts = [row.times[name].host_us if row.has(name) else None for name in _CONTESTANTS]
    gpus = [row.times[name].median_ms * 1e3 if row.has(name) else None for name in _CONTESTANTS]
    return [row.name, *("" if value is None else f"{value:.1f}" for value in (*hosts, *gpus))]


def _time(row: RowResult, contestant: str) -> str:
    if contestant not in row.times:
        return ""
    return milliseconds(row.times[contestant].median_ms) if row.has(contestant) else "failed"


def machine(results: Results) -> list[str]:
    """Date, versions and ceilings of each shard that measured a row."""
    lines = [f"GPU {results.gpu}, CONVT3D_KERNEL={results.kernel}"]
    used = sorted({row.shard for row in results.rows.values()})
    for index in used:
        shard, c = results.shards[index], results.ceilings(index)
        commit = shard["commit"] or "commit unknown"
        lines.append(
            f"shard {index}: {shard['date']}, convt3d {shard['convt3d']} ({commit}), "
            f"torch {shard['torch']}, CUDA {shard['cuda']}, cuDNN {shard['cudnn']} "
            f"(benchmark={shard['cudnn_benchmark']}), driver {shard['driver']}"
        )
        lines.append(
            f"         ceilings: copy {c.copy / 1e12:.2f} TB/s, TFLOP/s fp16 {c.fp16 / 1e12:.0f}, "
            f"bf16 {c.bf16 / 1e12:.0f}, tf32 {c.tf32 / 1e12:.0f}"
        )
    return lines


def summary(rows: Sequence[RowResult]) -> list[str]:
    """How often convt3d is ahead, and every row where it is not, or that has no time."""
    lines = []
    for other, name in (("eager", "eager"), ("compile", "torch.compile")):
        verdicts = {row.name: verdict(row.speedup(other)) for row in rows}
        compared = {row: answer for row, answer in verdicts.items() if answer}
        if compared:
            ahead = sum(answer == "faster" for answer in compared.values())
            lines.append(f"at least 3 % faster than {name}: {ahead} of {len(compared)} rows")
            lines += [f"  {answer}: {row}" for row, answer in compared.items() if answer != "faster"]
    for row in rows:
        if row.status != OK:
            lines.append(f"{row.status.upper()}: {row.name}: {row.message}")
        lines += [f"{name} failed: {row.name}: {t.failure}" for name, t in row.times.items() if t.failure]
    return lines


def show(results: Results, rows: Sequence[RowResult], out: Console | None = None) -> None:
    """Prints everything about ``rows``."""
    out = out or console()
    for line in machine(results):
        out.line(line)
    out.table(
        "Median of five interleaved runs; GPU time of everything a call launches",
        COLUMNS,
        [*map(cells, rows)],
    )
    small = [row for row in rows if row.has("convt3d") and row.times["convt3d"].host_us is not None]
    if small:
        out.table(
            "Small rows: what a call costs the host, and the GPU", SMALL_COLUMNS, [*map(small_cells, small)]
        )
    out.line()
    for line in summary(rows):
        out.line(line)
