# SPDX-License-Identifier: Apache-2.0
"""The picture: a roofline, and speedups beside the ratio to the floor.

    python benchmarks/plot.py FILE.json [--rows PATTERN] [--output PICTURE.png] [--no-table]

redraws it from a file of results, and prints the table. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

import report
from floor import Ceilings, multiply_rate
from results import OK, Results, RowResult
from workloads import LAYOUTS, MODES

_COLOURS = {"tf32": "#2166ac", "ieee": "#1b7837", "fp16": "#d95f02", "bf16": "#7b3294"}
_MARKERS = {"ncdhw": "o", "ndhwc": "s"}
_GREY, _INK, _RED = "#9aa0a6", "#202124", "#c5221f"
_BAR = 0.36


def parts(row: RowResult) -> tuple[str, str, str]:
    """workload, mode, layout."""
    workload, mode, layout = row.name.split("/")
    return workload, mode, layout


def draw(results: Results, rows: Sequence[RowResult], path: Path) -> str:
    """Saves the picture; returns a line that says so, or why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return "no picture: matplotlib is not installed"
    timed = [row for row in rows if row.floor_ratio is not None]
    if not timed:
        return "no picture: no row has a time"
    workloads = list(dict.fromkeys(parts(row)[0] for row in rows))
    modes = [mode for mode in MODES if any(parts(row)[1] == mode for row in rows)]
    lines = [(w, layout) for w in workloads for layout in LAYOUTS if _any(rows, w, layout)]
    bars_height = 1.5 + 0.38 * len(lines)
    figure = plt.figure(figsize=(15, 6.4 + bars_height), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[6.0, bars_height])
    top, bottom = halves
    figure.suptitle(_title(results, timed), fontsize=14, fontweight="bold", color=_INK)
    roofline = top.subplots()
    _roofline(roofline, results, timed, workloads)
    _bars(bottom.subplots(1, len(modes), sharey=True, squeeze=False)[0], rows, modes, lines, workloads)
    _slope_label(roofline, _mean_ceilings(results, timed), roofline.get_xlim()[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white", bbox_inches="tight", pad_inches=0.2)
    plt.close(figure)
    return f"picture: {path}"


def _any(rows: Sequence[RowResult], workload: str, layout: str) -> bool:
    return any(parts(row)[0] == workload and parts(row)[2] == layout for row in rows)


def _title(results: Results, rows: Sequence[RowResult]) -> str:
    dates = sorted({str(results.shards[row.shard]["date"])[:10] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    kernel = "" if results.kernel == "auto" else f", CONVT3D_KERNEL={results.kernel}"
    return f"convt3d: transposed convolution + bias + add + activation on {results.gpu}, {when}{kernel}"


def _mean_ceilings(results: Results, rows: Sequence[RowResult]) -> Ceilings:
    """Shards differ by a percent or so; each row's floor uses its own, the picture the mean."""
    each = [results.ceilings(shard) for shard in sorted({row.shard for row in rows})]
    return Ceilings(*(fmean(getattr(c, name) for c in each) for name in ("copy", "fp16", "bf16", "tf32")))


def _roofline(ax: Any, results: Results, rows: Sequence[RowResult], workloads: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullFormatter

    c = _mean_ceilings(results, rows)
    intensities = [row.flops / row.bytes for row in rows]
    left, right = min(intensities) / 1.8, max(*intensities, c.fp16 / c.copy) * 2.2
    for mode in ("fp16", "tf32", "ieee"):
        rate = multiply_rate(mode, c)
        knee = rate / c.copy
        ax.plot([knee, right], [rate, rate], color=_COLOURS[mode], linewidth=1.4, zorder=1)
        name = {"fp16": "fp16, bf16", "ieee": "ieee (three products)"}.get(mode, mode)
        ax.text(right / 1.02, rate * 1.04, f"{name}: {rate / 1e12:.0f} TFLOP/s", ha="right", va="bottom",
                fontsize=9, color=_COLOURS[mode])  # fmt: skip
    highest = multiply_rate("fp16", c)
    ax.plot([left, highest / c.copy], [left * c.copy, highest], color=_INK, linewidth=1.4, zorder=1)
    theirs = {"eager": "v", "compile": "D"}
    # Modes of a workload share an intensity: a little to the side, or they would hide one another.
    step = (right / left) ** 0.004
    tops: dict[tuple[str, int], tuple[float, float]] = {}
    lowest = math.inf
    for row in rows:
        workload, mode, layout = parts(row)
        x = row.flops / row.bytes * step ** (1 if mode in ("ieee", "bf16") else -1)
        for name, marker in theirs.items():
            value = row.achieved(name)
            if value is not None:
                lowest = min(lowest, value)
                ax.plot(x, value, marker, color="none", markeredgecolor=_COLOURS[mode], alpha=0.45,
                        markersize=5, zorder=2)  # fmt: skip
        value = row.achieved("convt3d") or 0.0
        lowest = min(lowest, value)
        ax.plot(x, value, _MARKERS[layout], color=_COLOURS[mode], markeredgecolor="white",
                markeredgewidth=0.6, markersize=8, zorder=3)  # fmt: skip
        key = (workload, round(math.log(row.flops / row.bytes) * 20))
        tops[key] = (x, max(value, tops.get(key, (x, 0.0))[1]))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(left, right)
    ax.set_ylim(lowest / 1.6, highest * 1.7)
    if len(workloads) > 1:
        _number(ax, tops, workloads)
    ax.set_xlabel("arithmetic intensity, FLOP/byte (every tensor moved once, live taps only)")
    ax.set_ylabel("achieved FLOP/s")
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if left < t < right]
    ax.set_xticks(ticks, [f"{t}" for t in ticks])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e12:g} T"))
    ax.grid(which="major", color="#e8eaed", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title("Roofline: ceilings measured in the same run", loc="left", fontsize=12, color=_INK)
    shown = {parts(row)[1] for row in rows}
    handles: list[Any] = [
        Line2D([], [], marker="o", linestyle="", color=_COLOURS[mode], label=f"convt3d, {mode}")
        for mode in MODES
        if mode in shown
    ]
    handles += [
        Line2D([], [], marker=marker, linestyle="", color=_INK, label=layout.upper())
        for layout, marker in _MARKERS.items()
    ]
    handles += [
        Line2D([], [], marker=marker, linestyle="", color="none", markeredgecolor=_GREY, label=name)
        for name, marker in (("eager", "v"), ("torch.compile", "D"))
    ]
    ax.legend(handles=handles, loc="lower right", fontsize=9, ncols=2, framealpha=0.95)


def _slope_label(ax: Any, c: Ceilings, left: float) -> None:
    """Along the bandwidth line. Its angle is known only when the axes have their final size."""
    ax.figure.figure.draw_without_rendering()
    (x0, y0), (x1, y1) = ax.transData.transform([(left, left * c.copy), (2 * left, 2 * left * c.copy)])
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    ax.annotate(
        f"copy: {c.copy / 1e12:.2f} TB/s",
        (left * 1.08, left * 1.08 * c.copy),
        xytext=(-2, 6),
        textcoords="offset points",
        rotation=angle,
        rotation_mode="anchor",
        fontsize=9,
        color=_INK,
    )


def _number(ax: Any, tops: dict[tuple[str, int], tuple[float, float]], workloads: Sequence[str]) -> None:
    """Each cluster of points carries its workload's number in the list below."""
    placed: list[list[Any]] = []  # x, y, text; neighbours share one label
    for (workload, _), (x, y) in sorted(tops.items(), key=lambda item: item[1]):
        number = str(workloads.index(workload) + 1)
        near = [p for p in placed if abs(math.log(x / p[0])) < 0.08 and abs(math.log(y / p[1])) < 0.35]
        if near:
            near[0][1] = max(near[0][1], y)
            near[0][2] += f", {number}"
        else:
            placed.append([x, y, number])
    for x, y, text in placed:
        ax.annotate(text, (x, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9,
                    fontweight="bold", color=_INK, zorder=4)  # fmt: skip


def _bars(
    axes: Any,
    rows: Sequence[RowResult],
    modes: Sequence[str],
    lines: Sequence[tuple[str, str]],
    workloads: Sequence[str],
) -> None:
    by_parts = {parts(row): row for row in rows}
    speedups = [s for row in rows for s in (row.speedup("eager"), row.speedup("compile")) if s]
    low = min([0.8, *(s / 1.25 for s in speedups)])
    high = max([2.0, *(s * 1.9 for s in speedups)])
    for ax, mode in zip(axes, modes, strict=True):
        ax.set_xscale("log")
        ax.set_xlim(low, high)
        for y, (workload, layout) in enumerate(lines):
            row = by_parts.get((workload, mode, layout))
            if row is not None:
                _line(ax, y, row, _COLOURS[mode])
        ax.axvline(1, color=_INK, linewidth=1)
        ax.set_title(mode, loc="left", fontsize=12, color=_COLOURS[mode], fontweight="bold")
        ax.text(1.015, 1.0, "÷ floor", transform=ax.transAxes, fontsize=9, va="bottom", color=_INK)
        ax.set_xlabel("times as fast (log scale)", fontsize=9)
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= high]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=9)
        ax.minorticks_off()
        ax.tick_params(axis="y", length=0)
        ax.spines[["top", "right", "left"]].set_visible(False)
        for y in range(1, len(lines)):
            if lines[y][0] != lines[y - 1][0]:
                ax.axhline(y - 0.5, color="#e8eaed", linewidth=0.8, zorder=0)
    numbered = len(workloads) > 1
    names = [
        f"{workloads.index(workload) + 1}  {workload}  {layout.upper()}"
        if numbered
        else f"{workload}  {layout.upper()}"
        for workload, layout in lines
    ]
    axes[0].set_yticks(range(len(lines)), names, fontsize=9)
    axes[0].set_ylim(len(lines) - 0.4, -0.6)
    _bars_legend(axes[0])


def _line(ax: Any, y: int, row: RowResult, colour: str) -> None:
    """Two bars from 1 (as fast) to the speedup, and the ratio to the floor behind them."""
    if row.status != OK:
        ax.text(1.08, y, row.status.upper(), va="center", fontsize=9, color=_RED, fontweight="bold")
        return
    for offset, other, alpha in ((-_BAR / 2, "eager", 1.0), (_BAR / 2, "compile", 0.5)):
        speedup = row.speedup(other)
        if speedup is None:
            continue
        ax.barh(y + offset, speedup - 1, _BAR, left=1, color=colour if speedup >= 1 else _RED, alpha=alpha)
        ax.text(max(speedup, 1) * 1.05, y + offset, f"{speedup:.3g}×", va="center", fontsize=7.5, color=_INK)
    ax.text(1.015, y, f"{row.floor_ratio:.2f}", transform=ax.get_yaxis_transform(), va="center", fontsize=9,
            color=_INK)  # fmt: skip


def _bars_legend(ax: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color="#5f6368", label="eager"),
        Patch(color="#5f6368", alpha=0.5, label="torch.compile"),
    ]
    ax.figure.legend(
        handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False,
        title="convt3d against (red: slower); numbers at the right: time over the floor", title_fontsize=9,
    )  # fmt: skip


def choose(results: Results, patterns: str | None) -> list[RowResult]:
    """Rows of the file by a comma-separated list of names and globs, as run.py takes it.

    Raises:
        ValueError: nothing matches.
    """
    rows = results.ordered()
    if patterns is not None:
        globs = [part.strip() for part in patterns.split(",") if part.strip()]
        rows = [
            row
            for row in rows
            if any(fnmatchcase(row.name if "/" in glob else row.name.split("/")[0], glob) for glob in globs)
        ]
    if not rows:
        raise ValueError("the file has no such rows")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/plot.py", description="Draws and prints stored results."
    )
    parser.add_argument("file", type=Path, help="JSON written by benchmarks/run.py")
    parser.add_argument("--rows", help="names or globs, separated by commas")
    parser.add_argument("--output", type=Path, help="picture (default: beside the file, .png)")
    parser.add_argument("--no-table", action="store_true", help="draw only")
    arguments = parser.parse_args(argv)
    try:
        results = Results.load(arguments.file)
        rows = choose(results, arguments.rows)
    except (OSError, ValueError) as error:
        print(f"benchmarks/plot.py: {error}", file=sys.stderr)
        return 2
    if not arguments.no_table:
        report.show(results, rows)
    print(draw(results, rows, arguments.output or arguments.file.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
