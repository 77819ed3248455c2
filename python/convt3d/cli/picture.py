# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: time and error of each candidate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .demo import Candidate

_OURS, _THEIRS = "#1b7837", "#9aa0a6"


def save_picture(
    candidates: list[Candidate], output: Path, device_name: str, batch: int, floor: float | None
) -> str:
    """Saves ``output/demo.png`` and returns a line that says so, or why not.

    Args:
        floor: seconds that the bytes alone take; drawn as a line if known.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return "No picture: matplotlib is not installed."
    shown = [c for c in candidates if not c.skipped]
    figure, (times, errors) = plt.subplots(1, 2, figsize=(12, 1.8 + 0.55 * max(4, len(shown))))
    figure.suptitle(
        f"ConvTranspose3d + add + t·hardswish(t), batch {batch}, fp32, {device_name}", fontsize=12
    )
    colours = [_OURS if c.name.startswith("convt3d") else _THEIRS for c in shown]
    names = [c.name for c in shown]
    bars = times.barh(names, [c.milliseconds for c in shown], color=colours)
    times.bar_label(bars, labels=[f"{c.milliseconds:.3g} ms" for c in shown], padding=4)
    times.invert_yaxis()
    times.margins(x=0.18)
    times.set_xlabel("median time, ms (shorter is better)")
    if floor is not None:
        times.axvline(floor * 1e3, color="black", linestyle="--", linewidth=1)
        times.annotate("byte floor", (floor * 1e3, 1.01), xycoords=("data", "axes fraction"), fontsize=8)
    _draw_errors(errors, shown)
    for axes in (times, errors):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    output.mkdir(parents=True, exist_ok=True)
    path = output / "demo.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return f"picture: {path}"


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
