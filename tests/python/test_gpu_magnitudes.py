# SPDX-License-Identifier: Apache-2.0
"""fp32 accuracy on a GPU where magnitudes differ from place to place: values far from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accuracy import assert_accurate
from cases import Case
from families import Family, own_families

pytestmark = pytest.mark.gpu


def one_value(value: float) -> Callable[[Tensor, Tensor], None]:
    def change(x: Tensor, weight: Tensor) -> None:
        x[1, 5, 7, 3, 9] = value

    return change


def samples(factor: float) -> Callable[[Tensor, Tensor], None]:
    def change(x: Tensor, weight: Tensor) -> None:
        x[1:4] *= factor

    return change


def share(part: float, factor: float) -> Callable[[Tensor, Tensor], None]:
    def change(x: Tensor, weight: Tensor) -> None:
        generator = torch.Generator(x.device).manual_seed(1)
        x[torch.rand(x.shape, generator=generator, device=x.device) < part] *= factor

    return change


def region(value: float, inside: float) -> Callable[[Tensor, Tensor], None]:
    """A cube of values times ``value``, and one in its middle that is ``inside``."""

    def change(x: Tensor, weight: Tensor) -> None:
        x[2, :, 4:9, 4:9, 4:9] *= value
        x[2, 3, 6, 6, 6] = inside

    return change


def everything(factor: float) -> Callable[[Tensor, Tensor], None]:
    def change(x: Tensor, weight: Tensor) -> None:
        x *= factor

    return change


def decades(x: Tensor, weight: Tensor) -> None:
    generator = torch.Generator(x.device).manual_seed(1)
    x *= 10 ** (torch.rand(x.shape, generator=generator, device=x.device) * 60 - 30)


def one_weight(x: Tensor, weight: Tensor) -> None:
    weight[3, 5, 1, 1, 1] = 1e-14
    x[1, :, 3:7] *= 1e-6


def lonely_weight(x: Tensor, weight: Tensor) -> None:
    weight[:, 7] = 0
    weight[9, 7, 1, 1, 1] = 1e-14


def weak_channel(x: Tensor, weight: Tensor) -> None:
    weight[:, 7] *= 1e-13


def huge_beside_a_tiny_weight(x: Tensor, weight: Tensor) -> None:
    """A result of one product, whose weight is tiny, where the largest operands' product is beyond fp32."""
    generator = torch.Generator(x.device).manual_seed(1)
    for tensor, exponent in ((x, 58), (weight, 50)):
        mantissa = 1 + torch.rand(tensor.shape, generator=generator, device=x.device)
        tensor.copy_(tensor.sign() * mantissa * 2.0**exponent)
    x[:, 3] = 2.0**80  # multiplied by zeros alone, as the largest weight is
    x[:, 4] = 0
    weight[3] = 0
    weight[4, :, 0, 0, 0] = 2.0**75
    weight[9, 7, 1, 1, 1] = 1.3 * 2.0**35
    x[1, :, 3, 3, 3] = 0
    x[1, 9, 3, 3, 3] = 2.0**60


CHANGES: dict[str, Callable[[Tensor, Tensor], None]] = {
    "one-tiny-value": one_value(1e-12),
    "one-large-value": one_value(1e4),
    "one-huge-value": one_value(1e30),
    "few-tiny-values": share(0.001, 1e-12),
    "many-tiny-values": share(0.3, 1e-9),
    "few-large-values": share(0.0001, 200.0),
    "rare-large-values": share(0.000005, 1e4),
    **{f"samples-times-{factor}": samples(factor) for factor in (1e-2, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)},
    "tiny-region": region(1e-9, 1.0),
    "zeros-and-a-tiny-value": region(0.0, 1e-20),
    "all-tiny": everything(1e-30),
    "all-huge": everything(1e30),
    "decades": decades,
    "huge-beside-a-tiny-weight": huge_beside_a_tiny_weight,
    "one-tiny-weight": one_weight,
    "channel-of-one-tiny-weight": lonely_weight,
    "channel-of-tiny-weights": weak_channel,
}


FORM: dict[str, Any] = {
    "cout": 48,
    "size": (12, 16, 16),
    "bias": False,
    "add": "none",
    "precision": "ieee",
}
STREAMED = [
    *("one-tiny-value", "one-huge-value", "few-tiny-values", "few-large-values", "rare-large-values"),
    *("samples-times-1e-06", "tiny-region", "zeros-and-a-tiny-value", "all-huge", "decades"),
]


def check(case: Case, change: str, channels_last: bool, family: Family) -> None:
    case = replace(case, input_channels_last=channels_last)
    tensors = case.make("cuda", seed=case.batch)
    CHANGES[change](tensors.input, tensors.weight)
    family.require(case, tensors)
    poison = torch.full(case.output_shape(), float("nan"), device="cuda")
    del poison
    result = family.call(case, tensors)
    assert_accurate(case, tensors, result)
    assert torch.equal(result, family.call(case, tensors)), "two runs differ"


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("batch", [4, 12], ids=["looked-through", "sampled"])
@pytest.mark.parametrize("change", CHANGES)
def test_accuracy(change: str, batch: int, channels_last: bool, family: Family) -> None:
    """Larger batches are those of which the sm90 family looks at a sample alone."""
    check(Case(batch=batch, cin=32, **FORM), change, channels_last, family)


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("change", STREAMED)
def test_accuracy_of_larger_weights(change: str, channels_last: bool, family: Family) -> None:
    """The sm90 family looks at a sample of x here, too, and has another kernel."""
    check(Case(batch=12, cin=72, **FORM), change, channels_last, family)
