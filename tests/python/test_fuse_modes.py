# SPDX-License-Identifier: Apache-2.0
"""A fused model under autocast, transforms, compilation and export, and what tracing it does and leaves."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import convt3d
from convt3d import FusedConvTranspose3d, fuse, fuse_report, unfuse
from convt3d._fuse import _module
from fuse_nets import (
    Chain,
    Residual,
    StereoLike,
    assert_close,
    calibrated,
    check_same,
    inputs,
    spiced,
    up,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip_dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_autocast_keeps_the_type(skip_dtype: torch.dtype, deferred: list[str]) -> None:
    x, skip = inputs()
    model = StereoLike()
    model.redir = nn.Identity()  # type: ignore[assignment]
    model = calibrated(model, x, skip)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x, skip.to(skip_dtype))
        fused = fuse(model)(x, skip.to(skip_dtype))
    # A bf16 result plus an fp32 skip is fp32: the add stays outside.
    assert fused.dtype == plain.dtype == skip_dtype
    assert deferred == (["none"] if skip_dtype == torch.float32 else ["relu"])
    exact = model.double()(x.double(), skip.to(skip_dtype).double())
    assert (fused - exact).square().mean() <= (plain - exact).square().mean()


def test_a_small_result_does_not_wait(deferred: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would lose more than the GPU gains: two passes over the result for each step."""
    x, skip = inputs()
    model = Residual()
    expected = model(x, skip)
    assert expected.shape[2:] == tuple(2 * n for n in x.shape[2:])
    fuse(model)
    steps = 2  # add, relu
    for least, wanted in ((steps * expected.nbytes + 1, []), (steps * expected.nbytes, ["relu"])):
        monkeypatch.setattr(_module, "WORTH_WAITING", least)
        with torch.no_grad():
            assert_close(model(x, skip), expected)
        assert deferred == wanted


def test_the_report_says_what_the_last_call_took_in() -> None:
    model = fuse(spiced(StereoLike()))
    last = lambda: fuse_report(model)["conv5.0"].last  # noqa: E731
    assert last() is None and "last call" not in str(fuse_report(model))
    with torch.no_grad():
        model.eval()(*inputs())
        assert last() == ("batch_norm", "add", "relu")
        model.train()(*inputs())
        assert last() == ()
    assert fuse_report(copy.deepcopy(model))["conv5.0"].last == ()
    model.eval()(*inputs())
    assert last() == ()
    model.redir = nn.Conv3d(6, 6, 1, dtype=torch.float64)  # type: ignore[assignment]
    with torch.no_grad():
        x, skip = inputs()
        model(x, skip.double())  # an add that promotes
    assert last() == ("batch_norm",)
    assert str(fuse_report(model)).endswith("; the last call took in batch_norm")
    fuse(model)
    assert last() is None


