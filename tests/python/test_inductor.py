# SPDX-License-Identifier: Apache-2.0
"""enable_inductor: the fusion inside torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode

import convt3d
from convt3d import _inductor_pass
from fuse_nets import LocalNetLike, Residual, StereoLike, Tail, assert_close, calibrated, inputs, spiced
from toolchain import needs_python_headers

FORWARD, CAT = "convt3d.conv_transpose3d.default", "convt3d.conv_transpose3d_cat.default"


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    torch._dynamo.reset()
    convt3d.enable_inductor(("cpu",))
    yield
    convt3d.disable_inductor()
    assert config.pre_grad_custom_pass is None
    torch._dynamo.reset()


class Compiled:
    """``model`` compiled as Inductor does it up to autograd: the pass, then AOT autograd; and the graphs."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.graphs: list[fx.Graph] = []

        def backend(module: fx.GraphModule, examples: Any) -> Any:
            from torch._dynamo.backends.debugging import aot_eager

            config.pre_grad_custom_pass(module.graph)
            module.recompile()
            self.graphs.append(module.graph)
            return aot_eager(module, examples)

        self.call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False, **options)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    @property
    def operators(self) -> list[str]:
        """Ours, and what else is called."""
        names = []
        for graph in self.graphs:
            for node in graph.nodes:
                if node.op == "call_function":
                    ours = isinstance(node.target, torch._ops.OpOverload)
                    names.append(str(node.target) if ours else node.target.__name__)
                elif node.op == "call_method":
                    names.append(str(node.target))
        return names


def check(model: nn.Module, *args: Tensor, tolerance: float = 1e-6) -> list[str]:
    """Compares outputs and, in training, gradients with eager; returns what the compiled graphs call."""
    compiled = Compiled(model)
    with torch.no_grad():
        assert_close(compiled(*args), copy.deepcopy(model)(*args), tolerance)
    operators = compiled.operators
    twin = copy.deepcopy(model)
    grads = []
    for net, run in ((model, Compiled(model)), (twin, twin)):
        leaves = [a.clone().requires_grad_() for a in args]
        out = run(*(leaf * 1 for leaf in leaves))
        out = sum(o.square().sum() for o in (out if isinstance(out, tuple) else (out,)))
        parameters = [p for p in net.parameters() if p.requires_grad]
        grads.append(torch.autograd.grad(out, [*leaves, *parameters], allow_unused=True))
    assert_close([g for g in grads[0] if g is not None], [g for g in grads[1] if g is not None], 1e-4)
    return operators


TAKEN: list[tuple[str, Callable[[Tensor, Tensor], Any], list[str]]] = [
    ("add", lambda t, s: t + s, [FORWARD]),
    ("add-in-place", lambda t, s: t.add_(s), [FORWARD]),
    ("iadd-relu", lambda t, s: F.relu(t.__iadd__(s), inplace=True), [FORWARD]),
    ("other-first", lambda t, s: torch.add(s, t), [FORWARD]),
    ("broadcast", lambda t, s: t + s[:1, :, :1, :1, :1], ["getitem", FORWARD]),
    ("relu", lambda t, s: t.relu(), [FORWARD]),
    ("leaky", lambda t, s: F.leaky_relu(t, 0.2), [FORWARD]),
    ("elu-add", lambda t, s: F.elu(t) + s, [FORWARD]),
    ("gelu", lambda t, s: F.gelu(t), [FORWARD]),
    ("gelu-tanh", lambda t, s: F.gelu(t + s, approximate="tanh"), [FORWARD]),
    ("silu", lambda t, s: F.silu(s + t), [FORWARD]),
    ("sigmoid", lambda t, s: torch.sigmoid(t), [FORWARD]),
    ("tanh", lambda t, s: t.tanh_(), [FORWARD]),
    ("hardswish", lambda t, s: F.hardswish(t), [FORWARD]),
    ("cat", lambda t, s: torch.cat([t, s], 1), [CAT]),
    ("relu-cat", lambda t, s: torch.cat([s, F.relu(t)], dim=1), [CAT]),
    ("behind-the-end", lambda t, s: F.relu(t + s).mean((2, 3, 4)), [FORWARD, "mean"]),
    ("dropout-in-eval", lambda t, s: F.relu(F.dropout3d(t, 0.5, False)), [FORWARD]),
]


