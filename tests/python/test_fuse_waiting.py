# SPDX-License-Identifier: Apache-2.0
"""Results that wait, and what may happen to them before they are computed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import convt3d
from convt3d._fuse import _call
from fuse_functions import Scaled, Squared, scripted_scale_
from fuse_nets import Residual, inside, up

pytestmark = pytest.mark.usefixtures("one_thread")


class Escapes(nn.Module):
    """Its convolution runs without gradients; what is done with the result need not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = up()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.use: Callable[[Tensor, Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.up(x)
            if self.use is None:
                return F.relu(y)
        self.waited = type(y) is not Tensor
        return self.use(y, self.scale)


def latent(y: Tensor, scale: Tensor) -> Any:
    y.requires_grad_()
    (y * scale).square().sum().backward()
    with torch.no_grad():
        assert y.grad is not None
        return y - y.grad


def saved_and_changed(y: Tensor, scale: Tensor) -> Any:
    squared = (y * scale).square().sum()  # the gradient of the scale needs y
    scripted_scale_(y)
    squared.backward()


def saved_by_a_function_and_changed(y: Tensor, scale: Tensor) -> Any:
    out = Scaled.apply(y, scale)
    kept = Squared.apply(out)
    with torch.no_grad():
        y.mul_(3)
    kept.sum().backward()


def saved_then_a_view_changed(y: Tensor, scale: Tensor) -> Any:
    out = checkpoint(lambda t: (t * scale).square(), y, use_reentrant=False)
    with torch.no_grad():
        y[:, :2].mul_(3)
    return out


def a_view_of_a_function_changed(y: Tensor, scale: Tensor) -> Any:
    kept: list[Tensor] = []

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            kept.append(y[:, :1])
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    Views.apply(y)
    out = (y * scale).square()
    with torch.no_grad():
        kept[0].mul_(3)
    return out


def a_leaf_while_it_is_held(y: Tensor, scale: Tensor) -> Any:
    held = Scaled.apply(y.detach(), scale), Squared.apply(y)
    with torch.no_grad():
        y.requires_grad_()
    del held
    (y * y).sum().backward()
    assert y.is_leaf and y.grad is not None
    return y.grad * scale


def array_while_it_is_held(y: Tensor, scale: Tensor) -> Any:
    out = Scaled.apply(y, scale)
    with torch.no_grad():
        y.detach().numpy()[...] += 1
        assert y.detach().tolist()[0][0][0][0][0] == y[0, 0, 0, 0, 0].item()
    return (y * 2).detach() + out.detach() * scale


ESCAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "function in place": lambda y, w: (Scaled.apply(y, w), F.relu(y))[1],
    "function in place, result": lambda y, w: F.relu(Scaled.apply(y, w)),
    "in place, function in place": lambda y, w: (y.mul_(w), Scaled.apply(y, w), F.relu(y))[2],
    "function in place, in place, function": lambda y, w: Squared.apply(
        (Scaled.apply(y, w), y.mul_(w), y)[2]
    ),
    "function twice": lambda y, w: (Scaled.apply(y, w), Scaled.apply(y, w), y * 2)[2],
    "use, function in place": lambda y, w: (y.mean() * w, Scaled.apply(y, w), y.sum())[2],
    "script in place": lambda y, w: (scripted_scale_(y), y * w, scripted_scale_(y))[1],
    "saved by a function": lambda y, w: Squared.apply(Scaled.apply(y, w)) + y,
    "two names": lambda y, w: (F.relu_(y), y.mul_(w), Squared.apply(y))[2],
    "latent": latent,
    "parameter": lambda y, w: nn.Parameter(y) * w,
    "array": lambda y, w: (y.numpy().__imul__(2), y * w)[1],
    "data": lambda y, w: (y.data.mul_(2), y * w)[1],
    "saved and changed": saved_and_changed,
    "saved by a function and changed": saved_by_a_function_and_changed,
    "saved, then a view changed": saved_then_a_view_changed,
    "a view of a function changed": a_view_of_a_function_changed,
    "a leaf while it is held": a_leaf_while_it_is_held,
    "an array while it is held": array_while_it_is_held,
    "weak reference in C++": lambda y, w: (torch._C._WeakTensorRef(y), y * w + y)[1],
    "to itself": lambda y, w: (y + y) * w,
    "foreach": lambda y, w: (Scaled.apply(y, w), torch._foreach_mul_([y], 2.0), y * 2)[2],
}


@pytest.mark.parametrize("use", ESCAPES)
def test_a_result_without_gradients_gets_some_later(use: str) -> None:
    model = Escapes()
    fused = convt3d.fuse(copy.deepcopy(model))
    assert [e.fused for e in convt3d.fuse_report(fused).entries] == [("relu",)]
    x = torch.randn(1, 6, 3, 3, 3)
    results: list[Any] = []
    for net in (model, fused):
        net.use = ESCAPES[use]
        try:
            out = net(x)
            if out.requires_grad:
                out.square().sum().backward()
            results.append([out, net.scale.grad])
        except RuntimeError as error:
            results.append(str(error).partition(": ")[0])
    assert fused.waited and not model.waited
    if isinstance(results[0], str):
        assert results[1] == results[0] and "modified by an inplace operation" in results[0]
    else:
        torch.testing.assert_close(results[1], results[0])


def test_a_result_turns_into_the_tensor_it_stood_for() -> None:
    """One object, whatever it is used for and by whatever name."""
    model = convt3d.fuse(nn.Sequential(up(), nn.ReLU()))
    weak = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert type(model[0](torch.randn(1, 6, 3, 3, 3))) is Tensor  # its plan goes on outside
            y = inside(lambda: model[0](torch.randn(1, 6, 3, 3, 3)), model)
            other, y.tag = y, "kept"
            weak.append(weakref.ref(y))
            assert type(y) is not Tensor and y.shape == (1, 6, 6, 6, 6)
            assert y.add_(1) is y  # not planned
            assert type(y) is Tensor and other is y and y.tag == "kept" and weak[-1]() is y
            assert y.is_inference() == (mode is torch.inference_mode)
            z = inside(lambda: model[0](torch.randn(1, 6, 3, 3, 3)), model)
            assert F.relu_(z) is z and type(z) is Tensor  # planned
            del y, other, z
    assert [ref() for ref in weak] == [None, None]


def test_a_change_of_shape_past_python_is_refused() -> None:
    model = convt3d.fuse(nn.Sequential(up(), nn.ReLU()))

    @torch.jit.script
    def unsqueezed_(y: Tensor) -> Tensor:
        return y.unsqueeze_(0)

    with torch.no_grad():
        y = inside(lambda: model[0](torch.randn(1, 6, 3, 3, 3)), model)
        with pytest.raises(RuntimeError, match="TorchScript"):  # the interpreter keeps the message to itself
            unsqueezed_(y)
        assert type(y) is not Tensor and y.shape == (1, 6, 6, 6, 6)
        assert y.unsqueeze_(0).shape == y.shape == (1, 1, 6, 6, 6, 6)
        y = inside(lambda: model[0](torch.randn(1, 6, 3, 3, 3)), model)
        weak = torch._C._WeakTensorRef(y)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="changes the shape"):
            y.unsqueeze_(0)
        assert not weak.expired() and (y + 1).shape == y.shape == (1, 6, 6, 6, 6)
        with pytest.raises(RuntimeError, match="changes the shape"):
            y.data = torch.ones(3)
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="changes the shape"):
            torch.mul(torch.ones(3), 2, out=y)


