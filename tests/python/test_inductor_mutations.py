# SPDX-License-Identifier: Apache-2.0
"""enable_inductor: what is changed in place, in whatever way, is read with the value that it had before."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from convt3d._fuse import _plan
from convt3d._fuse._mutations import changed_operands
from convt3d._inductor_pass import fuse_graph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    """``function`` through Dynamo and the pass, run as it stands; results, and the calls made by graph."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.fused: list[int] = []

        def backend(module: fx.GraphModule, examples: Any) -> Any:
            self.fused.append(fuse_graph(module.graph, ("cpu",)))
            module.recompile()
            return module.forward

        self.out = torch.compile(function, backend=backend, dynamic=False)(*args)


def _conv(seed: int = 0) -> nn.ConvTranspose3d:
    torch.manual_seed(seed)
    return nn.ConvTranspose3d(4, 4, 2, 2).requires_grad_(False)


A, B = _conv(1), _conv(2)


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(2, 4, 3, 3, 3, generator=generator),
        torch.randn(2, 4, 6, 6, 6, generator=generator),
    )


def check(function: Callable[[Tensor, Tensor], Any]) -> list[int]:
    """Compares results, and what becomes of the inputs, with eager."""
    mine, theirs = _inputs(), _inputs()
    expected = function(*theirs)
    torch._dynamo.reset()
    run = Run(function, *mine)
    for ours, eager in zip(tree_leaves((run.out, mine)), tree_leaves((expected, theirs)), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    return run.fused


# --- behind the first fusion -------------------------------------------------------------------------------


def _decoder(x: Tensor, s: Tensor) -> Any:
    r = F.relu(A(x) + s)
    y = B(r)
    h = F.silu(r, inplace=True)
    return F.relu(y), h


def _input_times(x: Tensor, s: Tensor) -> Any:
    r = F.relu(A(x) + s)
    y = B(r)
    r.add_(s)
    return torch.tanh(y), r


def _skip_zeroed(x: Tensor, s: Tensor) -> Any:
    r = F.relu(A(x))
    q = B(x) + r
    r.zero_()
    return F.relu(q), r


def _view_of_cat(x: Tensor, s: Tensor) -> Any:
    r = torch.cat([A(x), s], 1)
    y = B(r[:, :4])
    r.zero_()
    return F.relu(y), r


def _sum_scaled(x: Tensor, s: Tensor) -> Any:
    a = F.relu(A(x) + s)
    t = B(x) + a
    a.mul_(3)
    return a, F.relu(t)


@pytest.mark.parametrize(
    ("function", "fused"),
    [(_decoder, 1), (_input_times, 1), (_skip_zeroed, 2), (_view_of_cat, 1), (_sum_scaled, 2)],
)
def test_results_of_a_fused_call_change(function: Callable[[Tensor, Tensor], Any], fused: int) -> None:
    assert check(function) == [fused]


# --- the ways of changing a tensor -------------------------------------------------------------------------

_library = torch.library.Library("convt3d_test_mutations", "DEF")
_library.define("bump(Tensor(a!) x) -> ()")
_library.impl("bump", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
_library.impl("bump", lambda x: None, "Meta")


@torch.compiler.allow_in_graph
def _opaque(t: Tensor) -> Tensor:
    t.add_(1)
    return t.sum()


@torch.compiler.allow_in_graph
@torch.no_grad()
def _decorated(t: Tensor) -> Tensor:
    t.data.mul_(2)
    return t


def _checkpointed(x: Tensor) -> Tensor:
    out: Tensor = checkpoint.checkpoint(lambda t: t.add_(1).sum(), x, use_reentrant=False)
    return out


def _statistics(x: Tensor) -> Tensor:
    return F.instance_norm(torch.ones(2, 4, 2, 2, 2), x[0, :, 0, 0, 0], x[1, :, 0, 0, 0])


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "relu6": lambda x: F.relu6(x, True),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.1, True),
    "celu": lambda x: F.celu(x, 2.0, True),
    "selu": lambda x: F.selu(x, True),
    "elu-alpha": lambda x: F.elu(x, 3.0, True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.1, False, True),
    "mish": lambda x: F.mish(x, True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, True),
    "dropout1d": lambda x: F.dropout1d(x.view(2, 4, 27), 1.0, True, True),
    "feature-alpha-dropout": lambda x: F.feature_alpha_dropout(x, 1.0, True, True),
    "module": nn.ReLU6(inplace=True),
    "packet": lambda x: torch.ops.convt3d_test_mutations.bump(x),
    "aten-packet": lambda x: torch.ops.aten.mul_(x, 2),
    "checkpoint": _checkpointed,
    "allow-in-graph": _opaque,
    "data-in-graph": _decorated,
    "data": lambda x: x.data.mul_(2),
    "isub": lambda x: x.__isub__(1),
    "ipow": lambda x: x.__ipow__(2),
    "setitem": lambda x: torch.Tensor.__setitem__(x, 0, 1.0),
    "normalize-out": lambda x: F.normalize(x, 2.0, 1, 1e-12, x),
    "instance-norm": _statistics,
    "batch-norm": lambda x: torch.batch_norm(
        x * 2, None, None, x[0, :, 0, 0, 0], x[1, :, 0, 0, 0], True, 0.5, 1e-5, False
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_input_changes_behind_the_convolution(change: Callable[[Tensor], Any]) -> None:
    def function(x: Tensor, s: Tensor) -> Tensor:
        y = A(x)
        change(x)
        return torch.relu(y + s)

    assert sum(check(function)) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_tensors_that_are_made_to_share_memory(which: int) -> None:
    def function(x: Tensor, s: Tensor) -> Tensor:
        pair = x * 1, x * 2
        pair[0].set_(pair[1])
        y = A(pair[which])
        pair[1 - which].zero_()
        return F.relu(y)

    assert check(function) == [0]


@pytest.mark.parametrize("hidden", [False, True])
def test_changes_that_only_tracing_has_counted(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the analysis of the graph switched off."""
    if hidden:
        monkeypatch.setattr(_plan, "changed_operands", lambda node, module: [])

    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        F.relu6(s, True)
        return F.relu(A(x) + s), F.relu(B(x))

    assert check(function) == [1 if hidden else 2]


# --- nodes of graphs ---------------------------------------------------------------------------------------


def _elsewhere(x: Any) -> Any:
    return x


@functools.wraps(torch.sum)
def _in_disguise(x: Any) -> Any:
    return x


class _Dirty(torch.autograd.Function):
    pass


def _changed(target: Any, args: Any, **kwargs: Any) -> str:
    """The names of what a call of ``target`` changes; x, y, m and v in the arguments become nodes."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "xymv"}

    def put(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(put, value))
        return {k: put(v) for k, v in value.items()} if isinstance(value, dict) else nodes.get(value, value)

    make = graph.call_method if isinstance(target, str) else graph.call_function
    return "".join(n.name for n in changed_operands(make(target, put(args), put(kwargs)), None))


CALLS: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("xy", triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"a": "x", "b": "y"}}),
    ("xy", _elsewhere, (["x", "y"],), {}),
    ("x", _in_disguise, ("x",), {}),
    ("x", torch.no_grad()(_elsewhere), ("x",), {}),
    ("x", torch.no_grad()(_in_disguise), ("x",), {}),
    ("x", torch.no_grad()(functools.partial(_elsewhere)), ("x",), {}),
    ("", torch.no_grad()(F.relu), ("x",), {}),
    ("x", _Dirty.apply, ("x",), {}),
    ("x", "unheard_of", ("x",), {}),
    ("xy", torch.distributed.all_reduce, ("x", "y"), {}),
    ("x", torch.ops.aten.mul_, ("x", "y"), {}),
    ("", torch.ops.aten.mul, ("x", "y"), {}),
    ("m", torch.ops.aten.add, ("x", "y"), {"out": "m"}),
    ("mv", torch.max, ("x", 1), {"out": ("m", "v")}),
    ("xy", torch._foreach_add_, (["x", "y"], 1), {}),
    ("mv", F.batch_norm, ("x", "m", "v", None, None, True), {}),
    ("", F.batch_norm, ("x", "m", "v"), {}),
    ("mv", F.instance_norm, ("x",), {"running_mean": "m", "running_var": "v"}),
    ("", F.instance_norm, ("x", "m", "v", None, None, False), {}),
    ("mv", torch.ops.aten.native_batch_norm.default, ("x", None, None, "m", "v", True, 0.1, 1e-5), {}),
    ("", torch.batch_norm, ("x", None, None, "m", "v", False, 0.1, 1e-5, True), {}),
    ("y", F.embedding, ("x", "y", None, 1.0), {}),
    ("", F.embedding, ("x", "y"), {}),
    ("x", F.leaky_relu, ("x", 0.1, True), {}),
    ("", F.leaky_relu, ("x", 0.1), {}),
    ("", F.interpolate, ("x",), {"scale_factor": 2}),
    ("", F.max_pool3d, ("x", 2), {}),
    ("", F.gelu, ("x",), {}),
    ("", "view", ("x", -1), {}),
    ("", "__and__", ("x", "y"), {}),
    ("", torch.conv_transpose3d, ("x", "y", None, 2), {}),
    ("", torch.Tensor.add, ("x", "y"), {}),
    ("x", torch.Tensor.add_, ("x", "y"), {}),
    ("", torch.Tensor.T.__get__, ("x",), {}),
    ("x", torch.Tensor.data.__set__, ("x", "y"), {}),
    ("", getattr, ("x", "shape"), {}),
    ("x", setattr, ("x", "data", "y"), {}),
]


