# SPDX-License-Identifier: Apache-2.0
"""convt3d::product: an explicit precision in derivatives of every kind and order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import NAMED, Case
from convt3d import conv_transpose3d
from convt3d._precision import round_to_tf32
from convt3d._product import _fake, _real
from test_functorch import TRANSFORMS, Function, Probe, theirs

# Far above what fp32 and far below what bf16 gives here, next to float64 (PyTorch in fp32: 1.5e-5).
TOLERANCE = 4e-5

product = torch.ops.convt3d.product


def explicit(x: Tensor, w: Tensor, b: Tensor | None, add: Tensor) -> Tensor:
    return conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="x_hardswish", precision="ieee")


def make(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = ((2, 3, 2, 2, 3), (3, 2, 3, 3, 3), (2,), (2, 2, 4, 4, 6))
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


class Spy(TorchDispatchMode):
    """Every operator, and what PyTorch's switch said at each convolution of ATen's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.switch: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        if "aten.conv" in str(func) or "aten._conv" in str(func):
            self.switch.append(torch.backends.mkldnn.conv.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def bf16_switch() -> Iterator[None]:
    """A switch that must not be followed."""
    conv = torch.backends.mkldnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "bf16"
    yield
    conv.fp32_precision = before


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, bf16_switch: None) -> None:
    """Values against float64, and no convolution that would read the switch."""
    probe = TRANSFORMS[transform]
    expected = probe(theirs, *make(torch.float64))
    with Spy() as spy:
        got = probe(explicit, *make())
    assert not spy.switch
    assert any("convt3d.product" in name for name in spy.seen)
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


def without_grad(f: Function, x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> object:
    def part(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = f(x, w, b, add)
        return (f(x, w, b, add) * constant).mean()

    return grad(part)(x)


NESTS: dict[str, Probe] = {
    "no_grad-inside": without_grad,
    "mixed-hessian": lambda f, x, w, b, add: hessian(
        lambda x, w: f(x[:1, :, :, :1, :1], w[:, :1], b[:1], add[:1, :1, :, :2, :2]).square().mean(), (0, 1)
    )(x, w),
    "jvp-of-grad": lambda f, x, w, b, add: jvp(
        grad(lambda x, w: f(x, w, b, add).square().mean(), (0, 1)), (x, w), (x.cos(), w.cos())
    ),
    "grad-of-jvp": lambda f, x, w, b, add: grad(
        lambda x, w: jvp(lambda w: f(x, w, b, add), (w,), (w.cos(),))[1].square().mean(), (0, 1)
    )(x, w),
    "jvp-of-jvp": lambda f, x, w, b, add: jvp(
        lambda x: jvp(lambda w: f(x, w, b, add), (w,), (w.cos(),)), (x,), (x.cos(),)
    ),
    "vmap-of-grad-of-vmap": lambda f, x, w, b, add: vmap(
        grad(lambda w, x: vmap(lambda x: f(x, w, b, add[0]))(torch.stack([x, x.cos()])).square().mean())
    )(torch.stack([w, w.sin()]), x),
}


@pytest.mark.parametrize("nest", NESTS)
def test_nested_transforms(nest: str) -> None:
    probe = NESTS[nest]
    with Spy() as spy:
        got = tree_leaves(probe(explicit, *make()))  # type: ignore[arg-type]
    assert not spy.switch
    for a, b in zip(got, tree_leaves(probe(theirs, *make(torch.float64))), strict=True):  # type: ignore[arg-type]
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_on_cuda_as_far_as_shapes_go(kind: str, precision: str) -> None:
    case = Case(groups=2)
    operands, size = operands_of(kind, case)
    with FakeTensorMode():
        a, b = (torch.empty_strided(t.shape, t.stride(), device="cuda") for t in operands)
        out = _real(a, b, kind, size, *geometry_of(case), precision)
        like = _fake(a, b, kind, size, *geometry_of(case), precision)
    assert (out.shape, out.stride(), out.device) == (like.shape, like.stride(), like.device)


@pytest.mark.parametrize("transform", ["grad", "vmap", "per-sample-grad", "vjp", "hessian"])
def test_compiled_transforms(transform: str, bf16_switch: None) -> None:
    torch._dynamo.reset()
    probe = TRANSFORMS[transform]
    graphs: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.extend(str(node.target) for node in graph.graph.nodes)
        return torch._functorch.compilers.nop(graph, _)  # type: ignore[no-any-return]

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=compiler)
    compiled = torch.compile(lambda *a: probe(explicit, *a), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*make()), probe(explicit, *make()))
    assert any("convt3d.product" in name for name in graphs)
    assert not any("aten.conv" in name for name in graphs)


def test_double_backward(bf16_switch: None) -> None:
    gradients = []
    for function, dtype in ((explicit, torch.float32), (theirs, torch.float64)):
        leaves = [t.requires_grad_() for t in make(dtype)]
        with Spy() as spy:
            first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        gradients.append((*first, *second))
        if function is explicit:
            assert not spy.switch
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_switch_is_held(kind: str, precision: str, bf16_switch: None) -> None:
    operands, size = operands_of(kind, Case())
    with Spy() as spy:
        _real(*operands, kind, size, *GEOMETRY, precision)
    assert spy.switch == ["ieee"]
    assert torch.backends.mkldnn.conv.fp32_precision == "bf16"


