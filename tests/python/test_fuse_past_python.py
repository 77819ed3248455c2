# SPDX-License-Identifier: Apache-2.0
"""fuse() and code that gets at a waiting result past PyTorch's Python layer, or changes what no plan saw."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convt3d
from fuse_functions import ByHelper, Doubled, Leaky, Squared, scripted_scale_, scripted_swish
from fuse_nets import Residual, up

pytestmark = pytest.mark.usefixtures("one_thread")


def tripled(y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)


USES: dict[str, Callable[[Tensor], Any]] = {
    "function, in place": lambda y: F.relu(Doubled.apply(y)),
    "function": lambda y: F.relu(Squared.apply(y) + y),
    "script, in place": lambda y: (scripted_scale_(y), F.relu(y))[1],
    "script": lambda y: scripted_swish(y) + F.relu(y),
    "script, then in place": lambda y: (scripted_swish(y), F.relu_(y), y + 1)[2],
    "vmap": lambda y: torch.vmap(lambda z: z * z)(y) + F.relu(y),
    "vmap, in place": lambda y: (torch.vmap(lambda z: z.mul_(2))(y), F.relu(y))[1],
    "view, then function in place": lambda y: (y[:, :2], F.relu(Doubled.apply(y)))[0].sum(),
    "use, then function in place": lambda y: (y.mean(), F.relu(Doubled.apply(y)))[1],
    "hook, then function in place": lambda y: (tripled(y), F.relu(Doubled.apply(y)))[1],
    "relu in place, then a script": lambda y: (F.relu_(y), scripted_swish(y))[1],
    "function with inplace=True": lambda y: F.relu(Leaky.apply(y)),
    "function by a helper": lambda y: F.relu(ByHelper.apply(y)),
    "function in place behind another name": lambda y: (y.add_(1), Doubled.apply(y), F.relu(y))[2],
    "checkpoint of a function": lambda y: F.relu(checkpoint(Squared.apply, y, use_reentrant=False)),
    "func.grad": lambda y: F.relu(torch.func.grad(lambda z: z.sin().sum())(y) + y),
}


class Net(nn.Module):
    """up, then relu: as fuse() sees it. A flag switched later brings in another use of the result."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.up, self.use, self.flag = up(), use, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x * 1)
        return USES[self.use](y) if self.flag else F.relu(y)


def before_and_after(use: str) -> tuple[Net, Net]:
    model = Net(use)
    fused = convt3d.fuse(copy.deepcopy(model))
    assert [e.fused for e in convt3d.fuse_report(fused).entries] == [("relu",)]
    model.flag = fused.flag = True
    return model, fused


def double_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Values, gradients, and the gradients of a penalty on these."""
    x = x.clone().requires_grad_()
    sources = [x, *model.parameters()]
    out = model(x)
    first = torch.autograd.grad(out.square().mean(), sources, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), sources[:-1])
    return [out, *first, *second]


@pytest.mark.parametrize("use", USES)
def test_values_and_gradients_twice(use: str) -> None:
    model, fused = before_and_after(use)
    x = torch.randn(2, 6, 3, 4, 5)
    for expected, actual in zip(double_backward(model, x), double_backward(fused, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), model(x))


class Buffers(nn.Module):
    """Counts its calls, and changes what it adds right behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = up()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("offset", torch.ones(6, 1, 1, 1))
        self.kept = [self.offset]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + self.calls
        y = self.up(x) + self.offset
        self.offset.mul_(0.9)
        self.kept[0].add_(0.5)
        random.random()
        return F.relu(y)


