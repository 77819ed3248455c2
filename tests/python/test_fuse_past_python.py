# SPDX-License-Identifier: Apache-2.0
"""fuse() and code that gets at a waiting result past PyTorch's Python layer, or changes what no plan saw."""

from __future__ import annotations

import copy
import functools
import gc
import random
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
from fuse_nets import inside, up

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


class Leaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(y > 0)
        return F.leaky_relu(y, 0.1, inplace=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (positive,) = ctx.saved_tensors
        return torch.where(positive, grads[0], 0.1 * grads[0])


def doubled_by_a_helper(y: Tensor) -> Tensor:
    y *= 2
    return y


class ByHelper(Doubled):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return doubled_by_a_helper(y)


class Scaled(torch.autograd.Function):
    """In place, with a gradient for the scale alone or for both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(y.clone(), scale)
        ctx.mark_dirty(y)
        return y.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * y).sum()


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


# --- without gradients, where results wait -----------------------------------------------------------------


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
    model = convt3d.fuse(Net("function"))
    weak = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert type(model.up(torch.randn(1, 6, 3, 3, 3))) is Tensor  # its plan goes on outside
            y = inside(model, lambda: model.up(torch.randn(1, 6, 3, 3, 3)))
            other, y.tag = y, "kept"
            weak.append(weakref.ref(y))
            assert type(y) is not Tensor and y.shape == (1, 6, 6, 6, 6)
            assert y.add_(1) is y  # not planned
            assert type(y) is Tensor and other is y and y.tag == "kept" and weak[-1]() is y
            assert y.is_inference() == (mode is torch.inference_mode)
            z = inside(model, lambda: model.up(torch.randn(1, 6, 3, 3, 3)))
            assert F.relu_(z) is z and type(z) is Tensor  # planned
            del y, other, z
    assert [ref() for ref in weak] == [None, None]


def test_a_change_of_shape_past_python_is_refused() -> None:
    model = convt3d.fuse(Net("function"))

    @torch.jit.script
    def unsqueezed_(y: Tensor) -> Tensor:
        return y.unsqueeze_(0)

    with torch.no_grad():
        y = inside(model, lambda: model.up(torch.randn(1, 6, 3, 3, 3)))
        with pytest.raises(RuntimeError, match="TorchScript"):  # the interpreter keeps the message to itself
            unsqueezed_(y)
        assert type(y) is not Tensor and y.shape == (1, 6, 6, 6, 6)
        assert y.unsqueeze_(0).shape == y.shape == (1, 1, 6, 6, 6, 6)
        y = inside(model, lambda: model.up(torch.randn(1, 6, 3, 3, 3)))
        weak = torch._C._WeakTensorRef(y)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="beyond its values"):
            y.unsqueeze_(0)
        assert not weak.expired() and (y + 1).shape == y.shape == (1, 6, 6, 6, 6)


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

    class Watches(nn.Module):
        flag = False

        def __init__(self) -> None:
            super().__init__()
            self.up = up()

        def forward(self, x: Tensor) -> Any:
            y = self.up(x)
            if not self.flag:
                return F.relu(y)
            with Keeps() as mode:
                F.relu(y)
            return [t.sum() for t in mode.kept]

    model = convt3d.fuse(Watches())
    model.flag = True
    x = torch.randn(1, 6, 3, 3, 3)
    with torch.no_grad():
        seen = model(x)
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
    with torch.inference_mode():
        for part in (model.stage, nn.Sequential(model.stage), forward):
            assert type(part(x)) is Tensor
        assert type(inside(model, lambda: model.stage(x))) is not Tensor


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


def test_a_waiting_result_is_freed_with_its_inputs() -> None:
    model = convt3d.fuse(Net("function"))
    x = torch.randn(1, 6, 3, 3, 3)
    gone = weakref.ref(x)
    gc.disable()
    try:
        with torch.no_grad():
            given = [x]
            del x
            y = inside(model, lambda: model.up(given.pop()))
            assert gone() is not None
            y + 1
            assert gone() is None
    finally:
        gc.enable()