@torch.no_grad()
def test_a_dropout_is_no_step_to_wait_for(deferred: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval it takes no pass over the result."""
    model = nn.Sequential(nn.ConvTranspose3d(2, 3, 2, 2), nn.Dropout3d(), nn.ReLU()).eval()
    x = torch.randn(1, 2, 3, 3, 3)
    expected = model(x)
    fuse(model)
    for least, wanted in ((expected.nbytes + 1, []), (expected.nbytes, ["relu"])):
        monkeypatch.setattr(_module, "WORTH_WAITING", least)
        assert_close(model(x), expected)
        assert deferred == wanted


@torch.no_grad()
def test_autocast_that_ends_in_between() -> None:
    class Ends(Residual):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.up(x)
            return self.act(y + skip.bfloat16())

    model = Ends()
    plain = model(*inputs())
    fused = fuse(model, inputs())(*inputs())
    assert fused.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-2)


def test_no_grad_that_ends_in_between() -> None:
    class Ends(Residual):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.up(x)
            return self.act(y + skip)

    model = Ends()
    fuse(model, inputs())
    out = model(*inputs())
    assert not out.requires_grad
    unfuse(model)
    assert_close(out, model(*inputs()))


def test_inference_mode(deferred: list[str]) -> None:
    model = spiced(StereoLike()).eval()
    expected = model(*inputs())
    fuse(model)
    with torch.inference_mode():
        out = model(*inputs())
    assert out.is_inference() and deferred == ["relu"]
    assert_close(out, expected)


def test_vmap_and_grad_and_jvp() -> None:
    model = Residual()
    x, skip = inputs()
    xs, skips = torch.stack([x, -x]), torch.stack([skip, skip])
    loss: Callable[[Tensor, Tensor], Tensor] = lambda a, b: model(a, b).square().sum()  # noqa: E731
    wanted = [
        torch.func.vmap(model)(xs, skips),
        torch.func.grad(loss)(x, skip),
        *torch.func.jvp(model, (x, skip), (skip[:, :, :3, :4, :5], skip)),
    ]
    fuse(model)
    found = [
        torch.func.vmap(model)(xs, skips),
        torch.func.grad(loss)(x, skip),
        *torch.func.jvp(model, (x, skip), (skip[:, :, :3, :4, :5], skip)),
    ]
    assert_close(found, wanted, 1e-5)


def test_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    class Saves(Residual):
        reentrant = False

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.act(checkpoint(self.up, x, use_reentrant=self.reentrant) + skip)

    for reentrant in (False, True):
        model = Saves()
        model.reentrant = reentrant
        grads = []
        for step in (lambda m: m, lambda m: fuse(m, inputs())):
            step(model)
            x, skip = inputs()
            x.requires_grad_()
            model.zero_grad()
            model(x, skip).square().sum().backward()
            grads.append([x.grad, model.up.weight.grad])
        assert_close(grads[1], grads[0], 1e-5)


def test_fake_and_meta() -> None:
    model = fuse(Residual().to("meta"))
    out = model(*(t.to("meta") for t in inputs()))
    assert out.is_meta and out.shape == (2, 6, 6, 8, 10)
    model = fuse(Residual())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = model(*(mode.from_tensor(t) for t in inputs()))
    assert out.shape == (2, 6, 6, 8, 10)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_without_a_graph_break(training: bool) -> None:
    torch._dynamo.reset()
    model = spiced(StereoLike()).train(training)
    expected = copy.deepcopy(model)(*inputs())
    compiled = torch.compile(fuse(model), backend="aot_eager", fullgraph=True)
    assert_close(compiled(*inputs()), expected, 1e-5)


def test_fuse_after_compile_is_seen() -> None:
    torch._dynamo.reset()
    model = Residual()
    compiled = torch.compile(model, backend="aot_eager")
    expected = compiled(*inputs())
    fuse(compiled)  # type: ignore[type-var]
    assert isinstance(model.up, FusedConvTranspose3d)
    assert_close(compiled(*inputs()), expected)
    unfuse(compiled)  # type: ignore[type-var]
    assert_close(compiled(*inputs()), expected)


def test_export_and_symbolic_trace() -> None:
    model = fuse(spiced(StereoLike()).eval())
    expected = model(*inputs())
    program = torch.export.export(model, inputs())
    assert_close(program.module()(*inputs()), expected, 1e-5)
    assert_close(fx.symbolic_trace(model)(*inputs()), expected, 1e-5)


def test_graph_module_is_fused(deferred: list[str]) -> None:
    model = fx.symbolic_trace(spiced(StereoLike()).eval())
    assert check_same(model, inputs(), grads=False)["conv5.0"].fused == ("batch_norm", "add", "relu")
    assert "relu" in deferred


def test_wrong_input_is_refused_as_before() -> None:
    model = Residual()
    x, skip = inputs()
    bad = [(x[:, :4], skip), (x.double(), skip), (x[0, 0], skip), (x, skip[..., :-1])]
    errors = []
    for args in bad:
        with pytest.raises(RuntimeError) as caught:
            model(*args)
        errors.append(caught.type)
    fuse(model)
    for args, error in zip(bad, errors, strict=True):
        with pytest.raises(error):
            model(*args)


# --- tracing -----------------------------------------------------------------------------------------------


class Untraceable(nn.Module):
    """Control flow on values; keeps things on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()
        self.up = up()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm3d(6)
        self.calls = 0
        self.kept: Any = None

    def forward(self, x: Tensor, skip: Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        self.kept = x
        y = F.silu(self.norm(self.up(self.drop(x))) + skip)
        if x.sum() > 1e9:
            return y
        return {"out": [self.block(x, y) * scale]}


def test_parts_of_a_model_that_does_not_trace() -> None:
    model = spiced(Untraceable())
    report = check_same(model, inputs())
    assert report["block.up"].fused == ("add", "relu")
    assert report["up"].fused == () and "example_inputs" in report["up"].reason
    assert report.notes[0].startswith("the model does not trace: TraceError")


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_example_inputs_show_it(form: str, deferred: list[str]) -> None:
    x, skip = inputs()
    example: Any = (x, skip, 2.0) if form == "tuple" else {"x": x, "skip": skip}
    model = spiced(Untraceable())
    model.drop.eval()
    flags = {name: m.training for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    fuse(model, example)
    assert torch.equal(random_state, torch.get_rng_state())
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    unfuse(model)
    report = check_same(model, inputs(), example=example)
    assert report["up"].fused == ("batch_norm", "add", "silu")
    assert report["block.up"].fused == ("add", "relu")
    deferred.clear()
    with torch.no_grad():
        model.eval()(*inputs())
    assert deferred == ["silu", "relu"]


def test_tracing_leaves_nothing_behind() -> None:
    model = Untraceable()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    fuse(model)
    unfuse(model)
    assert model.calls == 0 and model.kept is None
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        for key, value in before[name].items():
            assert module.__dict__[key] is value


class Counting(dict[str, Any]):
    """Refuses what it has not seen before."""

    def __setitem__(self, key: str, value: Any) -> None:
        assert key not in self
        super().__setitem__(key, value)


PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "dict": (dict, lambda kept, y: kept.update(up=y)),
    "ordered": (collections.OrderedDict, lambda kept, y: kept.update(up=y)),
    "subclass": (Counting, lambda kept, y: kept.__setitem__("up", y)),
    "list": (list, lambda kept, y: kept.append(y)),
    "set": (set, lambda kept, y: kept.add(y)),
    "deque": (lambda: collections.deque(maxlen=2), lambda kept, y: kept.append(y)),
    "defaultdict": (lambda: collections.defaultdict(list), lambda kept, y: kept["up"].append(y)),
    "counter": (collections.Counter, lambda kept, y: kept.update({y: 1})),
    "nested": (lambda: {"all": ([], {"each": []})}, lambda kept, y: kept["all"][0].append(y)),
    "deep": (lambda: [({"each": {}},)], lambda kept, y: kept[0][0].update(up=y)),
}


class Keeps(nn.Module):
    """Grad-CAM's pattern: a feature map stays within reach, and gradients are asked of it."""

    def __init__(self, where: str, traced: bool = True) -> None:
        super().__init__()
        self.up = up()
        self.where, self.traced = where, traced
        self.clear()

    def clear(self) -> None:
        self.features: Any = None
        self.place: Any = PLACES[self.where][0]() if self.where in PLACES else None

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        y = self.up(x)
        if not self.traced and x.sum() > 1e9:
            return x
        if self.place is None:
            self.features = y
        else:
            PLACES[self.where][1](self.place, y)
        return F.relu(y + skip)

    def kept(self) -> Any:
        def leaves(item: Any) -> list[Any]:
            if isinstance(item, dict):
                return [*leaves(list(item.keys())), *leaves(list(item.values()))]
            if isinstance(item, (list, tuple, set, collections.deque)):
                return [leaf for part in item for leaf in leaves(part)]
            return [] if isinstance(item, (str, int)) or item is None else [item]

        return leaves([self.features, self.place])


@pytest.mark.parametrize("where", ["attribute", *PLACES])
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "watched"])
def test_a_result_that_a_module_keeps(where: str, traced: bool) -> None:
    model = Keeps(where, traced)
    place = model.place
    fuse(model, None if traced else inputs())
    assert fuse_report(model)["up"].fused == () and "2 times" in fuse_report(model)["up"].reason
    assert model.place is place
    if traced:
        assert model.kept() == [] and repr(place) == repr(Keeps(where).place)
    assert not any(isinstance(item, fx.Proxy) for item in model.kept())
    model.clear()
    out = model(*inputs())
    (found,) = torch.autograd.grad(out.square().sum(), model.kept()[0])
    model.clear()
    out = unfuse(model)(*inputs())
    (wanted,) = torch.autograd.grad(out.square().sum(), model.kept()[0])
    assert_close(found, wanted)


