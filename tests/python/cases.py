# SPDX-License-Identifier: Apache-2.0
"""Calls to test with: one generator for every layout, type, activation and kernel family."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import convt3d

Triple = tuple[int, int, int]

ARITHMETIC: dict[str, dict[str, Any]] = {
    "ieee": {"precision": "ieee"},
    "tf32": {"precision": "tf32"},
    "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
}

ACTIVATIONS = (
    "none",
    "relu",
    "leaky_relu",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "hardswish",
    "x_hardswish",
)


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    add: Tensor | None

    def present(self) -> list[Tensor]:
        return [t for t in (self.input, self.weight, self.bias, self.add) if t is not None]


@dataclass(frozen=True)
class Case:
    """One call. ``add`` is none, full, channel (C, 1, 1, 1), plane (N, 1, D, 1, W) or one (a value)."""

    batch: int = 2
    cin: int = 4
    cout: int = 6
    size: Triple = (3, 4, 5)
    kernel: Triple = (3, 3, 3)
    stride: Triple = (2, 2, 2)
    padding: Triple = (1, 1, 1)
    output_padding: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    dtype: torch.dtype = torch.float32
    input_channels_last: bool = False
    weight_channels_last: bool = False
    bias: bool = True
    add: str = "full"
    add_order: str = "before"
    activation: str = "none"
    negative_slope: float = 0.01
    precision: str | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", _describe(self))

    def out_size(self) -> Triple:
        """By the definition."""
        d, h, w = (
            (i - 1) * s - 2 * p + dil * (k - 1) + op + 1
            for i, k, s, p, op, dil in zip(
                self.size,
                self.kernel,
                self.stride,
                self.padding,
                self.output_padding,
                self.dilation,
                strict=True,
            )
        )
        return d, h, w

    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.cout, *self.out_size())

    def channels_last(self) -> bool:
        return (self.input_channels_last or self.weight_channels_last) and self.dtype != torch.float64

    def conv_arguments(self) -> dict[str, Any]:
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "groups": self.groups,
            "dilation": self.dilation,
        }

    def arguments(self) -> dict[str, Any]:
        return {
            **self.conv_arguments(),
            "add_order": self.add_order,
            "activation": self.activation,
            "negative_slope": self.negative_slope,
            "precision": self.precision,
        }

    def make(self, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> Tensors:
        """Normal inputs; weights scaled so that outputs are of order 1."""
        generator = torch.Generator().manual_seed(seed)

        def draw(shape: tuple[int, ...], channels_last: bool = False, factor: float = 1.0) -> Tensor:
            values = torch.randn(shape, generator=generator) * factor
            tensor = values.to(self.dtype).to(device)
            return tensor.contiguous(memory_format=torch.channels_last_3d) if channels_last else tensor

        taps = self.kernel[0] * self.kernel[1] * self.kernel[2]
        live = taps / (self.stride[0] * self.stride[1] * self.stride[2])
        factor = scale / max(1.0, live * self.cin / self.groups) ** 0.5
        n, c, d, h, w = self.output_shape()
        shapes: dict[str, tuple[int, ...]] = {
            "full": (n, c, d, h, w),
            "channel": (c, 1, 1, 1),
            "plane": (n, 1, d, 1, w),
            "one": (1,),
        }
        return Tensors(
            input=draw((self.batch, self.cin, *self.size), self.input_channels_last),
            weight=draw(
                (self.cin, self.cout // self.groups, *self.kernel), self.weight_channels_last, factor
            ),
            bias=draw((self.cout,)) if self.bias else None,
            add=None
            if self.add == "none"
            else draw(shapes[self.add], self.add == "full" and self.channels_last()),
        )

    def call(self, tensors: Tensors) -> Tensor:
        return convt3d.conv_transpose3d(
            tensors.input, tensors.weight, tensors.bias, add=tensors.add, **self.arguments()
        )

    def explain(self, tensors: Tensors) -> convt3d.Explanation:
        return convt3d.explain(
            tensors.input, tensors.weight, tensors.bias, add=tensors.add, **self.arguments()
        )


K2S2: dict[str, Any] = {"kernel": (2, 2, 2), "padding": (0, 0, 0), "output_padding": (0, 0, 0)}
K4S2: dict[str, Any] = {"kernel": (4, 4, 4), "padding": (1, 1, 1), "output_padding": (0, 0, 0)}

# Small forms of what networks run, and of what has gone wrong elsewhere.
NAMED = (
    Case(name="reference", cin=32, cout=64, size=(4, 4, 4), activation="x_hardswish"),
    Case(name="reference-odd", cin=32, cout=64, size=(3, 5, 7), activation="x_hardswish"),
    Case(name="nnunet", cin=16, cout=8, size=(4, 5, 6), add="none", **K2S2),
    Case(
        name="nnunet-anisotropic",
        cin=16,
        cout=8,
        kernel=(1, 2, 2),
        stride=(1, 2, 2),
        padding=(0, 0, 0),
        output_padding=(0, 0, 0),
        add="none",
    ),
    Case(name="segresnet", cin=8, cout=8, **K2S2),
    Case(name="segresnet-ds", cin=24, cout=12, bias=False, add="one"),
    Case(
        name="segresnet-ds-anisotropic",
        cin=24,
        cout=12,
        kernel=(3, 3, 1),
        stride=(2, 2, 1),
        padding=(1, 1, 0),
        output_padding=(1, 1, 0),
    ),
    Case(name="vqvae", cin=24, cout=12, activation="relu", add="none", **K4S2),
    Case(name="localnet", cin=16, cout=8, bias=False, activation="relu", add_order="after"),
    Case(name="mednext-depthwise", cin=12, cout=12, groups=12, add="none"),
    Case(
        name="mednext-depthwise-k5",
        cin=40,
        cout=40,
        groups=40,
        kernel=(5, 5, 5),
        padding=(2, 2, 2),
        output_padding=(0, 0, 0),
    ),
    Case(name="depthwise-two-for-one", cin=6, cout=12, groups=6, stride=(1, 2, 3), output_padding=(0, 1, 2)),
    Case(
        name="mednext-k1",
        cin=8,
        cout=4,
        kernel=(1, 1, 1),
        padding=(0, 0, 0),
        output_padding=(1, 1, 1),
        add="none",
    ),
    Case(name="unet3d-op0", cin=16, cout=8, output_padding=(0, 0, 0), bias=False),
    Case(name="swin-k244", cin=8, cout=4, kernel=(2, 4, 4), stride=(2, 4, 4), padding=(0, 0, 0)),
    Case(name="gan-last", cin=16, cout=1, activation="sigmoid", bias=False, add="none", **K4S2),
    Case(
        name="videogpt",
        size=(6, 5, 5),
        cin=12,
        cout=3,
        kernel=(4, 4, 4),
        stride=(1, 2, 2),
        padding=(3, 3, 3),
        output_padding=(0, 0, 0),
        add="none",
    ),
    Case(name="dilated", cin=4, cout=4, dilation=(2, 1, 3)),
    Case(name="output-padding-under-dilation", stride=(1, 1, 1), dilation=(2, 2, 2)),
    Case(name="outputs-without-taps", kernel=(2, 2, 2), stride=(3, 3, 3), padding=(0, 0, 0)),
    Case(name="stride-1", stride=(1, 1, 1), output_padding=(0, 0, 0)),
    Case(name="channels-1", cin=1, cout=1, activation="hardswish"),
    Case(name="one-voxel", batch=1, size=(1, 1, 1), cin=8, cout=8, **K2S2),
)


def _describe(case: Case) -> str:
    layout = f"{'cl' if case.input_channels_last else 'nc'}{'cl' if case.weight_channels_last else 'nc'}"

    def x(values: Triple) -> str:
        return "x".join(map(str, values))

    return (
        f"n{case.batch}c{case.cin}-{case.cout}g{case.groups}"
        f"i{x(case.size)}k{x(case.kernel)}s{x(case.stride)}p{x(case.padding)}op{x(case.output_padding)}"
        f"d{x(case.dilation)}-{str(case.dtype)[6:]}-{layout}-{case.activation}-{case.add}"
    )


def random_case(rng: random.Random, dtypes: tuple[torch.dtype, ...]) -> Case:
    """A valid call with a non-empty output; parameters near what networks use, and beyond."""
    while True:
        family = rng.random()
        if family < 0.35:
            kernel, stride, padding = (3, 3, 3), (2, 2, 2), (1, 1, 1)
        elif family < 0.55:
            kernel, stride, padding = (2, 2, 2), (2, 2, 2), (0, 0, 0)
        else:
            kernel = _triple(rng, 1, 4)
            stride = _triple(rng, 1, 3)
            padding = tuple(rng.randint(0, k) for k in kernel)  # type: ignore[assignment]
        dilation = _triple(rng, 1, 2) if rng.random() < 0.15 else (1, 1, 1)
        output_padding = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        groups = rng.choice((2, 3)) if rng.random() < 0.1 else 1
        widths = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32)
        case = Case(
            batch=rng.randint(1, 3),
            cin=rng.choice(widths) * groups,
            cout=rng.choice(widths) * groups,
            size=_triple(rng, 1, 6),
            kernel=kernel,
            stride=stride,
            padding=padding,
            output_padding=output_padding,  # type: ignore[arg-type]
            dilation=dilation,
            groups=groups,
            dtype=rng.choice(dtypes),
            input_channels_last=rng.random() < 0.5,
            weight_channels_last=rng.random() < 0.3,
            bias=rng.random() < 0.7,
            add=rng.choice(("none", "full", "full", "channel", "plane", "one")),
            add_order=rng.choice(("before", "before", "after")),
            activation=rng.choice(ACTIVATIONS),
            negative_slope=rng.choice((0.01, 0.2)),
            precision=rng.choice((None, "ieee", "tf32")),
        )
        if all(extent > 0 for extent in case.out_size()):
            return case


def random_hopper_case(rng: random.Random) -> Case:
    """Near what the sm90 family takes: NCDHW in tf32, stride 2, channels in eights, 16-byte rows of y."""
    while True:
        kernel = rng.choice(((3, 3, 3), (2, 2, 2), _triple(rng, 2, 5)))
        case = Case(
            batch=rng.randint(1, 5),
            cin=8 * rng.randint(1, rng.choice((5, 12))),
            cout=8 * rng.randint(1, 17),
            size=(rng.randint(1, 7), rng.randint(2, 9), rng.randint(2, 20)),
            kernel=kernel,
            padding=tuple(rng.randint(0, k - 1) for k in kernel),  # type: ignore[arg-type]
            output_padding=_triple(rng, 0, 1),
            bias=rng.random() < 0.7,
            add=rng.choice(("none", "full", "full", "channel", "one")),
            add_order=rng.choice(("before", "before", "after")),
            activation=rng.choice(ACTIVATIONS),
            negative_slope=rng.choice((0.01, 0.2)),
            precision="tf32",
        )
        depth, height, width = case.out_size()
        if depth > 0 and height >= 4 and width > 0 and width % 4 == 0:
            return case


def random_cases(seed: int, count: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    rng = random.Random(seed)
    for _ in range(count):
        yield random_case(rng, dtypes)


def _triple(rng: random.Random, low: int, high: int) -> Triple:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)
