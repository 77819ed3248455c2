# SPDX-License-Identifier: Apache-2.0
"""What fuse() takes in, what it leaves, and that results never change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d
from convt3d import FusedConvTranspose3d, Model
from convt3d._activations import ACTIVATIONS
from convt3d._fuse import _call
from fuse_nets import (
    Chain,
    LocalNetLike,
    StereoLike,
    SumJoining,
    Tail,
    ZerosSkip,
    assert_close,
    check_same,
    inputs,
    spiced,
    up,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The deferred calls that ran, by keyword arguments."""
    found: list[dict[str, Any]] = []
    real = _call.conv_transpose3d

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        found.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(_call, "conv_transpose3d", spy)
    return found


def took(calls: list[dict[str, Any]], model: nn.Module, args: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    """(activation, add_order or None without an add) of the deferred calls of one pass in eval."""
    calls.clear()
    with torch.no_grad():
        model.eval()(*args)
    return [(c["activation"], c["add_order"] if c["add"] is not None else None) for c in calls]


MODULES: list[tuple[str, Callable[[], nn.Module]]] = [
    ("relu", nn.ReLU),
    ("relu", lambda: nn.ReLU(inplace=True)),
    ("leaky_relu", nn.LeakyReLU),
    ("leaky_relu", lambda: nn.LeakyReLU(0.3, inplace=True)),
    ("elu", nn.ELU),
    ("elu", lambda: nn.ELU(inplace=True)),
    ("gelu", nn.GELU),
    ("gelu_tanh", lambda: nn.GELU(approximate="tanh")),
    ("silu", nn.SiLU),
    ("silu", lambda: nn.SiLU(inplace=True)),
    ("sigmoid", nn.Sigmoid),
    ("tanh", nn.Tanh),
    ("hardswish", nn.Hardswish),
    ("hardswish", lambda: nn.Hardswish(inplace=True)),
]


@pytest.mark.parametrize(("name", "make"), MODULES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(MODULES)])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch_norm"])
def test_activation_modules(
    name: str, make: Callable[[], nn.Module], norm: bool, calls: list[dict[str, Any]]
) -> None:
    model = spiced(Chain(up(), *([nn.BatchNorm3d(6)] if norm else []), make(), nn.Conv3d(6, 3, 1)))
    report = check_same(model, inputs())
    assert report["0"].fused == (("batch_norm", name) if norm else (name,))
    assert took(calls, model, inputs()) == [(name, None)]


FUNCTIONS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("relu", F.relu),
    ("relu", torch.relu),
    ("relu", lambda t: t.relu()),
    ("relu", lambda t: t.relu_()),
    ("relu", lambda t: F.relu(t, inplace=True)),
    ("relu", lambda t: F.relu_(t)),
    ("leaky_relu", lambda t: F.leaky_relu(t, 0.2)),
    ("leaky_relu", lambda t: F.leaky_relu_(t, negative_slope=0.2)),
    ("elu", F.elu),
    ("gelu", F.gelu),
    ("gelu_tanh", lambda t: F.gelu(t, approximate="tanh")),
    ("silu", lambda t: F.silu(t, inplace=True)),
    ("sigmoid", torch.sigmoid),
    ("sigmoid", lambda t: t.sigmoid_()),
    ("sigmoid", F.sigmoid),
    ("tanh", torch.tanh),
    ("tanh", lambda t: t.tanh()),
    ("tanh", F.tanh),
    ("hardswish", F.hardswish),
    ("x_hardswish", lambda t: t * F.hardswish(t)),
    ("x_hardswish", lambda t: torch.mul(F.hardswish(t), t)),
]


@pytest.mark.parametrize(("name", "act"), FUNCTIONS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(FUNCTIONS)])
@pytest.mark.parametrize("order", [None, "before", "after"])
def test_activation_functions_and_adds(
    name: str, act: Callable[[Tensor], Tensor], order: str | None, calls: list[dict[str, Any]]
) -> None:
    tails: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
        None: lambda t, s: act(t),
        "before": lambda t, s: act(t + s),
        "after": lambda t, s: s + act(t),
    }
    model = Tail(tails[order])
    report = check_same(model, inputs())
    fused = {None: (name,), "before": ("add", name), "after": (name, "add")}[order]
    assert report["up"].fused == fused
    assert took(calls, model, inputs()) == [(name, order)]


def test_the_table_is_covered() -> None:
    assert {name for name, _ in FUNCTIONS} | {"none"} == set(ACTIVATIONS)


ADDS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda t, s: t + s,
    lambda t, s: s + t,
    lambda t, s: torch.add(t, s),
    lambda t, s: torch.add(s, t, alpha=1),
    lambda t, s: t.add(s),
    lambda t, s: s.add(other=t),
    lambda t, s: t.add_(s),
    lambda t, s: t.__iadd__(s),
    lambda t, s: t + s[:1],
    lambda t, s: t + s[0, :, :1, :1, :1],
    lambda t, s: t + s.mean(),
]