GEOMETRY = ([2] * 3, [1] * 3, [1] * 3, 1, [1] * 3)


def operands_of(
    kind: str, case: Case, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor], list[int]]:
    t = case.make()
    grad_output = torch.randn(case.output_shape())
    operands, like = {
        "output": ((t.input, t.weight), grad_output),
        "input": ((grad_output, t.weight), t.input),
        "weight": ((t.input, grad_output), t.weight),
    }[kind]
    return (operands[0].to(dtype), operands[1].to(dtype)), list(like.shape[2:])


def geometry_of(case: Case) -> tuple[Any, ...]:
    return (
        list(case.stride), list(case.padding), list(case.output_padding), case.groups, list(case.dilation)
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_gradcheck(kind: str, case: Case) -> None:
    (a, b), size = operands_of(kind, case, torch.float64)

    def call(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b, kind, size, *geometry_of(case), "ieee")  # type: ignore[no-any-return]

    leaves = (a.requires_grad_(), b.requires_grad_())
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [(0, None), (None, 1), (1, 0), (5, 5)], ids=str)
def test_vmap(kind: str, groups: int, dims: tuple[int | None, int | None]) -> None:
    case = Case(groups=groups)
    (a, b), size = operands_of(kind, case, torch.float64)

    def call(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b, kind, size, *geometry_of(case), "ieee")  # type: ignore[no-any-return]

    mapped = [
        t if dim is None else torch.stack([t, 2 * t, t.cos()], dim)
        for t, dim in zip((a, b), dims, strict=True)
    ]
    parts = [
        call(*(t if dim is None else t.select(dim, i) for t, dim in zip(mapped, dims, strict=True)))
        for i in range(3)
    ]
    torch.testing.assert_close(vmap(call, dims)(*mapped), torch.stack(parts))


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_opcheck(kind: str, channels_last: bool, precision: str) -> None:
    (a, b), size = operands_of(kind, Case(groups=2, input_channels_last=channels_last))
    for t in (a, b):
        t.requires_grad_()
    torch.library.opcheck(product.default, (a, b, kind, size, *geometry_of(Case(groups=2)), precision))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_values_on_a_gpu_whose_switch_says_otherwise(kind: str, channels_last: bool) -> None:
    case = Case(cin=32, cout=32, input_channels_last=channels_last)
    operands, size = operands_of(kind, case)
    a, b = (t.cuda() for t in operands)
    exact = product(a.double(), b.double(), kind, size, *geometry_of(case), "ieee")
    errors = {}
    for setting, precision in (("tf32", "ieee"), ("ieee", "tf32")):
        torch.backends.cudnn.conv.fp32_precision = setting
        out = product(a, b, kind, size, *geometry_of(case), precision)
        like = _fake(a, b, kind, size, *geometry_of(case), precision)
        assert out.stride() == like.stride()
        errors[precision] = ((out - exact).abs().max() / exact.abs().max()).item()
    assert errors["ieee"] < TOLERANCE and errors["tf32"] < 4e-3


def test_backward_through_forward_mode() -> None:
    """At one level: a tangent that is differentiated in reverse."""
    tangents = []
    for function, dtype in ((explicit, torch.float32), (theirs, torch.float64)):
        x, w, b, add = make(dtype)
        w.requires_grad_()
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos()), w, b, add)).tangent
            assert tangent is not None
            tangents.append(torch.autograd.grad(tangent.square().mean(), w)[0])
    assert (tangents[0] - tangents[1]).abs().max() <= TOLERANCE * tangents[1].abs().max()


def test_empty_batch() -> None:
    w = torch.randn(2, 3, 2, 2, 2, requires_grad=True)
    x = torch.randn(0, 2, 3, 3, 3, requires_grad=True)
    out = conv_transpose3d(x, w, precision="ieee")
    grads = torch.autograd.grad(out.sum(), (x, w), create_graph=True)
    assert [g.shape for g in grads] == [x.shape, w.shape]
    assert not grads[1].any()


def test_tf32_is_the_same_arithmetic_however_gradients_are_asked_for() -> None:
    """Also of the output's gradient, which is an operand as well."""
    x, w = torch.randn(1, 16, 3, 3, 3), torch.randn(16, 8, 3, 3, 3)
    cotangent = torch.randn(1, 8, 5, 5, 5)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (conv_transpose3d(x, w, precision="tf32") * cotangent).sum()

    leaves = (x.clone().requires_grad_(), w.clone().requires_grad_())
    exact = [round_to_tf32(t).double().requires_grad_() for t in (x, w)]
    true = torch.autograd.grad(conv_transpose3d(*exact), exact, round_to_tf32(cotangent).double())
    ways = [
        torch.autograd.grad(loss(*leaves), leaves),
        torch.autograd.grad(loss(*leaves), leaves, create_graph=True),
        grad(loss, (0, 1))(x, w),
        jacrev(loss, (0, 1))(x, w),
    ]
    for got in ways:
        for a, b in zip(got, true, strict=True):
            assert (a - b).abs().max() <= 2e-6 * b.abs().max()
