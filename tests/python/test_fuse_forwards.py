# SPDX-License-Identifier: Apache-2.0
"""The forward that a plan ends in, however it is written, and results that leave it."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from convt3d import fuse, fuse_report
from fuse_nets import Residual, assert_close, inputs, up

pytestmark = pytest.mark.usefixtures("one_thread")


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(Residual):
    @torch.no_grad()
    @decorated
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.act(self.up(x) + skip)


class Undressed(Residual):
    """A decorator without functools.wraps, and no `self`."""

    def forward(*args: Tensor) -> Tensor:  # type: ignore[override]
        self, x, skip = args
        return self.act(self.up(x) + skip)


class Renamed(Residual):
    def run(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.act(self.up(x) + skip)

    forward = run


class Derived(Decorated):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return super().forward(x, skip)


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.block.forward(x, skip)


@pytest.mark.parametrize(
    "how", ["as it is", "deepcopy", "pickle", "graph", "copy of a graph", "on the instance"]
)
@pytest.mark.parametrize("make", [Residual, Decorated, Undressed, Renamed, Derived, Direct])
def test_it_is_found_however_it_is_written(make: type[nn.Module], how: str, deferred: list[str]) -> None:
    model: Any = make()
    with torch.no_grad():
        expected = model(*inputs())
        if how == "on the instance":
            model.forward = functools.partial(type(model).forward, model)
        elif "graph" in how:
            if make is Undressed:
                pytest.skip("torch.fx does not trace that")
            model = fx.symbolic_trace(model)
        fuse(model, inputs())
        if how in ("deepcopy", "copy of a graph"):
            model = copy.deepcopy(model)
        elif how == "pickle":
            model = pickle.loads(pickle.dumps(model))
        assert_close(model(*inputs()), expected)
    if how == "on the instance":
        assert deferred == []
        assert "no code of its own" in fuse_report(model)["block.up" if make is Direct else "up"].reason
    else:
        assert deferred == ["relu"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_slice_of_a_sequential_returns_a_tensor(mode: Any, deferred: list[str]) -> None:
    """It is an nn.Sequential, as the plan's end is, and so are the subclasses that keep its forward."""

    class Convolution(nn.Sequential):
        pass

    x, _ = inputs()
    for make in (nn.Sequential, Convolution):
        model = fuse(make(nn.Conv3d(6, 6, 1), up(), nn.BatchNorm3d(6), nn.ReLU()).eval())
        nested = fuse(
            nn.Sequential(make(nn.Conv3d(6, 6, 1), up()), nn.Sequential(nn.BatchNorm3d(6), nn.ReLU())).eval()
        )
        with mode():
            unpickled = pickle.loads(pickle.dumps(fuse(nn.Sequential(up(), nn.ReLU()))))
            for part in (
                unpickled[:-1],
                copy.copy(model)[:-2],
                model[:-2],
                nn.Sequential(*list(model.children())[:-2]),
                nested[:-1],
                nested[0],
            ):
                assert type(part(x)) is Tensor
            deferred.clear()
            replica = model._replicate_for_data_parallel()  # with the parts of the model
            for whole in (model, nested, copy.deepcopy(model), unpickled, replica, copy.copy(nested)):
                whole(x)
            assert deferred == ["relu"] * 6


@torch.no_grad()
def test_a_part_of_a_graph_returns_a_tensor() -> None:
    model = fuse(fx.symbolic_trace(nn.Sequential(up(), nn.ReLU())))
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("0", (x,)))
    assert type(fx.GraphModule(model, graph)(inputs()[0])) is Tensor


def test_one_that_two_classes_call() -> None:
    shared = up()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = shared

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.up(x))

    class Second(First):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.up(x))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = First(), Second()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    model = fuse(Both())
    x, _ = inputs()
    with torch.no_grad():
        for part in (model.first, model.second):
            shared.__dict__.pop("convt3d_last", None)
            part(x)
            assert shared.convt3d_last == ("relu",)  # type: ignore[comparison-overlap]


def test_a_module_that_is_called_twice_and_its_hook() -> None:
    class Block(Residual):
        def forward(self, x: Tensor, second: bool) -> Tensor:
            return F.relu(x) if second else self.up(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Any:
            assert x.sum() == x.sum()  # does not trace
            return self.block(self.block(x, False), True)

    model = Net()
    x, _ = inputs()
    seen: list[Any] = []
    fuse(model, x)
    assert fuse_report(model)["block.up"].fused == ("relu",)
    with torch.no_grad():
        assert type(model.block(x, False)) is Tensor
        model(x)
        assert fuse_report(model)["block.up"].last == ("relu",)
        model.block.register_forward_hook(lambda m, args, out: seen.append(type(out)))
        model(x)
    assert seen == [Tensor, Tensor]
    fuse(model, x)
    assert "hook of 'block'" in fuse_report(model)["block.up"].reason


@torch.no_grad()
def test_operands_that_no_kernel_takes() -> None:
    """A sparse residual; integers, of which sigmoid makes numbers."""
    x, skip = inputs()
    model = Residual()
    expected = model(x, skip)
    assert_close(fuse(model)(x, skip.to_sparse()), expected)
    whole = nn.Sequential(up(), nn.Sigmoid())
    for parameter in whole.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.mul(4).long()
    x = x.mul(4).long()
    expected = whole(x)
    assert_close(fuse(whole)(x), expected)
