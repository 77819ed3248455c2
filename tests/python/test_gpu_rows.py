# SPDX-License-Identifier: Apache-2.0
"""Rows of y and add of any length and alignment, few channels and strides up to 4: values against float64.

The sm90 family must take them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from accuracy import assert_accurate
from cases import Case, Tensors
from families import Family
from test_gpu_accuracy import poison

pytestmark = pytest.mark.gpu

# Widths of y from 33 to 40: two tiles along W, every remainder modulo 8.
WIDTHS = {2 * width - 1 + extra: (width, extra) for width in range(17, 21) for extra in (0, 1)}

sm90 = pytest.mark.parametrize("family", ["sm90"], indirect=True)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
layouts = pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])


def make(dtype: torch.dtype, channels_last: bool, **changes: object) -> Case:
    return replace(
        Case(cin=24, cout=20, size=(3, 9, 18), precision="tf32", activation="silu"),
        dtype=dtype,
        input_channels_last=channels_last,
        name="",
        **changes,  # type: ignore[arg-type]
    )


def check(case: Case, family: Family, tensors: Tensors | None = None) -> None:
    if tensors is None:
        tensors = case.make("cuda")
    assert family.takes(case, tensors), family.refusal
    poison()
    assert_accurate(case, tensors, family.call(case, tensors))


def one_off(tensor: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    flat = torch.full((tensor.numel() + 1,), float("nan"), dtype=tensor.dtype, device="cuda")
    return flat.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


@sm90
@dtypes
@layouts
@pytest.mark.parametrize("width", sorted(WIDTHS))
def test_every_length_of_a_row(width: int, channels_last: bool, dtype: torch.dtype, family: Family) -> None:
    size, extra = WIDTHS[width]
    case = make(dtype, channels_last, size=(3, 9, size), output_padding=(0, 1, extra))
    assert case.out_size()[2] == width
    for add, order in (("full", "before"), ("full", "after"), ("channel", "before"), ("none", "before")):
        check(replace(case, add=add, add_order=order), family)


@sm90
@dtypes
@layouts
@pytest.mark.parametrize("which", ["input", "add", "input and add"])
@pytest.mark.parametrize("extra", [0, 1])
def test_tensors_one_element_off(
    extra: int, which: str, channels_last: bool, dtype: torch.dtype, family: Family
) -> None:
    case = make(dtype, channels_last, output_padding=(1, 1, extra), activation="relu")
    tensors = case.make("cuda")
    for name in which.split(" and "):
        tensors = replace(tensors, **{name: one_off(getattr(tensors, name))})
    check(case, family, tensors)


@sm90
@dtypes
@layouts
@pytest.mark.parametrize("channels", range(1, 15))
def test_few_channels(channels: int, channels_last: bool, dtype: torch.dtype, family: Family) -> None:
    for extra in (0, 1):
        check(make(dtype, channels_last, cout=channels, output_padding=(1, 0, extra)), family)
        check(make(dtype, channels_last, cin=channels, output_padding=(0, 1, extra)), family)


@sm90
@dtypes
@layouts
@pytest.mark.parametrize(
    ("stride", "kernel", "padding", "output_padding"),
    [
        ((2, 4, 4), (2, 4, 4), (0, 0, 0), (0, 0, 0)),
        ((2, 4, 4), (3, 5, 4), (1, 1, 1), (1, 3, 1)),
        ((1, 3, 3), (1, 3, 3), (0, 0, 0), (0, 0, 0)),
        ((2, 3, 3), (3, 4, 5), (1, 0, 2), (0, 2, 1)),
        ((4, 1, 2), (4, 3, 2), (0, 1, 0), (1, 0, 1)),
        ((1, 1, 4), (3, 3, 5), (1, 1, 1), (0, 0, 2)),
    ],
    ids=str,
)
def test_strides(
    stride: tuple[int, int, int],
    kernel: tuple[int, int, int],
    padding: tuple[int, int, int],
    output_padding: tuple[int, int, int],
    channels_last: bool,
    dtype: torch.dtype,
    family: Family,
) -> None:
    geometry = {"stride": stride, "kernel": kernel, "padding": padding, "output_padding": output_padding}
    for width in (9, 10):
        check(make(dtype, channels_last, size=(3, 5, width), **geometry), family)


@sm90
@dtypes
def test_add_of_other_strides(dtype: torch.dtype, family: Family) -> None:
    case = make(dtype, False, output_padding=(1, 1, 0))
    tensors = case.make("cuda")
    add = tensors.add
    assert add is not None
    wide = torch.full((*add.shape[:-1], add.shape[-1] + 3), float("nan"), dtype=dtype, device="cuda")
    others = (
        wide[..., 1:-2].copy_(add),
        add.contiguous(memory_format=torch.channels_last_3d),
        add[:, :, :1].expand_as(add),
        add[:, :, :, :1].expand_as(add),
        add[:, :1].expand_as(add),
    )
    for other in others:
        check(case, family, replace(tensors, add=other))
