# SPDX-License-Identifier: Apache-2.0
"""torch.func and forward-mode AD, values and tangents, against the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from convt3d import ModelNew, conv_transpose3d

GEOMETRY = {"stride": 2, "padding": 1, "output_padding": 1}


def ours(x: Tensor, w: Tensor, b: Tensor | None, add: Tensor) -> Tensor:
    return conv_transpose3d(x, w, b, **GEOMETRY, add=add, activation="x_hardswish")  # type: ignore[arg-type]


def theirs(x: Tensor, w: Tensor, b: Tensor | None, add: Tensor) -> Tensor:
    t = F.conv_transpose3d(x, w, b, **GEOMETRY) + add  # type: ignore[arg-type]
    return t * F.hardswish(t)


def direct(x: Tensor, w: Tensor, b: Tensor | None, add: Tensor) -> Tensor:
    """The operator itself, past the Python function."""
    return torch.ops.convt3d.conv_transpose3d(  # type: ignore[no-any-return]
        x, w, b, [2] * 3, [1] * 3, [1] * 3, 1, [1] * 3, add, "before", "x_hardswish", 0.01, "default"
    )


Function = Callable[[Tensor, Tensor, "Tensor | None", Tensor], Tensor]


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 3, 2, 2, 3), torch.randn(3, 2, 3, 3, 3), torch.randn(2)
    x, w, b = x.double(), w.double(), b.double()
    return x, w, b, torch.randn_like(theirs(x, w, b, torch.zeros(1).double()))


def scalar(f: Function) -> Callable[..., Tensor]:
    return lambda *a: f(*a).sin().sum()


Tensors4 = tuple[Tensor, Tensor, Tensor, Tensor]
Probe = Callable[[Function, Tensor, Tensor, Tensor, Tensor], object]

TRANSFORMS: dict[str, Probe] = {
    "grad": lambda f, x, w, b, a: grad(scalar(f), (0, 1, 2, 3))(x, w, b, a),
    "grad-of-grad": lambda f, x, w, b, a: grad(lambda x: grad(scalar(f))(x, w, b, a).square().sum())(x),
    "vjp": lambda f, x, w, b, a: vjp(f, x, w, b, a)[1](a),
    "jvp": lambda f, x, w, b, a: jvp(f, (x, w, b, a), (x.cos(), w.cos(), b.cos(), a.cos())),
    "vmap": lambda f, x, w, b, a: vmap(f, (0, None, None, 0))(x[:, None], w, b, a[:, None]),
    "vmap-unbatched": lambda f, x, w, b, a: vmap(f, (0, None, None, 0))(x, w, b, a),
    "vmap-weight": lambda f, x, w, b, a: vmap(f, (None, 0, None, None))(x, torch.stack([w, 2 * w]), b, a),
    "report-21-without-a-bias": lambda f, x, w, b, a: vmap(lambda x, w: f(x, w, None, a))(
        torch.stack([x, 2 * x]), torch.stack([w, 2 * w])
    ),
    "vmap-bias": lambda f, x, w, b, a: vmap(f, (None, None, 0, None))(x, w, torch.stack([b, 2 * b]), a),
    "per-sample-grad": lambda f, x, w, b, a: vmap(grad(scalar(f), 1), (0, None, None, 0))(
        x[:, None], w, b, a[:, None]
    ),
    "hessian": lambda f, x, w, b, a: hessian(lambda b: scalar(f)(x, w, b, a))(b),
    "jacfwd": lambda f, x, w, b, a: jacfwd(f, 2)(x, w, b, a),
    "jacrev": lambda f, x, w, b, a: jacrev(f, 2)(x, w, b, a),
}


@pytest.mark.parametrize("function", [ours, direct], ids=["function", "operator"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform: str, function: Function, tensors: Tensors4) -> None:
    probe = TRANSFORMS[transform]
    torch.testing.assert_close(probe(function, *tensors), probe(theirs, *tensors))


@pytest.mark.parametrize("function", [ours, direct], ids=["function", "operator"])
def test_forward_mode_tangents(function: Function, tensors: Tensors4) -> None:
    """A registered formula would return zero here, in silence."""
    x, w, b, add = tensors
    tangents = []
    for f in (function, theirs):
        with forward_ad.dual_level():
            out = f(forward_ad.make_dual(x, x.cos()), w, b, forward_ad.make_dual(add, add.sin()))
            tangents.append(forward_ad.unpack_dual(out).tangent)
    assert tangents[0] is not None and tangents[0].abs().max() > 0
    torch.testing.assert_close(tangents[0], tangents[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("transform", ["grad", "grad-of-grad", "jvp", "vmap", "per-sample-grad"])
def test_sixteen_bit_transforms(transform: str, dtype: torch.dtype, tensors: Tensors4) -> None:
    """In fp32 inside, rounded at the end: as good as the operands' own rounding allows."""
    # Away from the kinks of the activation, where a rounded pre-activation may have either slope.
    x, w, b, add = (t.to(dtype) for t in (0.1 * tensors[0], tensors[1], tensors[2] * 0.1, 0.1 * tensors[3]))
    probe = TRANSFORMS[transform]
    got = tree_leaves(probe(ours, x, w, b, add))
    true = tree_leaves(probe(theirs, x.double(), w.double(), b.double(), add.double()))
    for a, exact in zip(got, true, strict=True):
        assert a.dtype == dtype
        assert (a - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_explicit_tf32_under_transforms() -> None:
    """Rounded operands, gradients as if rounding were the identity, on both ways."""
    x, w = torch.randn(2, 3, 2, 2, 3), torch.randn(3, 2, 3, 3, 3)

    def call(x: Tensor) -> Tensor:
        return conv_transpose3d(x, w, precision="tf32")

    plain = call(x)
    torch.testing.assert_close(vmap(call)(x), plain, rtol=1e-6, atol=1e-6)
    leaf = x.clone().requires_grad_()
    call(leaf).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(grad(lambda x: call(x).sum())(x), leaf.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("transform", ["grad", "vmap", "per-sample-grad", "vjp"])
def test_compiled_transforms(transform: str, tensors: Tensors4) -> None:
    torch._dynamo.reset()
    probe = TRANSFORMS[transform]
    compiled = torch.compile(lambda *a: probe(ours, *a), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), probe(theirs, *tensors))


def test_functional_call_and_ensembles() -> None:
    models = [ModelNew(2, 3, 2, 2, 0, 0, (3, 1, 1, 1, 1)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    x, add = torch.randn(2, 2, 2, 2, 2), torch.randn(2, 3, 4, 4, 4)

    def one(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return functional_call(models[0], (p, b), (x, add))  # type: ignore[no-any-return]

    out = vmap(one)(parameters, buffers)
    for got, model in zip(out, models, strict=True):
        torch.testing.assert_close(got, model(x, add))


@pytest.mark.parametrize("activation", ["none", "x_hardswish"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("precision", [None, "ieee", "tf32"])
def test_batched_gradients(activation: str, batched: bool, precision: str | None) -> None:
    """torch.autograd's own vmap over cotangents, to second order."""
    x = torch.randn((1, 3, 2, 2, 3)[0 if batched else 1 :], requires_grad=True)
    leaves = [x, *(torch.randn(s, requires_grad=True) for s in ((3, 2, 3, 3, 3), (2,), (2, 1, 1, 1)))]
    x, w, b, add = leaves
    y = conv_transpose3d(x, w, b, 2, add=add, activation=activation, precision=precision)
    cotangents = torch.randn(3, *y.shape)
    for create_graph in (False, True):
        options = {"retain_graph": True, "create_graph": create_graph}
        got = torch.autograd.grad(y, leaves, cotangents, is_grads_batched=True, **options)
        expected = zip(*(torch.autograd.grad(y, leaves, c, **options) for c in cotangents), strict=True)
        for a, parts in zip(got, expected, strict=True):
            torch.testing.assert_close(a, torch.stack(parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian(strategy: str, tensors: Tensors4) -> None:
    jacobians = [
        torch.autograd.functional.jacobian(f, tensors, vectorize=True, strategy=strategy)
        for f in (ours, theirs)
    ]
    torch.testing.assert_close(*jacobians)