@pytest.mark.parametrize("tail", ADDS, ids=range(len(ADDS)))
def test_adds(tail: Callable[[Tensor, Tensor], Tensor], calls: list[dict[str, Any]]) -> None:
    model = Tail(tail)
    assert check_same(model, inputs())["up"].fused == ("add",)
    assert took(calls, model, inputs()) == [("none", "before")]


LEFT: list[tuple[str, Callable[[Tensor, Tensor], Any], str]] = [
    ("elu alpha", lambda t, s: F.elu(t, 0.5), "then elu"),
    ("relu6", lambda t, s: F.relu6(t), "then relu6"),
    ("add alpha", lambda t, s: torch.add(t, s, alpha=2), "then add"),
    ("number", lambda t, s: t + 1, "then add of a number"),
    ("into the skip", lambda t, s: s.add_(t), "changes its other operand in place"),
    ("used twice", lambda t, s: (F.relu(t), t), "used 2 times"),
    ("added to itself", lambda t, s: t + t, "used twice by add"),
    ("returned", lambda t, s: t, "then the model's output"),
    ("cat", lambda t, s: torch.cat([t, s, s], 1), "then cat"),
    ("mul", lambda t, s: t * s, "then mul"),
    ("swish, not x_hardswish", lambda t, s: t * torch.sigmoid(t), "used 2 times"),
    ("other gate", lambda t, s: s * F.hardswish(t) + t, "used 2 times"),
]


@pytest.mark.parametrize(("tail", "reason"), [case[1:] for case in LEFT], ids=[case[0] for case in LEFT])
def test_left(tail: Callable[[Tensor, Tensor], Any], reason: str, calls: list[dict[str, Any]]) -> None:
    model = Tail(tail)
    entry = check_same(model, inputs())["up"]
    assert entry.replaced and entry.fused == () and reason in entry.reason
    assert isinstance(model.up, FusedConvTranspose3d)
    assert took(calls, model, inputs()) == []