@pytest.mark.parametrize(("expected", "target", "args", "kwargs"), CALLS)
def test_what_a_call_changes(
    expected: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert _changed(target, args, **kwargs) == expected


def test_a_kernel_of_the_user_in_between() -> None:
    for where in ("before", "between", "behind"):
        graph = fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        kernel = functools.partial(
            graph.call_function, triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"x_ptr": x}}
        )
        if where == "before":
            kernel()
        conv = graph.call_function(torch.conv_transpose3d, (x, w, None, 2))
        if where == "between":
            kernel()
        relu = graph.call_function(F.relu, (conv,))
        if where == "behind":
            kernel()
        graph.output((relu, x))
        with FakeTensorMode():
            x.meta["example_value"] = torch.empty(2, 4, 3, 3, 3)
            w.meta["example_value"] = torch.empty(4, 4, 2, 2, 2)
            conv.meta["example_value"] = relu.meta["example_value"] = torch.empty(2, 4, 6, 6, 6)
        assert fuse_graph(graph, ("cpu",)) == (where != "between")


# --- ordinary networks -------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A stage of a U-Net: convolution, norm and an activation in place, twice."""

    def __init__(self, cin: int, cout: int, norm: type[nn.Module], act: nn.Module, stride: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(cin, cout, 3, stride, 1), norm(cout, affine=True), act,
            nn.Conv3d(cout, cout, 3, 1, 1), norm(cout, affine=True), act,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class UNet(nn.Module):
    def __init__(self, norm: type[nn.Module], act: nn.Module, join: str, checkpointed: bool = False) -> None:
        super().__init__()
        widths = (2, 4, 6)
        pairs = list(itertools.pairwise(widths))
        self.first = Stage(1, widths[0], norm, act)
        self.down = nn.ModuleList(Stage(a, b, norm, act, 2) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs))
        factor = 2 if join == "cat" else 1
        self.decode = nn.ModuleList(Stage(factor * a, a, norm, act) for a, _ in reversed(pairs))
        self.join, self.act, self.checkpointed = join, act, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for stage in self.down:
            run = functools.partial(checkpoint.checkpoint, stage, use_reentrant=False)
            skips.append(run(skips[-1]) if self.checkpointed else stage(skips[-1]))
        y = skips.pop()
        for up, stage in zip(self.up, self.decode, strict=True):
            y, skip = up(y), skips.pop()
            y = stage(torch.cat([y, skip], 1) if self.join == "cat" else self.act(y + skip))
        return y


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("join", ["cat", "add"])
@pytest.mark.parametrize(
    ("norm", "act", "checkpointed"),
    [
        (nn.InstanceNorm3d, nn.LeakyReLU(inplace=True), False),
        (nn.InstanceNorm3d, nn.LeakyReLU(inplace=True), True),
        (nn.BatchNorm3d, nn.ReLU(inplace=True), False),
    ],
)
def test_u_nets_are_fused(
    norm: type[nn.Module], act: nn.Module, checkpointed: bool, join: str, training: bool
) -> None:
    torch.manual_seed(0)
    model = UNet(norm, act, join, checkpointed).train(training)
    x = torch.randn(1, 1, 8, 8, 8)
    run = Run(model, x)
    torch.testing.assert_close(run.out, model(x), rtol=1e-4, atol=1e-5)
    assert run.fused == [2]


