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
from torch.profiler import ProfilerActivity, profile

from accuracy import assert_accurate
from cases import ACTIVATIONS, ARITHMETIC, K2S2, K4S2, Case
from families import Family, own_families
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


# Of each, the function in float64 without the cancellations of its definition, and how many units of 2^-23 of
# itself a result may be off by: the exponential up to two, the sum and the quotient a half. gelu_tanh's
# argument, which is an exponential's, is rounded five times.
ALONE: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "elu": (lambda t: torch.where(t > 0, t, torch.expm1(t)), 2),
    "gelu": (lambda t: 0.5 * t * torch.special.erfc(-t / math.sqrt(2)), 4),
    "gelu_tanh": (lambda t: t * torch.sigmoid(tanh_argument(t)), 2.5),
    "silu": (lambda t: t * torch.sigmoid(t), 2.5),
    "sigmoid": (torch.sigmoid, 2.5),
    "tanh": (torch.tanh, 2),
}


def tanh_argument(t: Tensor) -> Tensor:
    return math.sqrt(8 / math.pi) * (t + 0.044715 * t**3)


STREAMED = "convt3d::sm90::stream::kernel"
RESIDENT = "convt3d::sm90::kernel"


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("activation", ALONE)
def test_each_activation_by_itself(activation: str, channels_last: bool, family: Family) -> None:
    """The convolution is zero, so the pre-activation is add, whose values go over all magnitudes."""
    generator = torch.Generator("cuda").manual_seed(5)
    # Resident weights, streamed ones; the product kernel or patch expansion; few channels.
    forms: tuple[tuple[dict[str, Any], str], ...] = (
        ({"cin": 32, "cout": 40, "size": (4, 16, 16)}, RESIDENT),
        ({"cin": 320, "cout": 64, "size": (4, 16, 16)}, STREAMED),
        ({"cin": 64, "cout": 64, "size": (4, 8, 8), **K2S2}, ""),
        ({"cin": 8, "cout": 8, "size": (8, 16, 16), **K2S2}, ""),
    )
    for sizes, kernel in forms:
        case = Case(activation=activation, bias=False, add="full", precision="tf32", **sizes)
        case = replace(case, input_channels_last=channels_last)
        tensors = case.make("cuda")
        if kernel:
            family.require(case, tensors)
        elif not family.takes(case, tensors):
            continue
        t = tensors.add
        assert t is not None
        tensors.input.zero_()
        t.uniform_(-12, 12, generator=generator)
        decades = torch.empty_like(t).uniform_(-38, 2, generator=generator)
        signs = torch.empty_like(t).uniform_(-1, 1, generator=generator).sign()
        t.copy_(torch.where(torch.empty_like(t).uniform_(generator=generator) < 0.3, signs * 10**decades, t))
        family.call(case, tensors)  # what a first call allocates and loads is not recorded
        poison()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            result = family.call(case, tensors)
            torch.cuda.synchronize()
        names = [event.key for event in recorded.key_averages()]
        assert family.name != "sm90" or any(kernel in name for name in names), names
        function, units = ALONE[activation]
        exact = function(t.double())
        if activation == "gelu_tanh":
            units = units + 2.5 * tanh_argument(t.double()).abs()
        # exp(-103) is the smallest denormal: what it loses comes back magnified by t.
        allowed = units * 2.0**-23 * exact.abs() + (t.double().abs() + 1) * 2.0**-149
        off = torch.where(exact.isfinite(), (result.double() - exact).abs() / allowed, 0.0).max()
        assert off <= 1, (case, off.item())