def test_a_held_result_and_another_subclass() -> None:
    class Other(Tensor):
        pass

    model = convt3d.fuse(nn.Sequential(up(), nn.ReLU()))
    with torch.no_grad():
        y = inside(lambda: model[0](torch.randn(1, 6, 3, 3, 3)), model)
        weak = torch._C._WeakTensorRef(y)  # type: ignore[attr-defined]
        assert type(y) is not Tensor and not weak.expired()
        assert type(y + torch.ones(1).as_subclass(Other)) is Other


def test_a_result_added_to_itself() -> None:
    """Where the plan has an add of another tensor next, as behind a flag."""

    class Doubles(nn.Module):
        flag = 0

        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = up(), nn.BatchNorm3d(6)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.norm(self.up(x))
            if self.flag == 0:
                return F.relu(y + skip)
            if self.flag == 1:
                return F.relu(y + y)
            y += y
            return F.relu(y)

    model = Doubles().eval()
    fused = convt3d.fuse(copy.deepcopy(model))
    assert convt3d.fuse_report(fused)["up"].fused == ("batch_norm", "add", "relu")
    x, skip = torch.randn(1, 6, 3, 3, 3), torch.randn(1, 6, 6, 6, 6)
    with torch.no_grad():
        for flag in (1, 2):
            model.flag = fused.flag = flag
            torch.testing.assert_close(fused(x, skip), model(x, skip), rtol=1e-4, atol=1e-5)


