# SPDX-License-Identifier: Apache-2.0
"""The operator of compiled graphs: one kernel, settings as numbers."""

from __future__ import annotations

import random
import struct
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import convt3d
from accuracy import assert_accurate
from cases import Case, random_cases
from cat_calls import make_skip
from convt3d import _inductor_lowering, _native, _packed
from convt3d._cat import cat_core_op
from convt3d._ops import core_op
from cuda_stand_in import arguments, install, on_cuda

CASE = Case(activation="leaky_relu", add="channel", negative_slope=0.25, stride=(3, 2, 2), padding=(1, 0, 2))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("case", list(random_cases(7, 12, FLOATS)), ids=str)
def test_values(case: Case) -> None:
    t = case.make()
    packed = _packed.pack(arguments(case, t))
    assert packed is not None
    assert_accurate(case, t, _packed.packed_op(*packed))
    skip = make_skip(case)
    for skip_first in (False, True):
        args = (*arguments(case, t), skip, skip_first)
        packed = _packed.pack(args)
        assert packed is not None
        out, expected = _packed.packed_op(*packed), cat_core_op(*args)
        assert torch.equal(out, expected) and out.stride() == expected.stride()


def test_an_autocast_around_it_has_no_say() -> None:
    """What was compiled holds results of the types that it was compiled for."""
    t = CASE.make()
    packed = _packed.pack(arguments(CASE, t))
    assert packed is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert_accurate(CASE, t, _packed.packed_op(*packed))
    assert _packed.packed_op(*packed).dtype == torch.float32


def test_all_settings_come_back() -> None:
    rng = random.Random(3)
    tensors = ("input", "weight", "bias", "add", "skip")
    for activation in convt3d._activations.ACTIVATIONS:
        for precision in ("default", "ieee", "tf32"):
            triples = [tuple(rng.randrange(1, 9) for _ in range(3)) for _ in range(4)]
            order, slope, groups = rng.choice(("before", "after")), rng.uniform(-2, 2), rng.randrange(1, 9)
            own = (*tensors[:3], *triples[:3], groups, triples[3], "add", order, activation, slope, precision)
            for args in (own, (*own, "skip", True), (*own, "skip", False)):
                packed = _packed.pack(args)
                assert packed is not None and _packed.unpack(*packed) == args


