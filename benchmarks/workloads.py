# SPDX-License-Identifier: Apache-2.0
"""The table of workloads, and the rows that are measured: each workload in every mode and layout.

Row names (``workload/mode/layout``) are stable: results of different days are compared by them. To change a
workload, add another one under a new name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

Triple = tuple[int, int, int]

MODES = ("tf32", "ieee", "fp16", "bf16")
"""Arithmetic: fp32 tensors under PyTorch's two settings for convolutions, and the two 16-bit types."""

LAYOUTS = ("ncdhw", "ndhwc")
"""Contiguous, and channels_last_3d; of every tensor of the call, the weight included."""

_DTYPES = {"tf32": torch.float32, "ieee": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FORMATS = {"ncdhw": torch.contiguous_format, "ndhwc": torch.channels_last_3d}


@dataclass(frozen=True)
class Workload:
    """``act(conv_transpose3d(x, weight) + bias + add)`` with a full-size ``add``. Triples are (D, H, W)."""

    name: str
    batch: int
    cin: int
    cout: int
    size: Triple
    kernel: Triple = (3, 3, 3)
    stride: Triple = (2, 2, 2)
    padding: Triple = (1, 1, 1)
    output_padding: Triple = (1, 1, 1)
    bias: bool = True
    activation: str = "leaky_relu"
    negative_slope: float = 0.01

    def convolution(self) -> tuple[Triple, Triple, Triple]:
        """stride, padding, output_padding: what follows the bias in PyTorch's order."""
        return self.stride, self.padding, self.output_padding

    def out_size(self) -> Triple:
        from convt3d._problem import output_extent

        d, h, w = (
            output_extent(i, k, s, p, op, 1)
            for i, k, s, p, op in zip(
                self.size, self.kernel, self.stride, self.padding, self.output_padding, strict=True
            )
        )
        return d, h, w

    def shapes(self, batch: int | None = None) -> dict[str, tuple[int, ...]]:
        """Of input, weight, bias (where there is one) and add."""
        n = self.batch if batch is None else batch
        shapes: dict[str, tuple[int, ...]] = {
            "input": (n, self.cin, *self.size),
            "weight": (self.cin, self.cout, *self.kernel),
            "add": (n, self.cout, *self.out_size()),
        }
        if self.bias:
            shapes["bias"] = (self.cout,)
        return shapes


def _k2(name: str, batch: int, cin: int, cout: int, size: Triple, **other: Any) -> Workload:
    """kernel = stride = 2, no padding."""
    return Workload(name, batch, cin, cout, size, (2, 2, 2), (2, 2, 2), (0, 0, 0), (0, 0, 0), **other)


def _cube(extent: int) -> Triple:
    return (extent, extent, extent)


WORKLOADS = (
    # KernelBench level 2, problem 26: the reference.
    Workload("reference", 128, 32, 64, _cube(16), activation="x_hardswish"),
    # nnU-Net's decoder steps, from the deepest to the last.
    _k2("nnunet-320-320-d8", 2, 320, 320, _cube(8)),
    _k2("nnunet-320-256-d16", 2, 320, 256, _cube(16)),
    _k2("nnunet-256-128-d32", 2, 256, 128, _cube(32)),
    _k2("nnunet-128-64-d64", 2, 128, 64, _cube(64)),
    _k2("nnunet-64-32-d64", 2, 64, 32, _cube(64)),
    # k3 s2 p1 op1, from narrow and memory-bound to wide and compute-bound.
    Workload("k3-64-64-d64", 2, 64, 64, _cube(64)),
    Workload("k3-128-64-d48", 2, 128, 64, _cube(48)),
    Workload("k3-256-128-d24", 2, 256, 128, _cube(24)),
    # PSMNet's last hourglass step, one image pair: BatchNorm folded, so no bias of its own.
    Workload("psmnet-64-32", 1, 64, 32, (12, 16, 32), bias=False),
    # MONAI's VQVAE decoder.
    Workload("vqvae-192-96-d32", 1, 192, 96, _cube(32), (4, 4, 4), (2, 2, 2), (1, 1, 1), (0, 0, 0)),
    # Occupancy networks' decoder, first step.
    Workload("occupancy-256-128-d4", 64, 256, 128, _cube(4)),
    # UNETR++'s last step: kernel = stride = (2, 4, 4).
    Workload(
        "unetrpp-32-16-k244", 2, 32, 16, _cube(32), (2, 4, 4), (2, 4, 4), (0, 0, 0), (0, 0, 0), bias=False
    ),
    # SegResNetDS on anisotropic images.
    Workload(
        "segresnetds-96-48-k331",
        2,
        96,
        48,
        (64, 64, 32),
        (3, 3, 1),
        (2, 2, 1),
        (1, 1, 0),
        (1, 1, 0),
        bias=False,
    ),
    # pytorch-3dunet's step: output_padding 0 makes every output row odd, which TMA cannot address.
    Workload("odd-128-64-d32", 2, 128, 64, _cube(32), output_padding=(0, 0, 0), bias=False),
)


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    workload: Workload
    mode: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.mode}/{self.layout}"

    def with_activation(self, activation: str) -> Row:
        """The same row behind another activation, which is then a part of its name."""
        name = f"{self.workload.name}-{activation}"
        return replace(self, workload=replace(self.workload, name=name, activation=activation))

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.mode]

    @property
    def memory_format(self) -> torch.memory_format:
        return _FORMATS[self.layout]

    @property
    def allow_tf32(self) -> bool:
        """What PyTorch's switch says while the row runs; it matters to fp32 alone. The default is True."""
        return self.mode != "ieee"

    def work(self) -> tuple[int, int]:
        """(bytes, FLOPs): every tensor moved once, and the taps that the stride leaves live."""
        from convt3d import explain

        tensors = {
            name: torch.empty(shape, dtype=self.dtype, device="meta")
            for name, shape in self.workload.shapes().items()
        }
        e = explain(
            tensors["input"],
            tensors["weight"],
            tensors.get("bias"),
            *self.workload.convolution(),
            add=tensors["add"],
            activation=self.workload.activation,
        )
        return e.bytes, e.flops


ROWS = tuple(Row(workload, mode, layout) for workload in WORKLOADS for mode in MODES for layout in LAYOUTS)


def select(patterns: str | None) -> list[Row]:
    """Rows by a comma-separated list of names and globs, in the table's order; all for None.

    A pattern without a slash is matched against workload names, another one against row names.

    Raises:
        ValueError: a pattern matches nothing.
    """
    if patterns is None:
        return list(ROWS)
    wanted = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        names = set(_matches(pattern))
        if not names:
            raise ValueError(f"no row is called {pattern!r}; --list prints the names")
        wanted |= names
    if not wanted:
        raise ValueError("no row was asked for; --list prints the names")
    return [row for row in ROWS if row.name in wanted]


def _matches(pattern: str) -> Iterator[str]:
    for row in ROWS:
        if fnmatchcase(row.name if "/" in pattern else row.workload.name, pattern):
            yield row.name
