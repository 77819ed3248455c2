# SPDX-License-Identifier: Apache-2.0
"""What users write into a fused module's attributes and parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convt3d import fuse, unfuse
from fuse_nets import assert_close, inside

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "value"),
    [("stride", 2), ("stride", (2,)), ("stride", [2, 2, 2]), ("output_padding", 1), ("dilation", 1)],
)
@torch.no_grad()
def test_attributes_may_be_what_the_function_takes(name: str, value: Any, deferred: list[str]) -> None:
    """PyTorch's module makes three ints of them, but passes on what is there."""
    model = nn.Sequential(nn.ConvTranspose3d(4, 6, 3, 2, 1, 1), nn.ReLU())
    setattr(model[0], name, value)
    x = torch.randn(1, 4, 3, 4, 5)
    expected = model(x)
    assert_close(fuse(model)(x), expected)
    assert deferred == ["relu"]


@pytest.mark.parametrize("shape", [(4, 5, 3, 3, 3), (3, 6, 3, 3, 3), (4, 6, 5, 5, 5)])
@torch.no_grad()
def test_the_shape_is_the_weights(shape: tuple[int, ...], deferred: list[str]) -> None:
    """Pruning channels replaces parameters, and may leave the attributes as they were."""
    model = nn.Sequential(nn.ConvTranspose3d(4, 6, 3, 2, 1, 1), nn.ReLU())
    fuse(model)
    model[0].weight = nn.Parameter(torch.randn(shape))
    model[0].bias = nn.Parameter(torch.randn(shape[1]))
    x = torch.randn(1, shape[0], 3, 4, 5)

    def run() -> tuple[Tensor, Tensor]:
        waiting = model[0](x)
        return waiting, F.relu(waiting)

    waiting, out = inside(run, model)
    assert deferred == ["relu"]
    assert waiting.shape == out.shape and waiting.stride() == out.stride()
    assert_close(out, model[1](unfuse(model)[0](x)))


def test_no_input_channels_are_refused() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.ConvTranspose3d(0, 4, 2, 2), nn.ReLU())
    x = torch.randn(1, 0, 3, 3, 3)
    for network in (model, fuse(copy.deepcopy(model))):
        with pytest.raises(RuntimeError, match="weight"):
            network(x)
