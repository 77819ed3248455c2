# SPDX-License-Identifier: Apache-2.0
"""Gradients of every argument, to second order, and what is saved for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases import ACTIVATIONS, Case, Tensors
from convt3d import FusedConvTranspose3d, Model, ModelNew, conv_transpose3d

pytestmark = pytest.mark.usefixtures("one_thread")  # a few channels only

GEOMETRIES = {
    "k3s2": {"stride": 2, "padding": 1, "output_padding": 1},
    "k2s2": {"stride": 2},
    "groups": {"stride": 2, "padding": 1, "groups": 2},
    "dilated": {"stride": (1, 2, 1), "dilation": 2, "padding": 1},
    "output-padding-under-dilation": {"dilation": 2, "output_padding": 1},
    "no-tap-planes": {"stride": 3, "output_padding": 2},
}


def small(geometry: dict[str, Any], kernel: int = 2, seed: int = 0) -> tuple[list[Tensor], torch.Size]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x, w = draw(1, 2, 2, 2, 2), draw(2, 2 // geometry.get("groups", 1), kernel, 2, kernel)
    b = draw(2)
    return [x, w, b], F.conv_transpose3d(x, w, b, **geometry).shape


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradcheck_geometries(name: str) -> None:
    geometry = GEOMETRIES[name]
    tensors, shape = small(geometry, kernel=3 if name == "k3s2" else 2)
    tensors = [t.requires_grad_() for t in (*tensors, torch.randn(shape, dtype=torch.float64))]

    def call(x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> Tensor:
        return conv_transpose3d(x, w, b, **geometry, add=add, activation="silu")

    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_report_19_gradcheck_activations(activation: str, order: str) -> None:
    geometry = GEOMETRIES["k3s2"]
    tensors, shape = small(geometry, seed=3)
    add = torch.randn(shape[1], 1, shape[3], 1, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (*tensors, add)]

    def call(x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> Tensor:
        return conv_transpose3d(
            x, w, b, **geometry, add=add, add_order=order, activation=activation, negative_slope=0.2
        )

    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors, fast_mode=True)


def test_gradcheck_unbatched() -> None:
    tensors, _ = small({})
    x, w, b = (t.requires_grad_() for t in (tensors[0][0].detach(), *tensors[1:]))
    call: Callable[..., Tensor] = lambda x, w, b: conv_transpose3d(x, w, b, activation="gelu")  # noqa: E731
    assert gradcheck(call, (x, w, b))
    assert gradgradcheck(call, (x, w, b), fast_mode=True)


@pytest.mark.parametrize("add", [False, True])
def test_an_unbatched_result_may_be_changed_in_place(add: bool) -> None:
    layer = FusedConvTranspose3d(4, 3, 2, stride=2)
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    residual = torch.randn(3, 1, 4, 1, requires_grad=True) if add else None
    plain = F.conv_transpose3d(x, layer.weight, layer.bias, 2)
    expected = F.relu(plain if residual is None else plain + residual)
    out = F.relu(layer(x, residual), inplace=True)
    torch.testing.assert_close(out, expected)
    leaves = [t for t in (x, layer.weight, layer.bias, residual) if t is not None]
    for a, b in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_an_unbatched_call_refuses_a_batched_add() -> None:
    layer = FusedConvTranspose3d(4, 3, 2, stride=2)
    with pytest.raises(RuntimeError, match="add must have the output's shape"):
        layer(torch.randn(4, 3, 2, 2, requires_grad=True), torch.randn(1, 3, 6, 4, 4))


def test_gradcheck_complex() -> None:
    x = torch.randn(1, 2, 2, 2, 1, dtype=torch.complex128, requires_grad=True)
    w = torch.randn(2, 1, 2, 1, 2, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda x, w: conv_transpose3d(x, w, stride=2, activation="tanh"), (x, w))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kinks_are_the_installed_torchs(activation: str) -> None:
    """Pre-activations exactly on -3, 0 and 3."""
    points = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]).view(1, 1, 1, 1, 5)
    one = torch.ones(1, 1, 1, 1, 1)
    x = points.clone().requires_grad_()
    conv_transpose3d(x, one, activation=activation).sum().backward()
    t = points.clone().requires_grad_()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda t: t,
        "relu": F.relu,
        "leaky_relu": F.leaky_relu,
        "elu": F.elu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "hardswish": F.hardswish,
        "x_hardswish": lambda t: t * F.hardswish(t),
    }
    functions[activation](t).sum().backward()
    assert x.grad is not None and t.grad is not None
    torch.testing.assert_close(x.grad, t.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_against_float64(dtype: torch.dtype, channels_last: bool) -> None:
    case = Case(cin=8, cout=6, dtype=dtype, activation="x_hardswish", input_channels_last=channels_last)
    tensors = case.make().present()
    grad = torch.randn(case.output_shape()).to(dtype)
    ours = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().requires_grad_() for t in tensors]
    for leaves in (ours, exact):
        x, w, b, add = leaves
        out = conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="x_hardswish")
        out.backward(grad.to(out.dtype))
    for mine, true in zip(ours, exact, strict=True):
        assert mine.grad is not None and true.grad is not None
        assert mine.grad.dtype == dtype
        tolerance = max(torch.finfo(dtype).eps, 2e-6)
        assert (mine.grad - true.grad).abs().max() <= tolerance * true.grad.abs().max()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_only_wanted_gradients(wanted: tuple[int, ...]) -> None:
    case = Case(activation="hardswish", dtype=torch.float64)
    full = [t.requires_grad_() for t in case.make().present()]
    part = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(full)]
    for leaves in (full, part):
        x, w, b, add = leaves
        conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="hardswish").sum().backward()
    for i, (a, b_) in enumerate(zip(full, part, strict=True)):
        if i in wanted:
            torch.testing.assert_close(a.grad, b_.grad)
        else:
            assert b_.grad is None


@pytest.mark.parametrize("shape", [(1,), (6, 1, 1, 1), (2, 1, 5, 1, 9), (1, 6, 1, 7, 1), ()], ids=str)
@pytest.mark.parametrize("order", ["before", "after"])
def test_gradient_of_a_broadcast_add(shape: tuple[int, ...], order: str) -> None:
    case = replace(Case(dtype=torch.float64, output_padding=(0, 0, 0)), size=(3, 4, 5))
    t = case.make()
    add = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(case.output_shape(), dtype=torch.float64)
    out = conv_transpose3d(t.input, t.weight, t.bias, 2, 1, 0, add=add, add_order=order, activation="tanh")
    (ours,) = torch.autograd.grad((out * weights).sum(), add)
    conv = F.conv_transpose3d(t.input, t.weight, t.bias, 2, 1, 0)
    plain = (conv + add).tanh() if order == "before" else conv.tanh() + add
    (theirs,) = torch.autograd.grad((plain * weights).sum(), add)
    assert ours.shape == add.shape
    torch.testing.assert_close(ours, theirs)


def test_no_activation_saves_nothing_of_the_outputs_size() -> None:
    saved: list[Tensor] = []
    case = Case(activation="x_hardswish", bias=True)
    x, w, b, add = (t.requires_grad_() for t in case.make().present())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="x_hardswish")
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, w, b, add)}
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        conv_transpose3d(x, w, b, 2, 1, 1, add=add)
    assert add.data_ptr() not in {t.data_ptr() for t in saved}


@pytest.mark.parametrize(
    ("activation", "order", "wanted", "saved"),
    [
        ("none", "before", "xwba", "xw"),
        ("none", "before", "b", ""),
        ("none", "before", "a", ""),
        ("none", "before", "ba", ""),
        ("none", "before", "w", "xw"),
        ("tanh", "before", "a", "xwba"),
        ("tanh", "after", "a", ""),
        ("tanh", "after", "b", "xwb"),
        ("tanh", "after", "xwba", "xwb"),
    ],
)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_what_is_saved(activation: str, order: str, wanted: str, saved: str, batched: bool) -> None:
    """Nothing that no wanted gradient reads; what is not saved may change before the backward pass."""
    tensors = dict(zip("xwba", Case(dtype=torch.float64, batch=1).make().present(), strict=True))
    if not batched:
        tensors["x"], tensors["a"] = tensors["x"][0], tensors["a"][0]
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    leaves = [tensors[name] for name in wanted]
    x, w, b, a = tensors.values()
    t = F.conv_transpose3d(x, w, b, 2, 1, 1)
    t = t + a if order == "before" else t
    t = t.tanh() if activation == "tanh" else t
    plain = t if order == "before" else t + a
    weights = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weights).sum(), leaves)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        out = conv_transpose3d(x, w, b, 2, 1, 1, add=a, add_order=order, activation=activation)
    assert sorted(kept) == sorted(tensors[name].data_ptr() for name in saved)
    for name, tensor in tensors.items():
        if name not in saved:
            tensor.detach().zero_()
    for got, true in zip(torch.autograd.grad((out * weights).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(got, true)


def test_an_inference_tensor_where_it_is_not_saved() -> None:
    with torch.inference_mode():
        x = torch.randn(1, 2, 2, 2, 2)
    w, b = torch.randn(2, 3, 2, 2, 2), torch.zeros(3, requires_grad=True)
    conv_transpose3d(x, w, b).sum().backward()
    assert b.grad is not None and torch.equal(b.grad, torch.full((3,), 27.0))


def test_a_saved_input_that_was_changed_is_noticed() -> None:
    case = Case(activation="relu")
    x, w, b, add = (t.requires_grad_() for t in case.make().present())
    out = conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="relu")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_needs_retain_graph() -> None:
    x = torch.randn(1, 2, 2, 2, 2, requires_grad=True)
    out = conv_transpose3d(x, torch.randn(2, 2, 2, 2, 2), activation="gelu").sum()
    out.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    out.backward()
    torch.testing.assert_close(x.grad, 2 * first)


def test_checkpoint_anomaly_and_saved_tensor_hooks() -> None:
    from torch.utils.checkpoint import checkpoint

    case = Case(activation="silu")
    tensors = [t.requires_grad_() for t in case.make().present()]

    def call(x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> Tensor:
        return conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="silu").sum()

    expected = torch.autograd.grad(call(*tensors), tensors)
    checked = torch.autograd.grad(checkpoint(call, *tensors, use_reentrant=False), tensors)
    with torch.autograd.detect_anomaly(check_nan=True):
        watched = torch.autograd.grad(call(*tensors), tensors)
    with torch.autograd.graph.save_on_cpu():
        moved = torch.autograd.grad(call(*tensors), tensors)
    for others in (checked, watched, moved):
        for a, b in zip(expected, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_no_grad_and_inference_mode() -> None:
    case = Case(activation="silu")
    tensors = case.make()
    tensors.weight.requires_grad_()
    expected = case.call(tensors)
    assert expected.requires_grad
    with torch.no_grad():
        assert not case.call(tensors).requires_grad
    with torch.inference_mode():
        out = case.call(tensors)
        assert out.is_inference()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("precision", [None, "ieee"])
def test_compiled_backward_inside_autocast_keeps_the_forwards_types(precision: str | None) -> None:
    """A compiled graph calls the backward operator itself, under the autocast around ``backward()``."""
    case = Case(activation="tanh", precision=precision)
    compiled = torch.compile(case.call, backend="aot_eager")
    grads = []
    for enabled in (False, True):
        tensors = case.make()
        leaves = [t.requires_grad_() for t in tensors.present()]
        out = compiled(tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out.backward(torch.ones_like(out))
        grads.append([leaf.grad for leaf in leaves])
    for plain, under in zip(*grads, strict=True):
        assert plain is not None and under is not None
        assert torch.equal(plain, under)


def test_backward_on_the_meta_device() -> None:
    case = Case(activation="silu")
    leaves = [t.to("meta").requires_grad_() for t in case.make().present()]
    out = case.call(Tensors(*leaves))
    for leaf, grad in zip(leaves, torch.autograd.grad(out, leaves, torch.empty_like(out)), strict=True):
        assert grad.device.type == "meta" and grad.shape == leaf.shape and grad.stride() == leaf.stride()


def test_backward_inside_autocast_keeps_the_forwards_types() -> None:
    x = torch.randn(1, 4, 3, 3, 3, requires_grad=True)
    w = torch.randn(4, 4, 3, 3, 3, requires_grad=True)
    out = conv_transpose3d(x, w, activation="x_hardswish").sum()
    expected = torch.autograd.grad(out, (x, w), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(out, (x, w))
    for a, b in zip(expected, inside, strict=True):
        assert torch.equal(a, b)


def test_a_training_run_matches_the_reference() -> None:
    """Five optimiser steps: fresh weights are seen in every forward."""
    losses = []
    for cls in (Model, ModelNew):
        torch.manual_seed(0)
        model = cls(4, 6, 3, 2, 1, 1, (6, 1, 1, 1, 1))
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        run = []
        for step in range(5):
            torch.manual_seed(step)
            loss = model(torch.randn(2, 4, 3, 3, 3), torch.randn(2, 6, 6, 6, 6)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 5
