# SPDX-License-Identifier: Apache-2.0
"""Infinities and nans reach exactly the outputs that their taps reach."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from accuracy import allowed_error, mode_of
from cases import Case, Tensors
from convt3d._activations import ACTIVATIONS
from convt3d._precision import round_to_tf32

SPECIAL = [float("inf"), float("-inf"), float("nan")]


def reach(case: Case, axis: int, tap: int) -> tuple[slice, slice] | None:
    """Along one dimension: the inputs whose product with a tap lands in the output, and where it lands."""
    stride, out = case.stride[axis], case.out_size()[axis]
    offset = tap * case.dilation[axis] - case.padding[axis]
    first = max(0, -(offset // stride))
    last = min(case.size[axis] - 1, (out - 1 - offset) // stride)
    if last < first:
        return None
    return slice(first, last + 1), slice(first * stride + offset, last * stride + offset + 1, stride)


def scatter(case: Case, x: Tensor, w: Tensor) -> Tensor:
    """By the definition, in float64: every live (output, tap) product is summed, and nothing else."""
    out = torch.zeros(case.output_shape(), dtype=torch.float64, device=x.device)
    for tap in itertools.product(*map(range, case.kernel)):
        ranges = [reach(case, axis, k) for axis, k in enumerate(tap)]
        if None in ranges:
            continue
        inputs, outputs = zip(*ranges, strict=True)  # type: ignore[arg-type]
        out[(..., *outputs)] += torch.einsum("ncdhw,co->nodhw", x[(..., *inputs)], w[(..., *tap)])
    return out


def expected(case: Case, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """The float64 result, pre-activation, and sum |x||w| + |bias| + |add|."""
    x, w = tensors.input, tensors.weight
    if case.precision == "tf32" and case.dtype == torch.float32:
        x, w = round_to_tf32(x), round_to_tf32(w)
    x, w = x.double(), w.double()
    t, magnitude = scatter(case, x, w), scatter(case, x.abs(), w.abs())
    if tensors.bias is not None:
        bias = tensors.bias.double().view(-1, 1, 1, 1)
        t, magnitude = t + bias, magnitude + bias.abs()
    add = 0.0 if tensors.add is None else tensors.add.double()
    magnitude = magnitude + (add if isinstance(add, float) else add.abs())
    if case.add_order == "before":
        t = t + add
    y = ACTIVATIONS[case.activation].forward(t, case.negative_slope)
    return (y + add if case.add_order == "after" else y), t, magnitude


def check(case: Case, tensors: Tensors, result: Tensor) -> None:
    """Each output is what float32 arithmetic gives: nan, an infinity, or a value within the bound."""
    y, t, magnitude = expected(case, tensors)
    assert result.dtype == case.dtype
    result = result.double()
    assert torch.equal(result.isnan(), y.isnan())
    assert torch.equal(result.isposinf(), y.isposinf())
    assert torch.equal(result.isneginf(), y.isneginf())
    mode = mode_of(case, case.precision == "tf32", "one of our kernels, or the CPU")
    half_ulp, allowed = allowed_error(case, y, t, magnitude, mode)
    assert ((result - y).abs() <= half_ulp + allowed)[y.isfinite()].all()


CASES = [
    Case(cin=8, cout=8, size=(3, 3, 3), add="none", bias=False),
    Case(
        cin=8,
        cout=8,
        size=(2, 3, 3),
        kernel=(2, 2, 2),
        padding=(0, 0, 0),
        output_padding=(0, 0, 0),
        add="none",
        bias=False,
    ),
    Case(cin=3, cout=5, size=(3, 2, 3), add="none", bias=False),
]


# Early elements, and the last of each tensor: last row, channel and tile.
PLACES = [
    ("input", (0, 1, 1, 1, 1)),
    ("input", (-1,) * 5),
    ("weight", (2, 1, 0, 1, 0)),
    ("weight", (-1,) * 5),
    ("add", (1, 2, 0, 1, 0)),
    ("add", (-1,) * 5),
    ("bias", (3,)),
    ("bias", (-1,)),
]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("case", CASES, ids=["k3", "k2", "odd-channels"])
def test_one_special_input(case: Case, value: float, precision: str) -> None:
    case = Case(**{**vars(case), "precision": precision})
    tensors = case.make()
    tensors.input[0, 1, 1, 1, 1] = value
    check(case, tensors, case.call(tensors))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("case", CASES, ids=["k3", "k2", "odd-channels"])
def test_one_special_weight(case: Case, value: float, precision: str) -> None:
    case = Case(**{**vars(case), "precision": precision})
    tensors = case.make()
    tensors.weight[2, 1, 0, 1, 0] = value
    check(case, tensors, case.call(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_with_everything_behind(value: float, order: str, dtype: torch.dtype) -> None:
    case = Case(cin=4, cout=6, size=(2, 3, 3), activation="x_hardswish", add_order=order, dtype=dtype)
    for which, place in PLACES:
        tensors = case.make()
        getattr(tensors, which)[place] = value
        check(case, tensors, case.call(tensors))


def test_values_near_the_largest_float_do_not_become_infinite() -> None:
    case = Case(cin=4, cout=4, precision="ieee", add="none", bias=False)
    tensors = case.make()
    tensors.input.fill_(torch.finfo(torch.float32).max)
    tensors.weight.fill_(2.0**-10)
    assert case.call(tensors).isfinite().all()
    assert Case(**{**vars(case), "precision": "tf32"}).call(tensors).isfinite().all()


@pytest.mark.parametrize(
    "activation", ["relu", "hardswish", "x_hardswish", "silu", "gelu", "tanh", "sigmoid", "elu"]
)
def test_nan_passes_through_activations(activation: str) -> None:
    case = Case(activation=activation, add="full")
    tensors = case.make()
    assert tensors.add is not None
    tensors.add[0, 0, 0, 0, 0] = float("nan")
    result = case.call(tensors)
    assert result[0, 0, 0, 0, 0].isnan()
    assert result.isnan().sum() == 1


def test_special_add_and_bias() -> None:
    case = Case(activation="none")
    tensors = case.make()
    assert tensors.add is not None and tensors.bias is not None
    tensors.add[1, 2, 0, 1, 0] = float("inf")
    tensors.bias[3] = float("-inf")
    result = case.call(tensors)
    assert result[1, 2, 0, 1, 0].isposinf()
    assert result[:, 3].isneginf().all()
    assert result.isfinite().sum() == result.numel() - 1 - result[:, 3].numel()
