# SPDX-License-Identifier: Apache-2.0
"""fuse() and changes in place: nothing is taken in across one that matters, and none goes unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d
from fuse_nets import Tail, check_same, inputs, up

pytestmark = pytest.mark.usefixtures("one_thread")


class ChangesInput(nn.Module):
    """The convolution's input is changed in place before the add."""

    traced = True

    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.what = up(), what

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if not self.traced and x.sum() > 1e9:
            return x
        x = x * 1
        skip = skip * 1
        y = self.up(input=x)
        if self.what == "input":
            return y + skip + F.relu(x, inplace=True).mean()
        if self.what == "view":
            return F.silu(y + x.view(-1).mul_(2).mean())
        if self.what == "skip, before it is read":
            return F.relu(y + skip.mul_(2))
        if self.what == "skip, after it was read":
            y = y + skip
            skip.mul_(2)
            return F.relu(y) + skip
        # The gradient of the fused activation would need the skip as it was.
        y = F.silu(y + skip)
        skip[:, :2].zero_()
        return y + skip


@pytest.mark.parametrize(
    ("what", "fused"),
    [
        ("input", ("add",)),
        ("view", ()),
        ("skip, before it is read", ("add", "relu")),
        ("skip, after it was read", ("add",)),
        ("skip, at the very end", ("add",)),
    ],
)
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "watched"])
def test_changes_in_place(what: str, fused: tuple[str, ...], traced: bool) -> None:
    # Where the input changes the network itself has no gradient.
    model = ChangesInput(what)
    model.traced = traced
    entry = check_same(model, inputs(), example=inputs(), grads=what.startswith("skip"))["up"]
    assert entry.fused == fused


class Opaque(nn.Module):
    """Does not trace, and changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.clip(x)  # type: ignore[no-any-return]


class CallsOpaque(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.up = up()
        self.opaque = Opaque()
        self.what = what

    def forward(self, x: Tensor, skip: Tensor) -> Any:
        y = self.up(x)
        if self.what == "skip":
            y = y + skip
        changed = self.opaque(x if self.what == "input" else skip)
        return F.relu(y + skip if self.what == "input" else y), changed


def test_an_operator_that_changes_its_argument() -> None:
    entry = check_same(Tail(lambda t, s: (F.relu(t + s), torch.ops.aten.add_(s, 1))), inputs(), grads=False)[
        "up"
    ]
    assert entry.fused == ("add",) and "add_" in entry.reason
    entry = check_same(Tail(lambda t, s: torch.ops.aten.add(s, 1) + F.relu(t + s)), inputs())["up"]
    assert entry.fused == ("add", "relu")


@pytest.mark.parametrize(("what", "fused"), [("input", ()), ("skip", ("add",))])
def test_changes_in_place_that_no_graph_shows(what: str, fused: tuple[str, ...]) -> None:
    entry = check_same(CallsOpaque(what), inputs(), grads=False)["up"]
    assert entry.fused == fused and "'opaque' changes in place" in entry.reason


def test_a_change_that_was_not_planned_is_an_error_not_a_wrong_value() -> None:
    class Sneaky(nn.Module):
        sneak = False

        def __init__(self) -> None:
            super().__init__()
            self.up = up()

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.up(x)
            if self.sneak:
                x.mul_(2)
            return y + skip

    model = convt3d.fuse(Sneaky().eval())
    x, skip = inputs()
    model.sneak = True
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed in place"):
        model(x, skip)
