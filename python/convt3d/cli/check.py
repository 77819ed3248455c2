# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d check``: results on this machine against float64, beside PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _accuracy as accuracy
from .._precision import conv_fp32_switch, resolve_precision
from .call import CallSpec
from .console import Console
from .progress import Progress

_NONE, _ONE, _TWO, _FOUR = (0, 0, 0), (1, 1, 1), (2, 2, 2), (4, 4, 4)

# What networks run, in sizes that a CPU takes in seconds.
CALLS = (
    CallSpec(2, 32, 64, (8, 8, 8), add=True, activation="x_hardswish", name="the reference, smaller"),
    CallSpec(2, 64, 32, (8, 8, 8), _TWO, _TWO, _NONE, _NONE, skip=32, name="nnU-Net's step and skip"),
    CallSpec(1, 32, 32, (6, 7, 9), _TWO, _TWO, _NONE, _NONE, add=True, name="SegResNet's, odd sizes"),
    CallSpec(1, 96, 48, (8, 8, 8), _FOUR, _TWO, _ONE, _NONE, activation="relu", name="VQVAE's step"),
    CallSpec(1, 48, 24, (8, 8, 6), (3, 3, 1), (2, 2, 1), (1, 1, 0), (1, 1, 0), add=True, name="anisotropic"),
    CallSpec(
        1, 32, 16, (7, 7, 7), output_padding=_NONE, bias=False, add=True, add_order="after",
        activation="leaky_relu", name="odd output rows",
    ),
    CallSpec(1, 20, 12, (5, 6, 7), activation="gelu", name="odd channel counts"),
    CallSpec(1, 16, 16, (6, 6, 6), groups=4, activation="silu", name="groups"),
    CallSpec(1, 8, 8, (6, 6, 6), dilation=(2, 1, 2), activation="elu", name="dilation"),
)  # fmt: skip
MODES = (
    ("fp32", torch.float32, "ieee"),
    ("tf32", torch.float32, "tf32"),
    ("fp16", torch.float16, "default"),
    ("bf16", torch.bfloat16, "default"),
)


@dataclass(frozen=True)
class Row:
    """One call's verdict. ``share`` of the bound is used; ``theirs`` is PyTorch's largest error."""

    cells: tuple[str, ...]
    failure: str


def check(console: Console, device: str = "auto", seed: int = 0) -> int:
    """Runs every call in every mode and layout; returns 0, or 1 where a result is beyond the accuracy bound.

    Args:
        device: "auto", "cpu" or "cuda".
        seed: of the inputs.
    """
    on_gpu = torch.cuda.is_available()
    if device == "cuda" and not on_gpu:
        console.line("There is no GPU that torch can use; `python -m convt3d info` says more.")
        return 1
    device = ("cuda" if on_gpu else "cpu") if device == "auto" else device
    specs = list(_specs())
    rows = []
    with Progress(len(specs), quiet=True) as progress, torch.no_grad():
        for spec in specs:
            progress.start(spec.name)
            rows.append(_row(spec, device, seed))
            progress.done(spec.name)
    columns = ("call", "type", "layout", "path", "error", "of bound", "PyTorch", "")
    reference = "float64 (tf32: fp32 tensors, float64 of their values rounded to TF32)"
    title = f"Largest errors against {reference}, on {device}; the bound is docs/numerics.md's"
    console.table(title, columns, [r.cells for r in rows])
    failures = [row.failure for row in rows if row.failure]
    for text in failures:
        console.line(f"WRONG: {text}")
    if not failures:
        console.line(f"All {len(rows)} results are within the bound.")
        if device == "cpu":
            console.line("On a CPU they are PyTorch's convolutions: no CUDA kernel was checked.")
    return int(bool(failures))


def _specs() -> Iterator[CallSpec]:
    for call in CALLS:
        for _, dtype, precision in MODES:
            for layout in ("ncdhw", "ndhwc"):
                yield replace(call, dtype=dtype, precision=precision, layout=layout)


def _row(spec: CallSpec, device: str, seed: int) -> Row:
    tensors = spec.draw(device, seed)
    path = spec.explain(tensors).path
    with conv_fp32_switch(spec.precision, device):
        ours, theirs = spec.ours(tensors), spec.theirs(tensors)
    tf32 = resolve_precision(spec.precision, device) == "tf32"
    mode = accuracy.mode_of(spec.dtype, tf32, path)
    y, t, magnitude = spec.exact(tensors, tf32=mode == "tf32")
    half_ulp, allowed = accuracy.allowed_error(
        spec.activation, spec.add_order == "after", spec.dtype, y, t, magnitude, mode
    )
    part = ours[:, : spec.cout]
    error = (part.double() - y).abs()
    share = float(((error - half_ulp) / allowed.clamp_min(1e-300)).max().clamp_min(0))
    good = bool((error <= half_ulp + allowed).all()) and part.dtype == spec.dtype
    if spec.skip:
        good = good and torch.equal(ours[:, spec.cout :], tensors["skip"])
    name = next(n for n, dtype, precision in MODES if (dtype, precision) == (spec.dtype, spec.precision))
    cells = (
        spec.name,
        name,
        spec.layout,
        path,
        f"{_largest(error):.1e}",
        f"{share:.2f}",
        # PyTorch has no TF32 on a CPU: its result there is not meant to be that of rounded operands.
        "-" if mode == "tf32" and device == "cpu" else f"{_largest(theirs[:, : spec.cout].double() - y):.1e}",
        "good" if good else "WRONG",
    )
    failure = "" if good else f"{spec.name}, {name}, {spec.layout}, path {path}: {share:.2f} of the bound"
    return Row(cells, failure)


def _largest(error: Tensor) -> float:
    return float(error.abs().max()) if error.numel() else 0.0