@torch.no_grad()
def renorm(t: Tensor) -> Tensor:
    t.data.mul_(2)
    return t


torch.fx.wrap("renorm")


def test_decorators_of_torch_do_not_vouch_for_what_they_wrap() -> None:
    class Renorm(Residual):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.up(x)
            renorm(x)
            return self.act(y + skip)

    entry = check_same(Renorm(), inputs(), grads=False)["up"]
    assert entry.fused == () and "changes in place" in entry.reason


def test_errors_of_the_example_run_are_the_models() -> None:
    model = Untraceable()
    with pytest.raises(RuntimeError, match="channels"):
        fuse(model, (torch.randn(1, 5, 2, 2, 2), torch.randn(1)))
    assert not nn.modules.module._global_forward_hooks
    unfuse(model)


@torch.no_grad()
def test_replaced_batch_norm_after_fuse() -> None:
    """A module swapped by the user: the plan is stale, the result right."""
    model = fuse(spiced(Chain(up(), nn.BatchNorm3d(6), nn.ReLU())).eval())
    model[1] = nn.GroupNorm(2, 6)
    fused = model(*inputs())
    assert_close(fused, unfuse(model)(*inputs()))


def test_a_result_that_is_returned_after_all() -> None:
    """The planned add does not come: the result computes itself when it is used."""

    class Returns(Residual):
        early = False

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            y = self.up(x)
            return y if self.early else self.act(y + skip)

    model = fuse(Returns())
    model.early = True
    x, skip = inputs()
    out = model(x, skip)
    assert out.shape == (2, 6, 6, 8, 10) and out.requires_grad
    wanted = unfuse(model)(x, skip)
    assert (out.detach().numpy() == wanted.detach().numpy()).all()
    assert_close(
        torch.autograd.grad(out.sum(), model.up.weight), torch.autograd.grad(wanted.sum(), model.up.weight)
    )
    assert "tensor(" in repr(out) and copy.deepcopy(out.detach()).equal(wanted.detach())
    buffer = io.BytesIO()
    torch.save(out.detach(), buffer)


