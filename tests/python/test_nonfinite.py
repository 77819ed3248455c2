# SPDX-License-Identifier: Apache-2.0
"""Infinities and nans reach exactly the outputs that their taps reach."""

from __future__ import annotations

import pytest
import torch

from cases import Case, Tensors
from convt3d._precision import round_to_tf32

SPECIAL = [float("inf"), float("-inf"), float("nan")]


def expected(case: Case, tensors: Tensors) -> torch.Tensor:
    """By the definition, in float64: every live (output, tap) product is summed, and nothing else."""
    x, w = tensors.input, tensors.weight
    if case.precision == "tf32":
        x, w = round_to_tf32(x), round_to_tf32(w)
    x, w = x.double(), w.double()
    out = torch.zeros(case.output_shape(), dtype=torch.float64, device=x.device)
    od, oh, ow = case.out_size()
    for kd in range(case.kernel[0]):
        for kh in range(case.kernel[1]):
            for kw in range(case.kernel[2]):
                products = torch.zeros(
                    (case.batch, case.cout, *case.size), dtype=torch.float64, device=x.device
                )
                for c in range(case.cin):
                    products += x[:, c : c + 1] * w[c, :, kd, kh, kw].view(1, -1, 1, 1, 1)
                for i in range(case.size[0]):
                    d = i * case.stride[0] - case.padding[0] + kd * case.dilation[0]
                    for j in range(case.size[1]):
                        h = j * case.stride[1] - case.padding[1] + kh * case.dilation[1]
                        for k in range(case.size[2]):
                            v = k * case.stride[2] - case.padding[2] + kw * case.dilation[2]
                            if 0 <= d < od and 0 <= h < oh and 0 <= v < ow:
                                out[:, :, d, h, v] += products[:, :, i, j, k]
    return out


def check(case: Case, tensors: Tensors) -> None:
    exact = expected(case, tensors)
    result = case.call(tensors).double()
    assert torch.equal(result.isnan(), exact.isnan())
    assert torch.equal(result.isposinf(), exact.isposinf())
    assert torch.equal(result.isneginf(), exact.isneginf())
    finite = exact.isfinite()
    torch.testing.assert_close(result[finite], exact[finite], rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("case", CASES, ids=["k3", "k2", "odd-channels"])
def test_one_special_input(case: Case, value: float, precision: str) -> None:
    case = Case(**{**vars(case), "precision": precision})
    tensors = case.make()
    tensors.input[0, 1, 1, 1, 1] = value
    check(case, tensors)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("case", CASES, ids=["k3", "k2", "odd-channels"])
def test_one_special_weight(case: Case, value: float, precision: str) -> None:
    case = Case(**{**vars(case), "precision": precision})
    tensors = case.make()
    tensors.weight[2, 1, 0, 1, 0] = value
    check(case, tensors)


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
