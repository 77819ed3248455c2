# SPDX-License-Identifier: Apache-2.0
"""Gradients of every activation, layout, type and kind of add against float64, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import ACTIVATIONS, Case, Tensors
from gradient_accuracy import assert_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = Case(cin=8, cout=16, size=(3, 4, 6), precision="ieee", negative_slope=0.2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


def gradients(case: Case, tensors: Tensors, grad: Tensor) -> list[Tensor | None]:
    """Of input, weight, bias and add; None where there is none."""
    leaves = [t.requires_grad_() for t in tensors.present()]
    found = iter(torch.autograd.grad(case.call(tensors), leaves, grad))
    for leaf in leaves:
        leaf.requires_grad_(False)
    every = (tensors.input, tensors.weight, tensors.bias, tensors.add)
    return [None if tensor is None else next(found) for tensor in every]


def check(case: Case, device: str, seed: int = 0) -> None:
    tensors = case.make(device, seed=seed)
    grad = torch.randn(case.output_shape(), generator=torch.Generator().manual_seed(seed + 1))
    grad = grad.to(device, case.dtype)
    if case.channels_last():
        grad = grad.contiguous(memory_format=torch.channels_last_3d)
    got = gradients(case, tensors, grad)
    sixteen = case.dtype != torch.float32
    mode = "16-bit" if sixteen else case.precision or "ieee"
    if device == "cuda" and case.explain(tensors).path == "aten + tail":
        mode = "aten"
    assert_gradients(case, tensors, grad, got, mode, "aten")
    if device == "cpu":
        return
    again = gradients(case, tensors, grad)
    # The pointwise half has one order of its sums; the two convolutions are ATen's, and so is their order.
    for first, second in list(zip(got, again, strict=True))[2:]:
        assert first is None or (second is not None and torch.equal(first, second))


@pytest.mark.parametrize("device", DEVICES)
@TYPES
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(
    activation: str, order: str, channels_last: bool, dtype: torch.dtype, device: str
) -> None:
    case = replace(
        CASE, activation=activation, add_order=order, input_channels_last=channels_last, dtype=dtype, name=""
    )
    check(case, device)


@pytest.mark.parametrize("device", DEVICES)
@TYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("add", ["none", "channel", "plane", "one"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ["none", "x_hardswish"])
def test_every_kind_of_add(
    activation: str, order: str, add: str, bias: bool, dtype: torch.dtype, device: str
) -> None:
    for channels_last in (False, True):
        case = replace(
            CASE,
            activation=activation,
            add_order=order,
            add=add,
            bias=bias,
            dtype=dtype,
            input_channels_last=channels_last,
            name="",
        )
        check(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
def test_odd_sizes_and_channels(channels_last: bool, device: str) -> None:
    """Rows that begin and end inside a 16-byte access, and channels that make no whole one."""
    for cout, size, output_padding in (
        (1, (3, 3, 3), 0),
        (5, (2, 3, 4), 0),
        (12, (3, 5, 7), 0),
        (16, (1, 1, 9), 1),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            case = replace(
                CASE,
                cout=cout,
                size=size,
                output_padding=(output_padding,) * 3,
                activation="silu",
                dtype=dtype,
                input_channels_last=channels_last,
                name="",
            )
            check(case, device, seed=cout)
