# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documentation into docs/figures/*.svg; needs matplotlib.

    python scripts/make_figures.py            # draws them anew
    python scripts/make_figures.py --check    # fails where a file is not what would be drawn

Taps and classes are computed by the definition of the transposed convolution; times are the README's.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "figures"
README = ROOT / "README.md"
COLOURS = ("#1b7837", "#762a83", "#e08214", "#2166ac", "#b2182b", "#01665e", "#8c510a", "#4d4d4d")
GREY = "#d9d9d9"
CONTESTANTS = {"convt3d": COLOURS[0], "torch.compile": "#9aa0a6", "eager": GREY}


def live_taps(o: int, kernel: int, stride: int, padding: int) -> list[tuple[int, int]]:
    """(tap, input) pairs of output ``o``: those with ``stride * i = o + padding - tap``."""
    return [(k, (o + padding - k) // stride) for k in range(kernel) if (o + padding - k) % stride == 0]


def _row(ax: Any, y: float, count: int, colour: Callable[[int], str], label: str, prefix: str) -> None:
    for i in range(count):
        ax.add_patch(Rectangle((i - 0.42, y - 0.3), 0.84, 0.6, facecolor=colour(i), edgecolor="white"))
        ax.text(i, y, f"{prefix}{i}", ha="center", va="center", color="white", fontsize=9)
    ax.text(-0.9, y, label, ha="right", va="center", fontsize=10)


def residue_1d() -> Any:
    """Kernel 3, stride 2, padding 1 along one dimension: each output with the inputs and taps it sums."""
    figure, ax = plt.subplots(figsize=(9, 3.4))
    inputs, outputs, kernel, stride, padding = 4, 8, 3, 2, 1
    spread = (outputs - 1) / (inputs - 1)
    for o in range(outputs):
        for tap, i in live_taps(o, kernel, stride, padding):
            if not 0 <= i < inputs:
                continue
            ax.plot([i * spread, o], [1.7, 0.3], color=COLOURS[o % 2], linewidth=1.4, zorder=0)
            x, y = 0.62 * i * spread + 0.38 * o, 0.62 * 1.7 + 0.38 * 0.3
            ax.text(
                x, y, str(tap), fontsize=8, color=COLOURS[o % 2], ha="center", va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    for i in range(inputs):
        x = i * spread
        ax.add_patch(Rectangle((x - 0.42, 1.7), 0.84, 0.6, facecolor="#4d4d4d"))
        ax.text(x, 2.0, f"x{i}", ha="center", va="center", color="white", fontsize=9)
    ax.text(-0.9, 2.0, "input", ha="right", va="center")
    _row(ax, 0, outputs, lambda o: COLOURS[o % 2], "output", "y")
    ax.text(-0.9, 0.95, "tap", ha="right", va="center", fontsize=9, color="#4d4d4d")
    ax.text(
        3.5, -0.75, "even outputs: tap 1 of one input          odd outputs: taps 2 and 0 of two inputs",
        ha="center", fontsize=10,
    )  # fmt: skip
    ax.set_xlim(-2.2, 7.8)
    ax.set_ylim(-1, 2.5)
    ax.axis("off")
    return figure


def residue_2d() -> Any:
    """The four classes of a plane at kernel 3, stride 2, padding 1, and the taps of each."""
    figure, axes = plt.subplots(1, 5, figsize=(11, 2.6), width_ratios=(1.7, 1, 1, 1, 1))
    ax = axes[0]
    for h in range(6):
        for w in range(6):
            colour = COLOURS[2 * (h % 2) + w % 2]
            ax.add_patch(Rectangle((w, 5 - h), 0.92, 0.92, facecolor=colour))
    ax.set_xlim(-0.1, 6)
    ax.set_ylim(-0.1, 6)
    ax.set_title("outputs by residue (h mod 2, w mod 2)", fontsize=9)
    for cls, ax in enumerate(axes[1:]):
        h_taps = {tap for tap, _ in live_taps(cls // 2, 3, 2, 1)}
        w_taps = {tap for tap, _ in live_taps(cls % 2, 3, 2, 1)}
        for kh in range(3):
            for kw in range(3):
                live = kh in h_taps and kw in w_taps
                ax.add_patch(Rectangle((kw, 2 - kh), 0.92, 0.92, facecolor=COLOURS[cls] if live else GREY))
        count = len(h_taps) * len(w_taps)
        ax.set_title(f"({cls // 2}, {cls % 2}): {count} tap{'s' if count > 1 else ''}", fontsize=9)
        ax.set_xlim(-0.1, 3)
        ax.set_ylim(-0.1, 3)
    for ax in axes:
        ax.set_aspect("equal")
        ax.axis("off")
    return figure


def live_work() -> Any:
    """Multiplies of the zero-inserted form against those that are live, for common kernels in 3-D."""
    figure, ax = plt.subplots(figsize=(7, 2.8))
    cases = [(2, 2, 0), (3, 2, 1), (4, 2, 1), (4, 4, 0)]
    for y, (kernel, stride, padding) in enumerate(cases):
        per_dim = sum(len(live_taps(o, kernel, stride, padding)) for o in range(stride)) / stride
        ax.barh(y, kernel**3, color=GREY)
        ax.barh(y, per_dim**3, color=COLOURS[0])
        ax.text(kernel**3 + 1, y, f"{per_dim**3:.3g} of {kernel**3}", va="center", fontsize=9)
    ax.set_yticks(range(len(cases)), [f"k{k} s{s}" for k, s, _ in cases])
    ax.set_xlabel("multiplies per output voxel and channel pair")
    ax.set_xlim(0, 80)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def operands() -> Any:
    """How the tensors of a class become a matrix product."""
    figure, ax = plt.subplots(figsize=(10, 3.6))

    def box(x: float, y: float, w: float, h: float, colour: str, text: str, below: str, left: str) -> None:
        ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white"))
        ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", color="white", fontsize=10)
        ax.text(x + w / 2, y - 0.12, below, ha="center", va="top", fontsize=9)
        ax.text(x - 0.1, y + h / 2, left, ha="right", va="center", fontsize=9, rotation=90)

    box(0.6, 0.8, 2.2, 2.4, COLOURS[3], "x, gathered\n(no copy)", "K = taps of the class × Cin", "M = voxels")
    ax.text(3.25, 2, "×", fontsize=22, ha="center", va="center")
    box(4.0, 0.9, 1.4, 2.2, COLOURS[2], "weight\n(taps of\nthe class)", "N = Cout", "K = taps × Cin")
    ax.text(5.9, 2, "=", fontsize=22, ha="center", va="center")
    box(6.7, 0.8, 1.4, 2.4, COLOURS[0], "sums\n(fp32)", "N = Cout", "M = voxels")
    ax.annotate("", (9.0, 2), (8.2, 2), arrowprops={"arrowstyle": "->"})
    ax.text(
        9.1, 2, "+ bias + add\nactivation\n→ y at stride s\n(the class's\nsub-lattice)", va="center",
        fontsize=10,
    )  # fmt: skip
    ax.set_xlim(0, 11)
    ax.set_ylim(0.2, 3.5)
    ax.axis("off")
    return figure


def concatenation() -> Any:
    """Traffic of an upsampling U-Net step: concatenated afterwards, and straight into its slice."""
    figure, ax = plt.subplots(figsize=(9, 2.4))
    rows = {
        "conv, then cat": [("y written", 1, 0), ("y read", 1, 1), ("y written", 1, 0), ("skip", 2, 3)],
        "into the slice": [("y written", 1, 0), ("skip", 2, 3)],
    }
    for y, (name, parts) in enumerate(rows.items()):
        left = 0.0
        for text, width, colour in parts:
            ax.barh(y, width, left=left, color=COLOURS[colour], edgecolor="white", height=0.6)
            ax.text(left + width / 2, y, text, ha="center", va="center", color="white", fontsize=9)
            left += width
        ax.text(-0.1, y, name, ha="right", va="center")
    ax.set_xlim(-1.2, 5.2)
    ax.set_xlabel("passes over the output, the skip as wide as y")
    ax.set_yticks([])
    ax.set_xticks(range(6))
    ax.invert_yaxis()
    ax.spines[["top", "right", "left"]].set_visible(False)
    return figure


def results() -> list[tuple[str, dict[str, float]]]:
    """(row, milliseconds by contestant) of the first table of the README's results."""
    section = README.read_text().partition("\n## Results\n")[2]
    first = section[section.index("\n|") + 1 :].partition("\n\n")[0]
    lines = [line.strip().strip("|").split("|") for line in first.splitlines()]
    table = [[cell.strip() for cell in line] for line in lines]
    header, rows = table[0], table[2:]
    columns = {
        name: next(i for i, title in enumerate(header) if title.startswith(name)) for name in CONTESTANTS
    }
    found = []
    for row in rows:
        times = {}
        for name, column in columns.items():
            number = re.search(r"\d+(\.\d+)?", row[column])
            if number is not None:
                times[name] = float(number[0])
        found.append((f"{row[0].split(' (')[0]}, {row[1]}", times))
    return found


def speed() -> Any:
    """The README's results as bars."""
    rows = results()
    figure, ax = plt.subplots(figsize=(9, 0.5 + 0.62 * len(rows)))
    for y, (_, times) in enumerate(rows):
        for i, (name, value) in enumerate(times.items()):
            place = y + 0.26 * (i - 1)
            ax.barh(place, value, height=0.24, color=CONTESTANTS[name], label=name if y == 0 else None)
            ax.text(value + 0.08, place, f"{value:g} ms", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_xlabel("reference workload on an H200, ms (shorter is better)")
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = {
    "speed": speed,
    "residue-1d": residue_1d,
    "residue-2d": residue_2d,
    "live-work": live_work,
    "operands": operands,
    "concatenation": concatenation,
}


def draw(make: Callable[[], Any]) -> str:
    """The figure as SVG, the same on every run of one matplotlib."""
    with plt.rc_context({"svg.hashsalt": "convt3d", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = make()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws the figures of the documentation.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for name, make in FIGURES.items():
        file = FOLDER / f"{name}.svg"
        text = draw(make)
        if check and (not file.is_file() or file.read_text() != text):
            stale.append(name)
        elif not check:
            file.write_text(text)
            print(file)
    for name in stale:
        print(f"docs/figures/{name}.svg is not what would be drawn", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