def test_inplace_result_is_seen_through_the_old_name() -> None:
    """The in-place result is dropped, the changed tensor used: not taken in, and right."""

    def tail(t: Tensor, s: Tensor) -> Tensor:
        F.relu(t, inplace=True)
        return t + s

    check_same(Tail(tail), inputs())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_is_folded(groups: int, bias: bool, affine: bool, calls: list[dict[str, Any]]) -> None:
    model = spiced(Chain(up(6, 4, groups=groups, bias=bias), nn.BatchNorm3d(4, affine=affine)))
    report = check_same(model, inputs())
    assert report["0"].fused == ("batch_norm",)
    assert took(calls, model, inputs()) == [("none", None)]
    # Folded anew in each call: every update is seen.
    before = model(*inputs())
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm3d) and norm.running_var is not None
    norm.running_var.mul_(4)
    norm.eps = 1e-3
    after = model(*inputs())
    convt3d.unfuse(model)
    assert_close(after, model(*inputs()))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("norm", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_batch_norm_of_another_type(
    dtype: torch.dtype, norm: torch.dtype, calls: list[dict[str, Any]]
) -> None:
    """Folded where PyTorch's batch norm takes it, refused as it refuses it."""
    model = nn.Sequential(up(), nn.BatchNorm3d(6)).eval()
    model[0].to(dtype)
    model[1].to(norm)
    twin = copy.deepcopy(model)
    convt3d.fuse(model)
    x = inputs()[0]
    fits = dtype == norm or (dtype == torch.bfloat16 and norm == torch.float32)
    if fits:
        assert_close(model(x.to(dtype)), twin(x.to(dtype)), 2e-2 if dtype == torch.bfloat16 else 1e-5)
        return
    for net in (model, twin):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            net(x.to(dtype))


def test_batch_norm_without_statistics_is_not_folded(calls: list[dict[str, Any]]) -> None:
    model = Chain(up(), nn.BatchNorm3d(6, track_running_stats=False), nn.ReLU())
    check_same(model, inputs())
    # The convolution alone runs; batch norm uses the batch.
    assert took(calls, model, inputs()) == [("none", None)]


def test_frozen_batch_norm_in_a_training_model(calls: list[dict[str, Any]]) -> None:
    model = spiced(Chain(up(), nn.BatchNorm3d(6), nn.ReLU()))
    convt3d.fuse(model)
    model.train()
    model[1].eval()
    x, skip = inputs()
    fused = model(x, skip)
    convt3d.unfuse(model)
    assert_close(fused, model(x, skip))
    convt3d.fuse(model)
    # Batch norm trains in a model that is in eval: the convolution waits in vain, and the result is right.
    model.eval()
    model[1].train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    fused = model(x, skip)
    running = model[1].running_mean.clone()
    model.load_state_dict(state)
    convt3d.unfuse(model)
    assert_close(fused, model(x, skip))
    assert_close(running, model[1].running_mean)


@pytest.mark.parametrize(
    ("make", "name", "fused", "live"),
    [
        (LocalNetLike, "deconv.0", ("batch_norm", "relu", "add"), [("relu", "after")]),
        (StereoLike, "conv5.0", ("batch_norm", "add", "relu"), [("relu", "before")]),
        (SumJoining, "up", (), []),
        (ZerosSkip, "up", ("add",), [("none", "before")]),
    ],
)
def test_real_patterns(
    make: Callable[[], nn.Module],
    name: str,
    fused: tuple[str, ...],
    live: list[Any],
    calls: list[dict[str, Any]],
) -> None:
    model = spiced(make())
    assert check_same(model, inputs())[name].fused == fused
    assert took(calls, model, inputs()) == live


def test_the_reference_model(calls: list[dict[str, Any]]) -> None:
    model = Model(6, 6, 3, 2, 1, 1, (6, 1, 1, 1, 1))
    assert check_same(model, inputs())["conv_transpose"].fused == ("add", "x_hardswish")
    assert took(calls, model, inputs()) == [("x_hardswish", "before")]


def test_dropout_between(calls: list[dict[str, Any]]) -> None:
    model = spiced(Chain(up(), nn.BatchNorm3d(6), nn.Dropout(0.5), nn.LeakyReLU(0.1), nn.Conv3d(6, 2, 1)))
    assert check_same(model, inputs())["0"].fused == ("batch_norm", "leaky_relu")
    assert took(calls, model, inputs()) == [("leaky_relu", None)]
    model = Chain(up(), nn.Dropout3d(0.5))
    assert check_same(model, inputs())["0"].fused == ()


class CalledTwice(nn.Module):
    def __init__(self, different: bool) -> None:
        super().__init__()
        self.up = up()
        self.different = different

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        a = F.relu(self.up(x) + skip)
        b = self.up(x * 2) + skip
        return a - (torch.tanh(b) if self.different else F.relu(b))


@pytest.mark.parametrize("different", [False, True])
def test_module_called_twice(different: bool, calls: list[dict[str, Any]]) -> None:
    model = CalledTwice(different)
    entry = check_same(model, inputs())["up"]
    assert entry.fused == (("add",) if different else ("add", "relu"))
    assert ("called 2 times" in entry.reason) is different
    assert took(calls, model, inputs()) == [("none" if different else "relu", "before")] * 2


def test_two_convolutions_meet_in_one_add(calls: list[dict[str, Any]]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = up(), up()

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return F.relu(self.a(x) + self.b(x))

    model = Two()
    report = check_same(model, inputs())
    assert report["a"].fused == ("add", "relu")
    assert report["b"].fused == () and "other operand" in report["b"].reason
    assert took(calls, model, inputs()) == [("relu", "before")]


class Branches(nn.Module):
    """A flag that changes after fuse(): what was planned does not come."""

    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.up = up()

    def forward(self, x: Tensor, skip: Tensor) -> Any:
        y = self.up(x)
        if self.flag:
            return y.mean(), y.mul(2), F.relu(y), torch.cat([y, skip]), y[:, 1:], y.sum().item(), y * y
        return F.relu(y + skip)


def test_values_do_not_depend_on_the_plan() -> None:
    model = Branches()
    assert check_same(model, inputs())["up"].fused == ("add", "relu")
    model.flag = True
    ours = model(*inputs())
    assert all(type(t) is torch.Tensor for t in ours if isinstance(t, Tensor))
    convt3d.unfuse(model)
    assert_close(ours, model(*inputs()))


def test_unplanned_uses_have_gradients() -> None:
    class Past(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 3

    class Custom(Branches):
        def forward(self, x: Tensor, skip: Tensor) -> Any:
            y = self.up(x)
            return Past.apply(y) if self.flag else F.relu(y + skip)

    model = convt3d.fuse(Custom())
    model.flag = True
    x, skip = inputs()
    x.requires_grad_()

    def gradients() -> list[Tensor]:
        out = model(x, skip)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]

    ours = gradients()
    convt3d.unfuse(model)
    assert_close(ours, gradients(), 1e-5)


def test_shapes_and_types_of_a_waiting_result() -> None:
    seen: list[Any] = []

    class Looks(nn.Module):
        def __init__(self, channels_last: bool) -> None:
            super().__init__()
            self.up = up()
            if channels_last:
                self.up.to(memory_format=torch.channels_last_3d)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.up(x)
            seen.append((y.shape, y.size(1), y.stride(), y.dtype, y.device, y.dim(), y.is_contiguous()))
            return y + skip[..., : y.shape[-1]]

    for channels_last in (False, True):
        model = Looks(channels_last)
        x, skip = inputs()
        for args in ((x, skip), (x[0], skip[0])):
            seen.clear()
            plain = convt3d.FusedConvTranspose3d(6, 6, 3, 2, 1, 1).to(
                memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format
            )(args[0])
            convt3d.fuse(model)
            assert convt3d.fuse_report(model)["up"].fused == ("add",)
            seen.clear()
            model(*args)
            y = plain
            assert seen == [(y.shape, y.size(1), y.stride(), y.dtype, y.device, y.dim(), y.is_contiguous())]