@pytest.mark.parametrize(("tail", "calls"), [case[1:] for case in TAKEN], ids=[case[0] for case in TAKEN])
def test_taken_in(tail: Callable[[Tensor, Tensor], Any], calls: list[str]) -> None:
    assert [n for n in check(Tail(tail), *inputs()) if n != "mul"] == calls


def test_gated_by_itself() -> None:
    def tail(t: Tensor, s: Tensor) -> Tensor:
        t = t + s
        return t * F.hardswish(t)

    assert check(Tail(tail), *inputs()) == [FORWARD]


def _other_user(t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return F.relu(t), t.sum()


def _changed(t: Tensor, s: Tensor) -> Tensor:
    s = s * 1
    r = F.relu(t)
    s.mul_(2)
    return r + s


def _skip_changed_behind(t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    s = s * 1
    y = t + s
    s.zero_()
    return F.relu(y), s


LEFT: list[tuple[str, Callable[[Tensor, Tensor], Any], list[str]]] = [
    ("bare", lambda t, s: t, ["conv_transpose3d"]),
    ("other-user", _other_user, ["conv_transpose3d", "relu", "sum"]),
    ("promotes", lambda t, s: t + s.double(), ["conv_transpose3d", "double", "add"]),
    ("enlarges", lambda t, s: t[:1] + s, ["conv_transpose3d", "getitem", "add"]),
    ("number", lambda t, s: t + 1, ["conv_transpose3d", "add"]),
    ("alpha", lambda t, s: torch.add(t, s, alpha=2), ["conv_transpose3d", "add"]),
    ("other-norm", lambda t, s: F.instance_norm(t), ["conv_transpose3d", "instance_norm"]),
    ("along-D", lambda t, s: torch.cat([t, s], 2), ["conv_transpose3d", "cat"]),
]


@pytest.mark.parametrize(("tail", "calls"), [case[1:] for case in LEFT], ids=[case[0] for case in LEFT])
def test_left_alone(tail: Callable[[Tensor, Tensor], Any], calls: list[str]) -> None:
    assert check(Tail(tail), *inputs()) == calls


@pytest.mark.parametrize("tail", [_changed, _skip_changed_behind])
def test_changes_in_place_are_respected(tail: Callable[[Tensor, Tensor], Any]) -> None:
    check(Tail(tail), *inputs())


def test_a_switch_in_between_is_respected() -> None:
    """The add runs outside of the autocast region, so the sum is fp32."""

    def tail(t: Tensor, s: Tensor) -> Tensor:
        return F.relu(t) + s

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose3d(6, 6, 2, 2)

        def forward(self, x: Tensor, s: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                t = self.up(x)
            return tail(t, s)

    model, args = Net(), inputs()
    compiled = Compiled(model)
    out = compiled(*args)
    assert out.dtype == torch.float32 and FORWARD not in compiled.operators
    assert_close(out, model(*args), 1e-2)


def test_autocast_around_it() -> None:
    model, args = Residual(), inputs()
    for skip in (args[1], args[1].bfloat16()):
        compiled = Compiled(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out, expected = compiled(args[0], skip), model(args[0], skip)
        assert_close(out, expected, 2e-2)
        assert (FORWARD in compiled.operators) == (skip.dtype == torch.bfloat16)


@pytest.mark.parametrize("make", [LocalNetLike, StereoLike])
def test_batch_norm(make: Callable[[], nn.Module]) -> None:
    model = calibrated(spiced(make()), *inputs())
    operators = check(model.eval(), *inputs(), tolerance=1e-5)
    assert FORWARD in operators and "batch_norm" not in operators
    for module in model.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.momentum = 0.1  # calibrated() has left a cumulative average, which Dynamo does not take
    training = Compiled(model.train())
    training(*inputs())
    assert FORWARD not in training.operators


def test_batch_norm_of_another_type_is_left_alone() -> None:
    model = nn.Sequential(nn.ConvTranspose3d(3, 4, 2, 2), nn.BatchNorm3d(4).double()).eval()
    x = torch.randn(1, 3, 2, 2, 2)
    for call in (model, Compiled(model)):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            call(x)


def test_functional_calls_and_output_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose3d(6, 4, 3, stride=2, padding=1)
            self.w = nn.Parameter(torch.randn(6, 2, 2, 2, 2))

        def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            return F.relu(self.up(x, output_size=s.shape[2:])), F.silu(
                F.conv_transpose3d(x, self.w, stride=2, groups=2)
            )

    assert check(Net(), *inputs()) == [FORWARD, FORWARD]


def test_after_fuse() -> None:
    """A fused module is convt3d's own call in the graph, which takes in what follows, too."""
    x, skip = inputs()
    assert check(convt3d.fuse(Residual()), x, skip) == [FORWARD]
    assert check(convt3d.fuse(Tail(lambda t, s: torch.cat([t, s], 1))), x, skip) == [CAT]


def test_channels_last() -> None:
    x, skip = (a.to(memory_format=torch.channels_last_3d) for a in inputs())
    for model in (Residual(), Tail(lambda t, s: F.relu(t + s).flatten())):
        compiled = Compiled(model)
        assert_close(compiled(x, skip), model(x, skip))
        assert FORWARD in compiled.operators


@pytest.mark.parametrize("viewed", ["", "view", "as_strided", "aten"])
def test_formats_that_torch_does_not_foresee(viewed: str) -> None:
    """Its fake CUDA convolution is contiguous here, the real one and ours channels_last_3d."""
    graph = fx.Graph()

    def enter(node: fx.Node, value: Tensor) -> fx.Node:
        node.meta["example_value"] = value
        return node

    with FakeTensorMode():
        x = torch.empty(2, 6, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last_3d)
        w = torch.empty(6, 4, 2, 2, 2, device="cuda")
        y = torch.empty(2, 4, 6, 8, 10, device="cuda")
        nodes = enter(graph.placeholder("x"), x), enter(graph.placeholder("w"), w)
        conv = enter(graph.call_function(torch.conv_transpose3d, (*nodes, None, 2)), y)
        relu = enter(graph.call_function(F.relu, (conv,)), y)
        views = {
            "view": lambda: graph.call_method("view", (relu, -1)),
            "as_strided": lambda: graph.call_function(torch.as_strided, (relu, (y.numel(),), (1,))),
            "aten": lambda: graph.call_function(torch.ops.aten.view.default, (relu, (-1,))),
        }
        graph.output(enter(views[viewed](), y.view(-1)) if viewed else relu)
        assert _inductor_pass.fuse_graph(graph, ("cuda",)) == (0 if viewed else 1)


@pytest.mark.parametrize("tail", ["add", "cat", "view"])
def test_a_batch_that_the_data_tell(tail: str) -> None:
    """Of a size that nothing is known of while compiling, but that both operands have it."""
    x, skip = inputs()
    up = nn.ConvTranspose3d(x.shape[1], skip.shape[1], 2, 2)
    x, skip = torch.cat([x, x + 1]), torch.cat([skip, 2 * skip])
    keep = torch.arange(len(x)) % 2 == 0

    def model(x: Tensor, skip: Tensor, keep: Tensor) -> Tensor:
        index = keep.nonzero().squeeze(1)
        y = up(x[index])
        if tail == "cat":
            return torch.cat([y, skip[index]], 1)
        y = F.relu(y + skip[index])
        return y.view(-1) if tail == "view" else y

    compiled = Compiled(model)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_close(compiled(x, skip, keep), model(x, skip, keep))
    assert (CAT if tail == "cat" else FORWARD) in compiled.operators


@needs_python_headers
def test_with_inductor_itself() -> None:
    """The whole way, through its cache's keys, in training."""
    model, args = Residual(), inputs()
    expected = model(*args)
    compiled = torch.compile(model)
    code = torch._inductor.utils.run_and_get_code(lambda: compiled(*args))
    assert_close(code[0], expected)
    assert any("convt3d.conv_transpose3d_packed" in text for text in code[1])
    code[0].sum().backward()
    assert model.up.weight.grad is not None
    convt3d.disable_inductor()
    torch._dynamo.reset()
    code = torch._inductor.utils.run_and_get_code(lambda: torch.compile(model)(*args))
    assert not any("convt3d" in text for text in code[1])


def test_a_pass_that_is_there_runs_first() -> None:
    convt3d.disable_inductor()
    seen = []

    class Earlier(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append([n.name for n in graph.nodes if n.op == "call_function"])

        def uuid(self) -> Any:
            return "earlier"

    earlier = Earlier()
    config.pre_grad_custom_pass = earlier
    try:
        convt3d.enable_inductor(("cpu",))
        assert "earlier" in config.pre_grad_custom_pass.uuid()
        compiled = Compiled(Residual())
        compiled(*inputs())
        assert FORWARD in compiled.operators and len(seen) == 1 and len(seen[0]) == 3
        convt3d.disable_inductor()
        assert config.pre_grad_custom_pass is earlier
    finally:
        config.pre_grad_custom_pass = None


def test_without_a_uuid_nothing_is_cached() -> None:
    ours = _inductor_pass.ConvTranspose3dPass(lambda graph: None, ("cuda",))
    assert ours.uuid() is None
    there = _inductor_pass.ConvTranspose3dPass(None, ("cuda",)).uuid()
    assert there is not None and there != _inductor_pass.ConvTranspose3dPass(None, ("cpu",)).uuid()


def test_other_devices_are_left_alone() -> None:
    convt3d.enable_inductor()  # CUDA alone
    compiled = Compiled(Residual())
    compiled(*inputs())
    assert FORWARD not in compiled.operators


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_gpu(channels_last: bool) -> None:
    convt3d.enable_inductor()
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    for tail in (lambda t, s: F.relu(t + s), lambda t, s: torch.cat([F.gelu(t), s], 1)):
        model = Tail(tail).cuda()
        args = [a.cuda() for a in inputs()]
        if channels_last:
            model = model.to(memory_format=torch.channels_last_3d)
            args = [a.to(memory_format=torch.channels_last_3d) for a in args]
        expected = model(*args)
        out, code = torch._inductor.utils.run_and_get_code(lambda m=model, a=args: torch.compile(m)(*a))
        assert any("convt3d.conv_transpose3d" in text for text in code)
        assert_close(out, expected, 1e-5)
        assert out.stride() == expected.stride()
        torch._dynamo.reset()


class _Placed(torch.Tensor):
    """Stands for a DTensor, which has operators' rules of its own."""


def test_subclasses_are_left_alone() -> None:
    graph = fx.Graph()
    nodes = graph.placeholder("x"), graph.placeholder("w")
    conv = graph.call_function(torch.conv_transpose3d, (*nodes, None, 2))
    relu = graph.call_function(F.relu, (conv,))
    graph.output(relu)
    y = torch.empty(2, 4, 6, 8, 10)
    values = torch.empty(2, 6, 3, 4, 5), torch.empty(6, 4, 2, 2, 2), y, y
    for node, value in zip((*nodes, conv, relu), values, strict=True):
        node.meta["example_value"] = value.as_subclass(_Placed)
    assert _inductor_pass.fuse_graph(graph, ("cpu",)) == 0


# --- two convolutions, and what changes in between ---------------------------------------------------------


def _pair() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(3)
    return nn.ConvTranspose3d(6, 4, 2, 2), nn.ConvTranspose3d(6, 4, 2, 2), torch.randn(2, 6, 3, 4, 5)


JOINS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: F.relu(a + b),
    lambda a, b: F.relu(a) + F.relu(b),
    lambda a, b: a + F.relu(b),
    lambda a, b: F.relu(b) + a,
    lambda a, b: torch.cat([a, b], 1),
    lambda a, b: torch.cat([F.relu(a), F.relu(b)], 1),
]


@pytest.mark.parametrize("join", JOINS, ids=[str(i) for i in range(len(JOINS))])
def test_two_convolutions_meet(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b, x = _pair()
    compiled = Compiled(lambda x: join(a(x), b(x)))
    torch.testing.assert_close(compiled(x), join(a(x), b(x)), rtol=1e-5, atol=1e-5)
    assert any(name in compiled.operators for name in (FORWARD, CAT))


def _power(x: Tensor) -> None:
    x **= 2


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "ipow": _power,
    "out": lambda x: torch.mul(x, 2, out=x),
    "clamp out": lambda x: torch.clamp(x, 0, 1, out=x),
    "overload": lambda x: torch.ops.aten.mul_.Tensor(x, 2),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(1), x], 2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_way_of_changing_the_input_in_place(change: Callable[[Tensor], Any]) -> None:
    a, _, given = _pair()

    def run(x: Tensor) -> Any:
        x = x.clone()
        y = a(x)
        with torch.no_grad():
            change(x)
        return F.relu(y.detach()), x

    for mine, theirs in zip(Compiled(run)(given), run(given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_inputs_that_share_memory() -> None:
    a, _, _ = _pair()
    a.requires_grad_(False)

    def run(x: Tensor, other: Tensor) -> Tensor:
        y = a(x)
        other.zero_()
        return F.relu(y)

    both = [torch.randn(3, 6, 3, 4, 5, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    both[1].copy_(both[0])
    mine, theirs = Compiled(run)(both[0][:2], both[0][1:]), run(both[1][:2], both[1][1:])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_statistics_that_change_behind_the_norm() -> None:
    a, _, x = _pair()
    a.requires_grad_(False)

    def zeroed(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
        t = F.batch_norm(a(x), m, v)
        m.zero_()
        return F.relu(t)

    def updated(x: Tensor, m: Tensor, v: Tensor) -> Any:
        t = F.batch_norm(a(x), m, v)
        u = F.batch_norm(x[:, :4] + 1, m, v, training=True, momentum=0.5)
        return F.relu(t), u

    for run in (zeroed, updated):
        statistics = [(torch.full((4,), 0.3), torch.full((4,), 2.0)) for _ in range(2)]
        mine, theirs = Compiled(run)(x, *statistics[0]), run(x, *statistics[1])
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_batch_norm_without_a_batch_is_over_the_depth() -> None:
    a, _, _ = _pair()
    x = torch.randn(6, 2, 4, 5)  # (4, 4, 8, 10) behind it: as many channels as planes
    m, v = torch.rand(4), torch.rand(4) + 0.5

    def run(x: Tensor) -> Tensor:
        return F.batch_norm(a(x), m, v)

    torch.testing.assert_close(Compiled(run)(x), run(x), rtol=1e-5, atol=1e-5)


def test_a_device_type_by_itself() -> None:
    convt3d.enable_inductor("cpu")
    a, _, x = _pair()
    compiled = Compiled(lambda x: F.relu(a(x)))
    torch.testing.assert_close(compiled(x), F.relu(a(x)), rtol=1e-5, atol=1e-5)
    assert FORWARD in compiled.operators
