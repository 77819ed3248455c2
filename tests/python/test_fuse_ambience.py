# SPDX-License-Identifier: Apache-2.0
"""A deferred call runs as it would have run where it was made, whatever has changed since."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from convt3d import _aten, fuse, unfuse
from convt3d._fuse import _ambience
from convt3d._fuse._pending import PendingTensor
from fuse_nets import Residual, assert_close, inputs, inside, up

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the capture of a CUDA graph ---------------------------------------------------------------------------


class Capture:
    """Stands for CUDA's capture of the current stream, which a machine without a GPU has not."""

    on = False

    def place(self, device: torch.device) -> _ambience.Place:
        return _ambience.Place((0, 0, 1), self.on)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    made = Capture()
    monkeypatch.setattr(_ambience, "current_place", made.place)
    return made


class InStage(nn.Module):
    """The plan leaves two of the modules around the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Sequential(nn.Identity(), up()))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.relu(self.stage(x) + skip)


@torch.no_grad()
def test_a_capture_that_ends_before_the_plan_does(capture: Capture, deferred: list[str]) -> None:
    model = fuse(InStage().eval())
    x, skip = inputs()
    capture.on = True
    model(x, skip)
    assert deferred == ["relu"]  # the whole model is captured as it runs
    for part in (model.stage, model.stage[0], model.stage[0][1]):  # type: ignore[index]
        assert type(part(x)) is Tensor  # what follows would come too late
    capture.on = False
    assert type(model.stage(x)) is Tensor
    assert isinstance(inside(lambda: model.stage(x), model), PendingTensor)


@pytest.mark.parametrize("before", [False, True])
@torch.no_grad()
def test_a_result_is_not_computed_on_the_other_side_of_a_capture(capture: Capture, before: bool) -> None:
    class Captures(Residual):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            capture.on = before
            y = self.up(x)
            capture.on = not before
            return self.act(y + skip)

    model = fuse(Captures())
    with pytest.raises(RuntimeError, match="inside the capture of a CUDA graph"):
        model(*inputs())
    unfuse(model)
    model(*inputs())


# --- PyTorch's switches ------------------------------------------------------------------------------------


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """What ATen's convolutions run under: the CPU's fp32 precision, and whether cuDNN is deterministic."""
    seen = []
    convolve, current = _aten._convolve, _ambience.current_switches

    def spy(*args: Any) -> Tensor:
        seen.append((torch.backends.mkldnn.conv.fp32_precision, torch.backends.cudnn.deterministic))
        return convolve(*args)

    monkeypatch.setattr(_aten, "_convolve", spy)
    # As on a GPU, with the CPU's precision in cuDNN's place.
    monkeypatch.setattr(_ambience, "current_switches", lambda _: (*current("cpu"), *current("cuda")[1:]))
    before = torch.backends.mkldnn.conv.fp32_precision
    yield seen
    torch.backends.mkldnn.conv.fp32_precision = before


@pytest.mark.parametrize("what", ["precision", "deterministic", "nothing"])
@torch.no_grad()
def test_switches_around_the_convolution_alone(
    what: str, switches: list[tuple[str, bool]], deferred: list[str]
) -> None:
    conv = torch.backends.mkldnn.conv

    class Switches(Residual):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            conv.fp32_precision = "bf16" if what == "precision" else "ieee"
            with torch.backends.cudnn.flags(enabled=True, deterministic=what == "deterministic"):
                y = self.up(x)
            conv.fp32_precision = "ieee"
            y = self.act(y + skip)
            assert conv.fp32_precision == "ieee" and not torch.backends.cudnn.deterministic
            return y

    model = Switches()
    wanted = model(*inputs())
    fuse(model)
    found = model(*inputs())
    assert switches == [("bf16" if what == "precision" else "ieee", what == "deterministic")]
    assert deferred == ["relu" if what == "nothing" else "none"]
    assert_close(found, wanted)


def test_switches_of_two_threads(switches: list[tuple[str, bool]]) -> None:
    """What the first sets for its own call is not what the second leaves behind."""
    noted, now = [("ieee", True, False, flag) for flag in (True, False)]
    inside, leave = threading.Event(), threading.Event()
    ran: list[bool] = []

    def first() -> None:
        with _ambience._switched(noted, now, "cpu"):
            inside.set()
            assert leave.wait(60)

    def second(seen: tuple[Any, ...]) -> None:
        with _ambience._switched((*noted[:2], True, True), seen, "cpu"):
            ran.append(torch.backends.cudnn.benchmark)

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False):
        threads = [threading.Thread(target=first)]
        threads[0].start()
        assert inside.wait(60)
        threads.append(threading.Thread(target=second, args=(_ambience.current_switches("cpu"),)))
        threads[1].start()
        time.sleep(0.05)
        assert not torch.backends.cudnn.benchmark  # it waits
        leave.set()
        for thread in threads:
            thread.join(60)
        assert ran == [True]
        assert not torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic


def test_the_tensors_device_is_asked_for_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = [0]
    c = types.SimpleNamespace(
        _cuda_getCurrentStream=lambda index: (7, index, 1),
        _cuda_getDevice=lambda: device[0],
        _cuda_isCurrentStreamCapturing=lambda: device[0] == 1,
    )

    @contextlib.contextmanager
    def on(index: int) -> Iterator[None]:
        device[0], before = index, device[0]
        yield
        device[0] = before

    monkeypatch.setattr(_ambience, "_C", c)
    monkeypatch.setattr(torch.cuda, "device", on)
    for current in (0, 1):
        device[0] = current
        for index in (0, 1):
            place = _ambience.current_place(torch.device("cuda", index))
            assert place == ((7, index, 1), index == 1) and device[0] == current


# --- checkpoints -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """What follows the convolution is in a checkpoint of its own, and is another thing in training."""

    def __init__(self, block: Callable[[Tensor, Tensor], Tensor], outer: bool) -> None:
        super().__init__()
        self.up = up()
        self.block = block
        self.outer = outer
        self.conv = nn.Conv3d(6, 6, 1)

    def inner(self, x: Tensor, skip: Tensor) -> Tensor:
        y = self.up(x)
        if not self.training:
            return self.conv(self.block(y, skip))
        return self.conv(checkpoint(self.block, y, skip, use_reentrant=False))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if not (self.outer and self.training):
            return self.inner(x, skip)
        out: Tensor = checkpoint(self.inner, x, skip, use_reentrant=False)
        return out


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout3d(0.5)

    def forward(self, t: Tensor, skip: Tensor) -> Tensor:
        return F.relu(self.drop(t))


class Twice(nn.Module):
    def forward(self, t: Tensor, skip: Tensor) -> Tensor:
        return F.relu(t) + t if self.training else F.relu(t)


class Sum(nn.Module):
    def forward(self, t: Tensor, skip: Tensor) -> Tensor:
        return F.relu(t + skip)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("block", [Dropped, Twice, Sum])
def test_checkpoint_behind_the_convolution(block: type[nn.Module], outer: bool) -> None:
    model = Checkpointed(block(), outer)
    results = []
    for fused in (False, True):
        if fused:
            fuse(model.eval())
            assert model.up.convt3d_plan  # type: ignore[truthy-function]
        model.train().zero_grad()
        torch.manual_seed(1)
        x, skip = inputs()
        x.requires_grad_()
        out = model(x, skip)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in model.parameters())])
    assert_close(results[1], results[0], 1e-5)


# --- transforms --------------------------------------------------------------------------------------------


def of_grad(y: Tensor, skip: Tensor) -> Any:
    return torch.func.grad(lambda s: F.relu(y + s).square().sum())(skip), y * 2


def of_vmap(y: Tensor, skip: Tensor) -> Any:
    return torch.func.vmap(lambda s: F.relu(y[0] + s))(skip), torch.func.vmap(torch.tanh)(y), y * 2


def of_jvp(y: Tensor, skip: Tensor) -> Any:
    return *torch.func.jvp(lambda s: F.relu(y + s), (skip,), (skip,)), y * 2


def of_nested(y: Tensor, skip: Tensor) -> Any:
    return torch.func.grad(lambda s: torch.func.vmap(lambda t: (y + t).square().sum())(s).sum())(skip), y * 2


def of_dual_level(y: Tensor, skip: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(F.relu(y + forward_ad.make_dual(skip, skip)))
        return *(t.clone() for t in dual), y * 2


@pytest.mark.parametrize("use", [of_grad, of_vmap, of_jvp, of_nested, of_dual_level])
def test_transform_that_begins_behind_the_convolution(use: Callable[[Tensor, Tensor], Any]) -> None:
    class Uses(Residual):
        use: Any = None

        def forward(self, x: Tensor, skip: Tensor) -> Any:
            y = self.up(x)
            return self.act(y + skip) if self.use is None else self.use(y, skip)

    model = Uses()
    results = []
    for fused in (False, True):
        if fused:
            model.use = None
            fuse(model)
            assert model.up.convt3d_plan  # type: ignore[truthy-function]
        model.use = use
        with torch.no_grad():  # inside, the transforms record what they need
            results.append(list(model(*inputs())))
    assert_close(results[1], results[0], 1e-5)
