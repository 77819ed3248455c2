# SPDX-License-Identifier: Apache-2.0
"""All activations, orders and kinds of add where the weights stay in shared memory, against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from accuracy import assert_accurate
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
