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

import convt3d
from fuse_nets import up

pytestmark = pytest.mark.usefixtures("one_thread")


class Doubled(torch.autograd.Function):
    """In place, as memory-saving ones are."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


@torch.jit.script
def scripted_scale_(y: Tensor) -> Tensor:
    y.mul_(2.0)
    return y


@torch.jit.script
def scripted_swish(y: Tensor) -> Tensor:
    return y * torch.sigmoid(y)


USES: dict[str, Callable[[Tensor], Any]] = {
    "function, in place": lambda y: F.relu(Doubled.apply(y)),
    "function": lambda y: F.relu(Squared.apply(y) + y),
    "script, in place": lambda y: (scripted_scale_(y), F.relu(y))[1],
    "script": lambda y: scripted_swish(y) + F.relu(y),
    "script, then in place": lambda y: (scripted_swish(y), F.relu_(y), y + 1)[2],
    "vmap": lambda y: torch.vmap(lambda z: z * z)(y) + F.relu(y),
    "vmap, in place": lambda y: (torch.vmap(lambda z: z.mul_(2))(y), F.relu(y))[1],
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


def test_gradients_of_a_function_behind_a_step_in_place_are_refused() -> None:
    class Both(nn.Module):
        flag = other_name = False

        def __init__(self) -> None:
            super().__init__()
            self.up = up()

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.up(x)
            kept = y
            y += skip
            if self.flag:
                y = Squared.apply(kept if self.other_name else y)
            return F.relu(y)

    model = Both()
    fused = convt3d.fuse(copy.deepcopy(model))
    model.flag = fused.flag = True
    x = torch.randn(1, 6, 3, 3, 3)
    skip = torch.randn(1, 6, 6, 6, 6, requires_grad=True)
    for net in (model, fused):
        net(x, skip).sum().backward()
    torch.testing.assert_close(fused.up.weight.grad, model.up.weight.grad)
    fused.other_name = True
    torch.testing.assert_close(fused(x, skip), model(x, skip))
    with pytest.raises(RuntimeError, match="plan has not seen"):
        fused(x, skip).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(fused(x, skip), model(x, skip))


class Buffers(nn.Module):
    """Counts its calls, and changes what it adds right behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = up()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("offset", torch.ones(6, 1, 1, 1))
        self.kept = [self.offset]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.up(x) + self.offset
        self.offset.mul_(0.9)
        self.kept[0].add_(0.5)
        random.random()
        return F.relu(y)


def test_buffers_are_not_changed_by_fusing_and_a_change_is_no_wrong_value() -> None:
    model = Buffers()
    fused = copy.deepcopy(model)
    state = random.getstate()
    convt3d.fuse(fused)
    assert random.getstate() == state
    for name, value in model.state_dict().items():
        assert torch.equal(fused.state_dict()[name], value), name
    # A trace does not show what a forward does with a buffer.
    with pytest.raises(RuntimeError, match="changed in place"):
        fused(torch.randn(1, 6, 3, 3, 3))


def test_arrays_that_share_the_input_are_writes() -> None:
    class Exports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = up()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.up(x)
            x.numpy()[...] = 0
            return F.relu(y)

    model = Exports().eval().requires_grad_(False)
    x = torch.randn(1, 6, 3, 3, 3)
    fused = convt3d.fuse(copy.deepcopy(model), x)
    torch.testing.assert_close(fused(x), model(x))


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
    entry = convt3d.fuse_report(fused).entries[0]
    assert entry.fused == ("batch_norm", "relu")
    torch.testing.assert_close(fused(x), expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: (y[:, :2], F.relu(Doubled.apply(y)))[0].sum(),  # a view of what is doubled
        lambda y: (y.register_hook(lambda g: 3 * g), F.relu(Doubled.apply(y)))[1],
        lambda y: (y.register_hook(lambda g: 3 * g), Squared.apply(y))[1],
        lambda y: (y.retain_grad(), Squared.apply(y))[1],
        lambda y: (F.relu_(y), scripted_swish(y))[1],
    ],
    ids=["view", "hook, in place", "hook", "retain_grad", "relu in place, then a script"],
)
def test_what_cannot_be_followed_is_refused(use: Callable[[Tensor], Tensor], monkeypatch: Any) -> None:
    """An error of PyTorch's or ours, not a wrong gradient."""
    monkeypatch.setitem(USES, "refused", use)
    _, fused = before_and_after("refused")
    with pytest.raises(RuntimeError, match=r"dirty|plan has not seen"):
        fused(torch.randn(1, 6, 3, 3, 3)).sum().backward()


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
