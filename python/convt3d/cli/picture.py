# SPDX-License-Identifier: Apache-2.0
"""Pictures: the demo's, of time and error of each candidate, and bars of times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .demo import Candidate

ON_A_CPU = "On a CPU both run PyTorch's convolution: the errors count, not the times."
_OURS, _THEIRS = "#1b7837", "#9aa0a6"


def save_picture(
    candidates: list[Candidate], output: Path, device_name: str, batch: int, floor: float | None
) -> str:
    """Saves ``output/demo.png`` and returns a line that says so, or why not.

    Args:
        floor: seconds that the bytes alone take; drawn as a line if known.
    """
    plt = _pyplot()
    if plt is None:
        return _NO_PICTURE
    shown = [c for c in candidates if not c.skipped]
    figure, (times, errors) = plt.subplots(1, 2, figsize=(12, 1.8 + 0.55 * max(4, len(shown))))
    title = f"ConvTranspose3d + add + t·hardswish(t), batch {batch}, fp32, {device_name}"
    if floor is None:  # on a CPU
        title += f"\n{ON_A_CPU}"
    figure.suptitle(title, fontsize=12)
    _draw_times(times, {c.name: c.milliseconds for c in shown}, None if floor is None else floor * 1e3)
    _draw_errors(errors, shown)
    for axes in (times, errors):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    output.mkdir(parents=True, exist_ok=True)
    path = output / "demo.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return f"picture: {path}"


def save_bars(medians: Mapping[str, float], path: Path, title: str, floor: float | None) -> str:
    """Saves a picture of ``medians`` (milliseconds by name) and returns a line that says so, or why not.

    Args:
        floor: milliseconds that the bytes alone take; drawn as a line if known.
    """
    plt = _pyplot()
    if plt is None:
        return _NO_PICTURE
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.55 * len(medians)))
    axes.set_title(title, fontsize=10, loc="left")
    _draw_times(axes, medians, floor)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return f"picture: {path}"


_NO_PICTURE = "No picture: matplotlib is not installed."


def _pyplot() -> Any:
    """matplotlib's, or None where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot


def _draw_times(ax: Any, medians: Mapping[str, float], floor: float | None) -> None:
    colours = [_OURS if name.startswith("convt3d") else _THEIRS for name in medians]
    bars = ax.barh(list(medians), list(medians.values()), color=colours)
    ax.bar_label(bars, labels=[f"{value:.3g} ms" for value in medians.values()], padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlabel("median time, ms (shorter is better)")
    if floor is not None:
        ax.axvline(floor, color="black", linestyle="--", linewidth=1)
        ax.annotate("byte floor", (floor, 1.01), xycoords=("data", "axes fraction"), fontsize=8)


def _draw_errors(ax: Any, shown: list[Candidate]) -> None:
    """Distribution of \\|result - float64\\| on a logarithmic axis."""
    import numpy as np

    edges = np.logspace(-11, -1, 81)
    for c in shown:
        if c.errors is None:
            continue
        # Exact results have no logarithm; they are counted in the lowest bin.
        values = np.clip(c.errors.numpy(), edges[0], edges[-1])
        ours = c.name.startswith("convt3d")
        ax.hist(
            values,
            bins=edges,
            histtype="stepfilled" if ours else "step",
            alpha=0.45 if ours else 1.0,
            weights=np.full(len(values), 100 / len(values)),
            label=f"{c.name} (max {c.max_error:.1e})",
        )
    ax.set_xscale("log")
    ax.set_xlabel("absolute error against float64")
    ax.set_ylabel("% of outputs")
    ax.legend(fontsize=8)
