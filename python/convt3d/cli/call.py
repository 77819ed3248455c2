# SPDX-License-Identifier: Apache-2.0
"""A call as the command line describes it: its tensors, ours, PyTorch's, and float64's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._activations import ACTIVATIONS
from .._cat import conv_transpose3d_cat
from .._explain import Explanation, explain
from .._functional import conv_transpose3d
from .._precision import round_to_tf32
from .._problem import ADD_ORDERS, Triple, output_extent

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
_LARGEST = 2**63 - 1
SHAPE = ["2", "32"]  # where none is given
SHAPE_TIMED_ON_CPU = ["1", "16"]  # a sixteenth of the work: seconds instead of a minute
LAYOUTS = {"ncdhw": torch.contiguous_format, "ndhwc": torch.channels_last_3d}


@dataclass(frozen=True)
class CallSpec:
    """One call. Triples are (D, H, W).

    Attributes:
        add: whether a tensor of the output's size is added.
        skip: channels of a skip that the result is concatenated with; 0 for none.
        precision: "default", "ieee" or "tf32", for both sides.
    """

    batch: int
    cin: int
    cout: int
    size: Triple
    kernel: Triple = (3, 3, 3)
    stride: Triple = (2, 2, 2)
    padding: Triple = (1, 1, 1)
    output_padding: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    bias: bool = True
    add: bool = False
    add_order: str = "before"
    activation: str = "none"
    negative_slope: float = 0.01
    skip: int = 0
    dtype: torch.dtype = torch.float32
    layout: str = "ncdhw"
    precision: str = "default"
    name: str = ""

    @property
    def out_size(self) -> Triple:
        d, h, w = (
            output_extent(*extents)
            for extents in zip(
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

    def describe(self) -> str:
        def x(values: Triple) -> str:
            return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

        parts = [
            f"{self.cin} -> {self.cout}, batch {self.batch}, {'x'.join(map(str, self.size))}",
            f"k{x(self.kernel)} s{x(self.stride)} p{x(self.padding)} op{x(self.output_padding)}",
        ]
        parts += [f"dilation {x(self.dilation)}"] if self.dilation != (1, 1, 1) else []
        parts += [f"groups {self.groups}"] if self.groups != 1 else []
        parts += ["bias"] if self.bias else []
        parts += ["add"] if self.add else []
        parts += [self.activation] if self.activation != "none" else []
        parts += [f"cat with {self.skip} channels"] if self.skip else []
        return ", ".join(parts)

    def draw(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        """Normal inputs; weights scaled so that outputs are of order 1. Without values on "meta"."""
        generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        shapes: dict[str, tuple[int, ...]] = {
            "input": (self.batch, self.cin, *self.size),
            "weight": (self.cin, self.cout // self.groups, *self.kernel),
        }
        if self.bias:
            shapes["bias"] = (self.cout,)
        if self.add:
            shapes["add"] = (self.batch, self.cout, *self.out_size)
        if self.skip:
            shapes["skip"] = (self.batch, self.skip, *self.out_size)
        taps = self.kernel[0] * self.kernel[1] * self.kernel[2]
        terms = taps / (self.stride[0] * self.stride[1] * self.stride[2]) * self.cin / self.groups
        tensors = {}
        for name, shape in shapes.items():
            memory_format = LAYOUTS[self.layout] if len(shape) == 5 else torch.contiguous_format
            values = torch.empty(shape, dtype=self.dtype, device=device, memory_format=memory_format)
            std = max(1.0, terms) ** -0.5 if name == "weight" else 1.0
            tensors[name] = values if generator is None else values.normal_(std=std, generator=generator)
        return tensors

    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def _options(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "add": tensors.get("add"),
            "add_order": self.add_order,
            "activation": self.activation,
            "negative_slope": self.negative_slope,
            "precision": None if self.precision == "default" else self.precision,
        }

    def ours(self, tensors: dict[str, Tensor]) -> Tensor:
        """The call."""
        own = (tensors["input"], tensors["weight"], tensors.get("bias"), *self._geometry())
        if self.skip:
            return conv_transpose3d_cat(*own, skip=tensors["skip"], **self._options(tensors))
        return conv_transpose3d(*own, **self._options(tensors))

    def theirs(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same in PyTorch's operators, whose precision is PyTorch's switch's."""
        t = F.conv_transpose3d(tensors["input"], tensors["weight"], tensors.get("bias"), *self._geometry())
        add = tensors.get("add")
        if add is not None and self.add_order == "before":
            t = t + add
        t = ACTIVATIONS[self.activation].forward(t, self.negative_slope)
        if add is not None and self.add_order == "after":
            t = t + add
        return torch.cat([t, tensors["skip"]], 1) if self.skip else t

    def exact(self, tensors: dict[str, Tensor], tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's part in float64: result, pre-activation, and sum |x||w| + |bias| + |add|."""
        x, w = tensors["input"], tensors["weight"]
        if tf32 and self.dtype == torch.float32:
            x, w = round_to_tf32(x), round_to_tf32(w)
        bias, add = tensors.get("bias"), tensors.get("add")
        bias = None if bias is None else bias.double()
        t = F.conv_transpose3d(x.double(), w.double(), bias, *self._geometry())
        magnitude = F.conv_transpose3d(
            x.double().abs(), w.double().abs(), None if bias is None else bias.abs(), *self._geometry()
        )
        if add is not None:
            magnitude += add.double().abs()
            if self.add_order == "before":
                t = t + add.double()
        y = ACTIVATIONS[self.activation].forward(t, self.negative_slope)
        if add is not None and self.add_order == "after":
            y = y + add.double()
        return y, t, magnitude

    def explain(self, tensors: dict[str, Tensor], bandwidth: float | None = None) -> Explanation:
        """How the call would run."""
        return explain(
            tensors["input"],
            tensors["weight"],
            tensors.get("bias"),
            *self._geometry(),
            skip=tensors.get("skip"),
            bandwidth=bandwidth,
            **self._options(tensors),
        )

    def byte_count(self) -> int:
        """The least traffic: every input read once, the result written once."""
        return self.explain(self.draw("meta")).bytes


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that describe a call; read by :func:`spec_of`."""
    group = parser.add_argument_group("the call", "numbers may be separated by spaces, commas or x")
    add = group.add_argument
    add("--shape", nargs="+", metavar="N", help="N D H W, or N and one size (2 32; bench on a CPU: 1 16)")
    add("--channels", nargs="+", default=["64", "32"], metavar="C", help="of input and output (64 32)")
    add("--kernel", nargs="+", default=["3"], metavar="K", help="one, or D H W (3)")
    add("--stride", nargs="+", default=["2"], metavar="S", help="one, or D H W (2)")
    add("--padding", nargs="+", metavar="P", help="one, or D H W (half of what the kernel is too large)")
    add("--output-padding", nargs="+", metavar="P", help="one, or D H W (so that o = stride * i)")
    add("--dilation", nargs="+", default=["1"], metavar="D", help="one, or D H W (1)")
    add("--groups", type=int, default=1)
    add("--no-bias", dest="bias", action="store_false")
    add("--add", action="store_true", help="a tensor of the output's size is added")
    add("--add-order", choices=ADD_ORDERS, default="before", help="before or after the activation")
    add("--activation", choices=tuple(ACTIVATIONS), default="none")
    add("--skip", type=int, default=0, metavar="C", help="concatenate the result with so many channels")
    add("--dtype", choices=tuple(DTYPES), default="fp32")
    add("--layout", choices=tuple(LAYOUTS), default="ncdhw", help="of every tensor")
    add("--precision", choices=("default", "ieee", "tf32"), default="default", help="of fp32 products")


def spec_of(arguments: argparse.Namespace) -> CallSpec:
    """The call that the options describe.

    Raises:
        ValueError: options that contradict each other.
    """
    shape = _numbers("--shape", arguments.shape or SHAPE, (2, 4))
    channels = _numbers("--channels", arguments.channels, (2,))
    size = _triple(shape[1:])
    kernel = _triple(_numbers("--kernel", arguments.kernel, (1, 3)))
    stride = _triple(_numbers("--stride", arguments.stride, (1, 3)))
    dilation = _triple(_numbers("--dilation", arguments.dilation, (1, 3)))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    if arguments.padding is None:
        padding = _triple([max(0, (r - s + 1) // 2) for r, s in zip(reach, stride, strict=True)])
    else:
        padding = _triple(_numbers("--padding", arguments.padding, (1, 3), 0))
    if arguments.output_padding is None:
        whole = [s + 2 * p - r for s, p, r in zip(stride, padding, reach, strict=True)]
        output_padding = _triple([w if 0 <= w < s else 0 for w, s in zip(whole, stride, strict=True)])
    else:
        output_padding = _triple(_numbers("--output-padding", arguments.output_padding, (1, 3), 0))
    if arguments.groups < 1 or channels[0] % arguments.groups or channels[1] % arguments.groups:
        raise ValueError(f"--groups {arguments.groups} must divide both numbers of --channels")
    if not 0 <= arguments.skip <= _LARGEST:
        raise ValueError(f"--skip must be from 0 to 2^63 - 1, but is {arguments.skip}")
    spec = CallSpec(
        batch=shape[0],
        cin=channels[0],
        cout=channels[1],
        size=size,
        kernel=kernel,
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=arguments.groups,
        bias=arguments.bias,
        add=arguments.add,
        add_order=arguments.add_order,
        activation=arguments.activation,
        skip=arguments.skip,
        dtype=DTYPES[arguments.dtype],
        layout=arguments.layout,
        precision=arguments.precision,
    )
    if max(map(abs, spec.out_size)) > _LARGEST:
        raise ValueError(f"the output would have the size {spec.out_size}, which does not fit 64 bits")
    return spec


def _numbers(name: str, texts: list[str], lengths: tuple[int, ...], least: int = 1) -> list[int]:
    pieces = [piece for text in texts for piece in text.replace("x", ",").split(",") if piece]
    try:
        values = [int(piece) for piece in pieces]
    except ValueError:
        values = []
    if len(values) not in lengths or min(values) < least:
        counts = " or ".join(map(str, lengths))
        raise ValueError(f"{name} takes {counts} numbers of at least {least}, got {' '.join(texts)}")
    if max(values) > _LARGEST:
        raise ValueError(f"{name}: {max(values)} does not fit 64 bits")
    return values


def _triple(values: list[int]) -> Triple:
    a, b, c = values * 3 if len(values) == 1 else values
    return a, b, c