class Branches(Buffers):
    """Does not trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() == x.sum() else x


@pytest.mark.parametrize("traced", [True, False])
def test_buffers_are_not_changed_by_fusing_and_a_change_is_no_wrong_value(traced: bool) -> None:
    model = Buffers() if traced else Branches()
    fused = copy.deepcopy(model)
    state = random.getstate()
    convt3d.fuse(fused, torch.randn(1, 6, 3, 3, 3))
    assert [e.fused for e in convt3d.fuse_report(fused).entries] == [("add", "relu")]
    assert random.getstate() == state
    for name, value in model.state_dict().items():
        assert torch.equal(fused.state_dict()[name], value), name
    # A trace does not show what a forward does with a buffer.
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed in place"):
        fused(torch.randn(1, 6, 3, 3, 3))


def test_arrays_that_share_the_input_are_writes() -> None:
    class Exports(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.up(x)
            x.numpy()[...] = 0
            return F.relu(y)

    model = Exports().eval().requires_grad_(False)
    x = torch.randn(1, 6, 3, 3, 3)
    fused = convt3d.fuse(copy.deepcopy(model), x)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("traced", [False, True])
def test_a_plan_ends_where_compiled_code_begins(traced: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.act = up(), nn.BatchNorm3d(6), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            assert traced or x.sum() == x.sum()
            return self.act(self.norm(self.up(x)))

    model: Any = Net().eval()
    x = torch.randn(1, 6, 3, 3, 3)
    with torch.no_grad():
        expected = model(x)
        model.act = torch.compile(model.act, backend="eager", fullgraph=True)
        convt3d.fuse(model, x)
        assert convt3d.fuse_report(model)["up"].fused == ("batch_norm",)
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("how", ["compile()", "forward"])
def test_what_is_compiled_after_fuse_gets_a_tensor(how: str) -> None:
    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    model = nn.Sequential(up(), Act())
    x = torch.randn(1, 6, 3, 3, 3)
    with torch.no_grad():
        expected = model(x)
        convt3d.fuse(model)
        assert convt3d.fuse_report(model)["0"].fused == ("relu",)
        if how == "compile()":
            model[1].compile(backend="eager", fullgraph=True)
        else:
            model[1].forward = torch.compile(model[1].forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(convt3d.fuse(model)(x), expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_no_compiled_code() -> None:
    class Net(Residual):
        def forward(self, x: Tensor) -> Any:
            assert x.sum() == x.sum()
            return checkpoint(F.relu, self.up(x), use_reentrant=False)

    model = Net()
    x = torch.randn(1, 6, 3, 3, 3)
    with torch.no_grad():
        expected = model(x)
        convt3d.fuse(model, x)
        assert convt3d.fuse_report(model)["up"].fused == ("relu",)
        torch.testing.assert_close(model(x), expected)
        assert convt3d.fuse_report(model)["up"].last == ("relu",)


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the model"])
def test_a_run_is_watched_through_torch_compile(whole: bool) -> None:
    model: Any = nn.Sequential(nn.Conv3d(6, 6, 1), nn.Sequential(up(), nn.BatchNorm3d(6), nn.ReLU())).eval()
    x = torch.randn(1, 6, 3, 3, 3)
    expected = model(x)
    fused = copy.deepcopy(model)
    if whole:
        fused = torch.compile(fused, backend="eager")
    else:
        fused[1] = torch.compile(fused[1], backend="eager")
    convt3d.fuse(fused, x)
    report = convt3d.fuse_report(fused)
    assert report.entries[0].fused == ("batch_norm", "relu")
    assert (report.notes == ()) == whole  # its part traces
    torch.testing.assert_close(fused(x), expected)


def test_what_is_computed_from_a_buffer_and_cached_elsewhere_is_no_stand_in() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = up()
            self.register_buffer("table", torch.arange(6.0).view(6, 1, 1, 1))

        @functools.cache  # noqa: B019
        def offset(self) -> Tensor:
            return self.table * 2

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.up(x) + self.offset())

    model = Caches()
    x = torch.randn(1, 6, 3, 3, 3)
    expected = model(x)
    torch.testing.assert_close(convt3d.fuse(copy.deepcopy(model))(x), expected)
