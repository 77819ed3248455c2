# SPDX-License-Identifier: Apache-2.0
"""Activations on a GPU, against float64: in every form of the kernel with resident weights; alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from accuracy import assert_accurate, ulp
from cases import ACTIVATIONS, ARITHMETIC, K2S2, K4S2, Case
from families import Family
from test_gpu_accuracy import poison

pytestmark = pytest.mark.gpu

# Strides of 2, channels in steps of 8 and rows that the copy engine moves: the resident kernel takes them.
# Tiles of 16 x 8 positions and classes of 16 or 32 channels, the last ones of both not full.
KERNELS: tuple[dict[str, Any], ...] = ({}, K2S2, K4S2)


@pytest.mark.parametrize("family", ["sm90"], indirect=True)
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("mode", ARITHMETIC)
def test_activations_behind_resident_weights(mode: str, channels_last: bool, family: Family) -> None:
    adds = [("none", "before"), *product(("full", "channel"), ("before", "after"))]
    for seed, (activation, (add, order), kernel) in enumerate(product(ACTIVATIONS, adds, KERNELS)):
        case = Case(
            cin=32,
            cout=40,
            size=(3, 11, 20),
            activation=activation,
            negative_slope=(0.01, 1.5, -0.5)[seed % 3],
            add=add,
            add_order=order,
            input_channels_last=channels_last,
            **ARITHMETIC[mode],
            **kernel,
        )
        tensors = case.make("cuda", seed, scale=2.0)
        family.require(case, tensors)
        poison()
        result = family.call(case, tensors)
        assert_accurate(case, tensors, result)
        assert torch.equal(result, family.call(case, tensors)), case


def half_ulp(y: Tensor) -> Tensor:
    return ulp(y, torch.float32) / 2


def tanh_argument(t: Tensor) -> Tensor:
    """gelu_tanh is t * sigmoid of this."""
    return math.sqrt(8 / math.pi) * (t + 0.044715 * t**3)


def sigmoid_error(t: Tensor, argument: float = 0.0) -> Tensor:
    """What sigmoid may be off by whose argument is off by ``argument`` units of 2^-23 of itself.

    The exponential by one and a half such units (CUDA's expf), the sum and the quotient by half an ulp each.
    """
    y = torch.sigmoid(t)
    units = (1.5 + argument * t.abs()) * torch.sigmoid(-t) + 0.5 / (1 + torch.exp(-t.abs()))
    return units * 2.0**-23 * y + half_ulp(y) + 2.0**-148


def product_error(t: Tensor, argument: Tensor, off: float = 0.0) -> Tensor:
    """Of t * sigmoid(argument)."""
    return t.abs() * sigmoid_error(argument, off) + half_ulp(t * torch.sigmoid(argument))


# Of each, the function in float64 without the cancellations of its definition, and what a result may be off
# by. gelu's normal distribution: test_activation.cpp. gelu_tanh's argument is rounded five times. tanhf:
# 2 ulp (CUDA C++ Programming Guide).
ALONE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "elu": (lambda t: torch.where(t > 0, t, torch.expm1(t)), lambda t, y: 2.0**-23 * y.abs() * (t < 0)),
    "gelu": (
        lambda t: 0.5 * t * torch.special.erfc(-t / math.sqrt(2)),
        lambda t, y: 4 * 2.0**-23 * y.abs() + t.abs() * 2.0**-149,
    ),
    "gelu_tanh": (
        lambda t: t * torch.sigmoid(tanh_argument(t)),
        lambda t, _: product_error(t, tanh_argument(t), 2.5),
    ),
    "silu": (lambda t: t * torch.sigmoid(t), lambda t, _: product_error(t, t)),
    "sigmoid": (torch.sigmoid, lambda t, _: sigmoid_error(t)),
    "tanh": (torch.tanh, lambda _, y: 4 * half_ulp(y)),
}

NARROW: dict[str, Any] = {"cin": 32, "cout": 40, "size": (4, 16, 16)}
WIDE: dict[str, Any] = {"cin": 320, "cout": 64, "size": (4, 16, 16)}
WIDE_AND_LARGE = WIDE | {"size": (8, 32, 32)}
PATCH: dict[str, Any] = {
    "cin": 32,
    "cout": 16,
    "size": (4, 8, 16),
    "kernel": (2, 2, 2),
    "stride": (2, 2, 2),
    "padding": (0, 0, 0),
    "output_padding": (0, 0, 0),
}
PRODUCT: dict[str, Any] = {"cin": 320, "cout": 320, "size": (8, 8, 8), "weight_channels_last": True}
# Family and kernel, and a problem that it takes on an H200.
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resident": ("sm90", "convt3d::sm90::kernel<", NARROW),
    "streamed": ("sm90", "convt3d::sm90::stream::kernel<", WIDE_AND_LARGE),
    "columns": ("sm80", "columns::gather_kernel<", NARROW),
    "joint": ("sm80", "joint::joint_kernel<", WIDE),
    "patch": ("sm80", "patch::patch_kernel<", {**PATCH, "kernel": (2, 4, 4), "stride": (2, 4, 4)}),
    "product": ("sm90", "product::kernel<", {**PATCH, **PRODUCT}),
}


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("form, family", [(f, FORMS[f][0]) for f in FORMS], indirect=["family"], ids=FORMS)
def test_each_activation_by_itself(form: str, channels_last: bool, precision: str, family: Family) -> None:
    """The convolution is zero, so the pre-activation is add: magnitudes from 1e-38 to 100."""
    _, kernel, sizes = FORMS[form]
    if form == "joint" and precision == "ieee":
        pytest.skip("the joint kernel has no ieee mode")
    if form == "product" and (precision == "ieee" or not channels_last):
        pytest.skip("the product kernel is one of tf32 mode and channels last")
    case = Case(bias=False, add="full", precision=precision, input_channels_last=channels_last, **sizes)
    tensors = case.make("cuda")
    family.require(case, tensors)
    t = tensors.add
    assert t is not None
    tensors.input.zero_()
    generator = torch.Generator("cuda").manual_seed(5)
    t.uniform_(-12, 12, generator=generator)
    decades = torch.empty_like(t).uniform_(-38, 2, generator=generator)
    signs = torch.empty_like(t).uniform_(-1, 1, generator=generator).sign()
    t.copy_(torch.where(torch.empty_like(t).uniform_(generator=generator) < 0.3, signs * 10**decades, t))
    for activation, (function, may_be_off) in ALONE.items():
        poison()
        result = family.call_on(kernel, replace(case, activation=activation), tensors)
        exact = function(t.double())
        assert exact.isfinite().all()
        error = (result.double() - exact).abs()
        share = (error / may_be_off(t.double(), exact).clamp_min(2.0**-151)).max().item()
        assert share <= 1, (activation, share)