@pytest.mark.parametrize(("name", "fused"), [("PlainConvUNet", 2), ("SegResNet", 2), ("DynUNet", 2)])
def test_published_networks_are_fused(name: str, fused: int) -> None:
    if name == "PlainConvUNet":
        nets = pytest.importorskip("dynamic_network_architectures.architectures.unet")
        make = functools.partial(
            nets.PlainConvUNet, 1, 3, [4, 8, 16], nn.Conv3d, 3, [1, 2, 2], 1, 2, 1, True, nn.InstanceNorm3d,
            {"affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
        )  # fmt: skip
    else:
        nets = pytest.importorskip("monai.networks.nets")
        arguments: dict[str, dict[str, Any]] = {
            "SegResNet": {
                "init_filters": 8, "out_channels": 2, "blocks_down": (1, 1, 1), "blocks_up": (1, 1),
                "upsample_mode": "deconv",
            },
            "DynUNet": {
                "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "kernel_size": [3] * 3,
                "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 16],
            },
        }  # fmt: skip
        make = functools.partial(getattr(nets, name), **arguments[name])
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(1, 1, 16, 16, 16)
    with torch.inference_mode():
        run = Run(model, x)
        torch.testing.assert_close(run.out, model(x), rtol=1e-4, atol=1e-5)
    assert run.fused == [fused]