def test_a_step_in_place_that_fails_is_not_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory runs out, and the caller makes room and tries again."""

    class Retries(nn.Module):
        retry = False

        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = up(), nn.LeakyReLU(0.1, inplace=True)

        def forward(self, x: Tensor) -> Any:
            y = self.up(x)
            if self.retry:
                with pytest.raises(torch.OutOfMemoryError):
                    self.act(y)
                monkeypatch.setattr(_call, "conv_transpose3d", convt3d.conv_transpose3d)
            return self.act(y)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    model = Retries()
    x = torch.randn(1, 6, 3, 3, 3)
    with torch.no_grad():
        expected = model(x)
        convt3d.fuse(model).retry = True
        monkeypatch.setattr(_call, "conv_transpose3d", fail)
        torch.testing.assert_close(model(x), expected)


def test_modes_that_begin_behind_the_convolution_keep_what_they_see() -> None:
    class Keeps(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.kept.append(func(*args, **(kwargs or {})))
            return self.kept[-1]

    class Watches(Residual):
        flag = False

        def forward(self, x: Tensor) -> Any:
            y = self.up(x)
            if not self.flag:
                return F.relu(y)
            self.waited = type(y) is not Tensor
            with Keeps() as mode:
                F.relu(y)
            return [t.sum() for t in mode.kept]

    model = convt3d.fuse(Watches())
    model.flag = True
    x = torch.randn(1, 6, 3, 3, 3)
    with torch.no_grad():
        seen = model(x)
        assert model.waited
        torch.testing.assert_close(seen, convt3d.unfuse(model)(x))


def test_what_calls_a_part_gets_a_tensor() -> None:
    """Another module, or a function of that name: it may change the input before it looks at the result."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = nn.Sequential(up())

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.stage(x))

    class Derived(Stage):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = convt3d.fuse(Derived())

    def forward(x: Tensor) -> Any:
        return model.stage(x)

    x = torch.randn(1, 6, 3, 3, 3)
    chain = convt3d.fuse(nn.Sequential(nn.Sequential(up()), nn.ReLU()))
    with torch.inference_mode():
        for part in (model.stage, nn.Sequential(model.stage), forward, chain[0]):
            assert type(part(x)) is Tensor
        assert type(inside(lambda: model.stage(x), model)) is not Tensor
        assert type(inside(lambda: chain[0](x), chain)) is not Tensor


def test_threads_that_share_a_waiting_result() -> None:
    """Heads that a forward runs in threads."""

    class Heads(nn.Module):
        parallel = False

        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = up(), nn.BatchNorm3d(6)

        def forward(self, x: Tensor) -> Any:
            y = self.up(x)
            if not self.parallel:
                return F.relu(self.norm(y))
            self.waited = type(y) is not Tensor

            def head(number: int) -> Tensor:
                start.wait()
                with torch.no_grad():
                    return (y * 2, self.norm(y), F.relu(self.norm(y)), y + y)[number]

            return list(pool.map(head, range(4)))

    model = Heads().eval()
    fused = convt3d.fuse(copy.deepcopy(model))
    assert convt3d.fuse_report(fused)["up"].fused == ("batch_norm", "relu")
    model.parallel = fused.parallel = True
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        for _ in range(200):
            start = threading.Barrier(4)
            x = torch.randn(1, 6, 1, 2, 1)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
            assert fused.waited and not model.waited


def test_a_waiting_result_is_freed_with_its_inputs() -> None:
    model = convt3d.fuse(nn.Sequential(up(), nn.ReLU()))
    x = torch.randn(1, 6, 3, 3, 3)
    gone = weakref.ref(x)
    gc.disable()
    try:
        with torch.no_grad():
            given = [x]
            del x
            y = inside(lambda: model[0](given.pop()), model)
            assert gone() is not None
            y + 1
            assert gone() is None
    finally:
        gc.enable()
