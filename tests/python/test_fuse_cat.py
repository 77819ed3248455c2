# SPDX-License-Identifier: Apache-2.0
"""fuse() where the result goes into a concatenation with a skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d
from fuse_nets import Tail, assert_close, check_same, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

Deferred = list[str]


@pytest.mark.parametrize(
    ("tail", "steps"),
    [
        (lambda t, s: torch.cat((t, s), dim=1), ("cat",)),
        (lambda t, s: torch.cat([s, t], 1), ("cat",)),
        (lambda t, s: torch.concat([t, s], axis=1), ("cat",)),
        (lambda t, s: torch.concatenate((t, s), -4), ("cat",)),
        (lambda t, s: torch.cat((F.relu(t), s), 1), ("relu", "cat")),
        (lambda t, s: torch.cat((s, F.leaky_relu(t + s, 0.2)), 1), ("add", "leaky_relu", "cat")),
        (lambda t, s: F.relu(torch.cat((t, s), 1)), ("cat",)),
    ],
    ids=["up-skip", "skip-up", "concat-axis", "negative", "relu", "add-leaky", "relu-behind"],
)
def test_taken_in(
    tail: Callable[[Tensor, Tensor], Tensor], steps: tuple[str, ...], deferred: Deferred
) -> None:
    report = check_same(Tail(tail), inputs())
    assert report["up"].fused == steps and report["up"].reason == "written into the concatenation"
    assert deferred and all(name.endswith(" cat") for name in deferred)


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (lambda t, s: torch.cat((t, s, s), 1), "then cat"),
        (lambda t, s: torch.cat((t, s), 2), "then cat along dimension 2"),
        (lambda t, s: torch.cat((t, t), 1), "used twice by cat"),
        (lambda t, s: torch.cat((t, s), 1) + t.sum(), "used 2 times"),
        (lambda t, s: torch.stack((t, s), 1), "then stack"),
    ],
    ids=["three", "along-D", "itself", "other-user", "stack"],
)
def test_left_alone(tail: Callable[[Tensor, Tensor], Tensor], reason: str, deferred: Deferred) -> None:
    report = check_same(Tail(tail), inputs())
    assert report["up"].fused == () and reason in report["up"].reason
    assert not any(name.endswith(" cat") for name in deferred)


def test_batch_norm_before_it(deferred: Deferred) -> None:
    """MONAI's VNet joins behind batch norm and an activation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose3d(6, 6, 2, 2)
            self.norm = nn.BatchNorm3d(6)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return torch.cat((F.elu(self.norm(self.up(x))), skip), 1)

    report = check_same(Net(), inputs())
    assert report["up"].fused == ("batch_norm", "elu", "cat")
    assert deferred == ["elu cat"]  # in eval without gradients


def test_two_convolutions_in_one_concatenation() -> None:
    """One of them writes into it, the other is its skip."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ConvTranspose3d(6, 4, 2, 2)
            self.second = nn.ConvTranspose3d(6, 5, 2, 2)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return torch.cat((F.relu(self.first(x)), self.second(x)), 1)

    report = check_same(Net(), inputs())
    assert {entry.name for entry in report.fused if "cat" in entry.fused} == {"first"}
    assert "other operand's convolution writes" in report["second"].reason


@pytest.mark.parametrize(
    "change",
    [
        lambda x, s: (x, s.double()),  # promotes
        lambda x, s: (x[0], s[0]),  # no batch: dimension 1 is the depth
        lambda x, s: (x, s.as_subclass(nn.Parameter)),
    ],
    ids=["promotes", "no-batch", "parameter"],
)
@torch.no_grad()
def test_what_a_plan_meets_at_run_time(change: Any) -> None:
    model = Tail(lambda t, s: torch.cat((t, s), 1))
    args = change(*inputs())
    expected = model(*args)
    assert_close(convt3d.fuse(model)(*args), expected)


@torch.no_grad()
def test_skips_that_do_not_fit_fail_as_before() -> None:
    model = convt3d.fuse(Tail(lambda t, s: torch.cat((t, s), 1)))
    x, skip = inputs()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        model(x, skip[..., 1:])


@torch.no_grad()
def test_autocast_joins_what_has_one_type(deferred: Deferred) -> None:
    model = Tail(lambda t, s: torch.cat((t, s), 1))
    x, skip = inputs()
    for there in (skip, skip.bfloat16()):
        convt3d.unfuse(model)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x, there)
            assert_close(convt3d.fuse(model)(x, there), expected, 1e-2)
    assert deferred == ["none", "none cat"]


def test_a_skip_changed_in_place_in_between() -> None:
    def tail(t: Tensor, s: Tensor) -> Tensor:
        s = s * 1
        s.mul_(2)
        return torch.cat((t, s), 1)

    assert check_same(Tail(tail), inputs())["up"].fused == ("cat",)
