# SPDX-License-Identifier: Apache-2.0
"""Infinities, nans and the largest values on a GPU, for our kernels: their outputs are computed once more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import test_nonfinite
from cases import ARITHMETIC, Case
from families import Family, own_families
from test_nonfinite import PLACES, SPECIAL, check

pytestmark = pytest.mark.gpu

arithmetic = pytest.mark.parametrize("arithmetic", ARITHMETIC)
layouts = pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])


def wide_case(family: Family, arithmetic: str, channels_last: bool, order: str = "before") -> Case:
    """More than 256 rows in each residue class, and a last tile of channels that is hardly begun."""
    return Case(
        cin=16,
        cout=136 if family.name == "sm90" else 130,
        size=(5, 6, 6),
        activation="x_hardswish",
        add_order=order,
        input_channels_last=channels_last,
        **ARITHMETIC[arithmetic],
    )


@own_families
@arithmetic
@layouts
@pytest.mark.parametrize("case", test_nonfinite.CASES, ids=["k3", "k2", "odd-channels"])
def test_operands(case: Case, channels_last: bool, arithmetic: str, family: Family) -> None:
    case = replace(case, input_channels_last=channels_last, **ARITHMETIC[arithmetic])
    if family.name == "sm90":
        case = replace(case, size=(3, 3, 4))  # whole 16-byte rows of outputs
    family.require(case, case.make("cuda"))
    for value in SPECIAL:
        for which, place in PLACES[:4]:
            tensors = case.make("cuda")
            getattr(tensors, which)[place] = value
            check(case, tensors, family.call(case, tensors))


@own_families
@arithmetic
@layouts
@pytest.mark.parametrize("order", ["before", "after"])
def test_with_everything_behind(order: str, channels_last: bool, arithmetic: str, family: Family) -> None:
    """Bias, add in both orders and the activation, on the path that computes an output again."""
    case = wide_case(family, arithmetic, channels_last, order)
    family.require(case, case.make("cuda"))
    for value in SPECIAL:
        for which, place in PLACES:
            tensors = case.make("cuda")
            getattr(tensors, which)[place] = value
            check(case, tensors, family.call(case, tensors))


@own_families
@arithmetic
@layouts
@pytest.mark.parametrize("value", SPECIAL)
def test_whole_input(value: float, channels_last: bool, arithmetic: str, family: Family) -> None:
    """Every tap carries it: every output that a tap reaches is computed again."""
    case = wide_case(family, arithmetic, channels_last)
    tensors = case.make("cuda")
    family.require(case, tensors)
    tensors.input.fill_(value)
    check(case, tensors, family.call(case, tensors))
    tensors = case.make("cuda")
    tensors.input[1].fill_(value)  # the other sample shares tiles with it
    check(case, tensors, family.call(case, tensors))


@pytest.mark.parametrize("family", ["sm80"], indirect=True)
@arithmetic
def test_outputs_without_taps(arithmetic: str, family: Family) -> None:
    apart = {"kernel": (2, 2, 2), "stride": (3, 3, 3), "padding": (0, 0, 0), "output_padding": (1, 1, 1)}
    case = Case(cin=8, cout=12, activation="x_hardswish", **apart, **ARITHMETIC[arithmetic])
    tensors = case.make("cuda")
    tensors.input.fill_(float("nan"))
    result = family.call(case, tensors)
    check(case, tensors, result)
    assert result.isnan().any() and not result.isnan().all()


@own_families
def test_largest_finite_values(family: Family) -> None:
    ran = False
    for precision in ("ieee", "tf32"):
        case = Case(cin=8, cout=8, size=(3, 4, 4), precision=precision, add="none", bias=False)
        tensors = case.make("cuda")
        if not family.takes(case, tensors):
            continue
        ran = True
        tensors.input.fill_(torch.finfo(torch.float32).max)
        tensors.weight.fill_(2.0**-12)
        assert family.call(case, tensors).isfinite().all()
    if not ran:
        pytest.skip(f"{family} takes neither precision: {family.refusal}")