@pytest.mark.parametrize("cat", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(cat: bool, channels_last: bool) -> None:
    """Autograd apart, behind which it comes."""
    case = Case(activation="gelu", add="full", input_channels_last=channels_last)
    t = case.make()
    extra = (make_skip(case, channels_last=channels_last), True) if cat else ()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    packed = _packed.pack((*arguments(case, t), *extra))
    torch.library.opcheck(_packed.packed_op, packed, test_utils=tests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_the_binding_is_given(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """ "default" is what the switch says in the call; for 16-bit types, too, where the binding ignores it."""
    monkeypatch.setattr(_native, "_packed_settings", {})
    monkeypatch.setattr(_native, "_tensor", list)
    (slope,) = struct.unpack("q", struct.pack("d", 0.25))
    case = Case(activation="leaky_relu", add="channel", negative_slope=0.25, stride=(1, 2, 3), dtype=dtype)
    with FakeTensorMode():
        t, result = on_cuda(case), torch.empty(1)
        binding = install(monkeypatch, result)
        for precision in ("default", "ieee", "tf32"):
            packed: Any = _packed.pack((*arguments(case, t)[:-1], precision))
            for switch in ("tf32", "ieee"):
                torch.backends.cudnn.conv.fp32_precision = switch
                assert _native.quick_packed(*packed) is result
                code = int((switch if precision == "default" else precision) == "tf32")
                *tensors, settings = binding.calls[-1]
                assert settings == [
                    1,
                    2,
                    3,
                    *case.padding,
                    *case.output_padding,
                    1,
                    1,
                    1,
                    1,
                    2,
                    0,
                    code,
                    slope,
                ]
                given = (t.input, t.weight, t.bias, t.add)
                assert all(a is b for a, b in zip(tensors, given, strict=True))
        assert len(_native._packed_settings) == 3


def test_a_refused_call_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        t = on_cuda(CASE)
        install(monkeypatch, None)
        packed: Any = _packed.pack(arguments(CASE, t))
        monkeypatch.setattr(_native, "_tensor", list)
        assert _packed._forward(*packed).shape == CASE.output_shape()


def test_flops_are_counted() -> None:
    case = Case()
    t = case.make()
    counts = []
    for operator, args in (
        (core_op, arguments(case, t)),
        (_packed.packed_op, _packed.pack(arguments(case, t))),
    ):
        with FlopCounterMode(display=False) as counter:
            operator(*args)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 3, 2, 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([torch.relu(self.up(x) + skip), skip], 1)


def _graphs_behind_autograd(model: nn.Module, *args: Tensor, dynamic: bool = False) -> list[list[str]]:
    """What the graphs call that Inductor gets, after the pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    called = []

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        config.post_grad_custom_post_pass(module.graph)
        module.recompile()
        module.graph.lint()
        called.append([str(n.target) for n in module.graph.nodes if "convt3d" in str(n.target)])
        return make_boxed_func(module.forward)

    def backend(module: fx.GraphModule, examples: Any) -> Any:
        config.pre_grad_custom_pass(module.graph)
        module.recompile()
        return aot_autograd(fw_compiler=compiler)(module, examples)

    torch._dynamo.reset()
    compiled, twin = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic), model
    out, expected = compiled(*args), twin(*args)
    torch.testing.assert_close(out, expected)
    if out.requires_grad:
        grads = []
        for y in (out, expected):
            model.zero_grad()
            y.square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(grads[0], grads[1])
    return called


@pytest.fixture
def enabled() -> Any:
    convt3d.enable_inductor("cpu")
    yield
    convt3d.disable_inductor()
    assert config.post_grad_custom_post_pass is None
    torch._dynamo.reset()


PACKED = "convt3d.conv_transpose3d_packed.default"


def test_in_graphs(enabled: None) -> None:
    args = torch.randn(2, 4, 3, 2, 3), torch.randn(2, 3, 6, 4, 6)
    model = Up()
    with torch.no_grad():
        assert _graphs_behind_autograd(model, *args) == [[PACKED]]
        assert _graphs_behind_autograd(model, *args, dynamic=True) == [[PACKED]]
    forward, backward = _graphs_behind_autograd(model, *args)
    assert forward == [PACKED] and backward == ["convt3d.conv_transpose3d_backward.default"]
    convt3d.enable_inductor("cuda")
    with torch.no_grad():
        assert _graphs_behind_autograd(convt3d.fuse(model), *args) == [
            ["convt3d.conv_transpose3d_core.default"]
        ]


def test_settings_that_are_no_numbers_yet() -> None:
    graph = fx.Graph()
    x, w, s = (graph.placeholder(name) for name in "xws")
    usual = ((0, 0, 0), (0, 0, 0), 1, (1, 1, 1), None, "before", "none")
    with FakeTensorMode():
        value = torch.empty(1, 1, 1, 1, 1)
    for stride, slope in (((2, 2, s), 0.1), ((2, 2, 2), s), ((2, 2, 2), 0.1)):
        node = graph.call_function(core_op, (x, w, None, stride, *usual, slope, "default"))
        node.meta["val"] = value
    graph.output(node)
    _inductor_lowering.PackPass(None, ("cpu",))(graph)
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    assert targets == [core_op, core_op, _packed.packed_op]


def test_strides_of_eager_stay_with_the_call() -> None:
    """Inductor reads them by position."""
    graph = fx.Graph()
    x, w, skip = (graph.placeholder(name) for name in ("x", "w", "skip"))
    settings = ((2, 2, 2), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1))
    own = ("before", "none", 0.1, "default")
    for args in ((x, w, None, *settings, skip, *own), (x, w, None, *settings, None, *own, skip, True)):
        node = graph.call_function(cat_core_op if len(args) > 13 else core_op, args)
        with FakeTensorMode():
            node.meta["val"] = torch.empty(1, 1, 1, 1, 1)
        noted = [f"eager {a}" if isinstance(a, fx.Node) else None for a in args]
        node.meta["eager_input_vals"] = (tuple(noted), {})
    graph.output(node)
    _inductor_lowering.PackPass(None, ("cpu",))(graph)
    first, second = (n for n in graph.nodes if n.op == "call_function")
    for node, expected in (
        (first, ("eager x", "eager w", None, "eager skip", None)),
        (second, ("eager x", "eager w", None, None, "eager skip")),
    ):
        noted, kwargs = node.meta["eager_input_vals"]
        assert noted[:5] == expected and noted[5:] == node.args[5:] and kwargs == {}


def test_a_pass_that_wants_to_know_more_keeps_its_place() -> None:
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is None:
        pytest.skip("this torch has no such passes")

    class Aware(aware):  # type: ignore[misc, valid-type]
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None: ...

        def uuid(self) -> Any:
            return "aware"

    class Plain(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> Any:
            return "plain"

    for there, stays in ((Aware(), True), (Plain(), False)):
        config.post_grad_custom_post_pass = there
        try:
            convt3d.enable_inductor("cpu")
            assert (config.post_grad_custom_post_pass is there) == stays
            if not stays:
                assert "plain" in config.post_grad_custom_post_pass.uuid()
            convt3d.disable_inductor()
            assert config.post_grad_custom_post_pass is there
        finally:
            config.post_grad_custom_post_pass = None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gpu(dtype: torch.dtype) -> None:
    case = partial(Case, activation="relu", add="full", dtype=dtype, cin=32, cout=32)
    for channels_last in (False, True):
        one = case(input_channels_last=channels_last)
        t = one.make("cuda")
        out = _packed.packed_op(*_packed.pack(arguments(one, t)))
        assert_accurate(one, t, out)
        skip = make_skip(one, 32, channels_last, "cuda")
        args = (*arguments(one, t), skip, False)
        assert torch.equal(_packed.packed_op(*_packed.pack(args)), cat_core_op(*args))