def test_scripted_and_traced() -> None:
    model = Residual()
    model.extra = torch.jit.script(nn.Sequential(nn.ConvTranspose3d(6, 6, 2), nn.ReLU()))  # type: ignore[assignment]
    assert check_same(model, inputs(), grads=False)["up"].fused == ("add", "relu")
    assert len(fuse_report(model).entries) == 1
    del model.extra
    expected = model(*inputs())
    assert_close(torch.jit.trace(model, inputs(), check_trace=False)(*inputs()), expected)


def test_double_backward() -> None:
    model = fuse(spiced(StereoLike()).eval().double())
    x = torch.randn(1, 6, 1, 2, 1, dtype=torch.float64, requires_grad=True)
    skip = torch.randn(1, 6, 2, 4, 2, dtype=torch.float64, requires_grad=True)
    model.redir = nn.Identity()  # type: ignore[assignment]
    model.conv5.append(nn.Tanh())  # smooth, before the kink of relu
    fuse(model)
    assert torch.autograd.gradcheck(lambda a, b: model(a, b), (x, skip))
    (grad,) = torch.autograd.grad(model(x, skip).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    unfuse(model)
    (grad,) = torch.autograd.grad(model(x, skip).square().sum(), x, create_graph=True)
    assert_close([second], list(torch.autograd.grad(grad.square().sum(), x)), 1e-10)


def test_frozen_dataclasses_of_the_report() -> None:
    entry = convt3d.FuseEntry("up", True, ("add",), "then cat")
    assert str(entry) == "up: conv + add; then cat"
    assert convt3d.FuseReport((entry,)).replaced == (entry,)
