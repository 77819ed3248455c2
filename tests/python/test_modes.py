# SPDX-License-Identifier: Apache-2.0
"""Other ways in which PyTorch runs a program: ahead of time, traced, symbolic, wrapped, compiled backward."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import convt3d
from cases import Case, Tensors
from convt3d import FusedConvTranspose3d, ModelNew, conv_transpose3d, conv_transpose3d_cat
from toolchain import needs_python_headers

SMALL = (4, 6, 3, 2, 1, 1, (6, 1, 1, 1, 1))


def inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, 3, 3, 3), torch.randn(batch, 6, 6, 6, 6)


@needs_python_headers
def test_aot_inductor(tmp_path: Path) -> None:
    """Compiled ahead of time for any batch, loaded, and run with weights that it holds itself."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor needs a C++ compiler: {error}")
    model = ModelNew(*SMALL).eval()
    batch = torch.export.Dim("batch", min=2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            model, inputs(), dynamic_shapes={"x": {0: batch}, "add_input": {0: batch}}
        )
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for n in (2, 5):
            x, add = inputs(n)
            assert torch.equal(loaded(x, add), model(x, add))


def test_jit_trace_save_and_load(tmp_path: Path) -> None:
    model = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="silu").eval()
    x, add = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and used
        traced = torch.jit.trace(model, (x, add))
        torch.jit.save(traced, tmp_path / "model.pt")
        loaded = torch.jit.load(tmp_path / "model.pt")
    assert "convt3d::conv_transpose3d" in str(traced.inlined_graph)
    for n in (2, 3):
        x, add = inputs(n)
        assert torch.equal(loaded(x, add), model(x, add))
    model.weight.grad = None
    (ours,) = torch.autograd.grad(loaded(x, add).sum(), loaded.weight)
    (theirs,) = torch.autograd.grad(model(x, add).sum(), model.weight)
    torch.testing.assert_close(ours, theirs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 2, 2, 2))

    def forward(self, x: Tensor, add: Tensor) -> Tensor:
        return conv_transpose3d(x.relu(), self.weight, None, 2, add=add, activation="tanh").sum(1)


def test_fx_symbolic_trace() -> None:
    """One node for the call, which a pass can find and change."""
    net = Net()
    traced = torch.fx.symbolic_trace(net)
    (node,) = [n for n in traced.graph.nodes if n.target is convt3d.conv_transpose3d]
    x, add = inputs()
    assert torch.equal(traced(x, add), net(x, add))
    node.kwargs = {**node.kwargs, "activation": "none"}
    traced.recompile()
    expected = (F.conv_transpose3d(x.relu(), net.weight, None, 2) + add).sum(1)
    torch.testing.assert_close(traced(x, add), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_wrapper_subclass(compiled: bool) -> None:
    """A tensor that is two tensors: every operator runs on both, ours and its backward included."""
    from torch.testing._internal.two_tensor import TwoTensor

    case = Case(activation="silu")
    first, second = case.make(seed=1), case.make(seed=2)

    def step(x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> Tensor:
        return conv_transpose3d(x, w, b, add=add, **case.arguments())

    torch._dynamo.reset()
    function = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    pairs = zip(first.present(), second.present(), strict=True)
    both = [TwoTensor(a, b).requires_grad_() for a, b in pairs]
    out = function(*both)
    assert isinstance(out, TwoTensor)
    grads = torch.autograd.grad(out.square().sum(), both)
    for part, single in (("a", first), ("b", second)):
        leaves = [t.requires_grad_() for t in single.present()]
        alone = step(*leaves)
        assert torch.equal(getattr(out, part), alone)
        for got, true in zip(grads, torch.autograd.grad(alone.square().sum(), leaves), strict=True):
            torch.testing.assert_close(getattr(got, part), true)


def test_compiled_autograd() -> None:
    case = Case(activation="x_hardswish")
    leaves = [t.requires_grad_() for t in case.make().present()]

    def loss() -> Tensor:
        x, w, b, add = leaves
        return conv_transpose3d(x, w, b, add=add, **case.arguments()).square().sum()

    expected = torch.autograd.grad(loss(), leaves)
    torch._dynamo.reset()
    from torch._dynamo.compiled_autograd import _enable

    with _enable(torch.compile(backend="aot_eager")):
        loss().backward()
    for leaf, true in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, true)


@pytest.mark.parametrize("precision", [None, "ieee"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_flop_counter(activation: str, groups: int, precision: str | None) -> None:
    """As many as PyTorch counts for the same convolution; one more where the backward pass recomputes."""
    case = Case(activation=activation, groups=groups, precision=precision)
    leaves = [t.requires_grad_() for t in case.make().present()]
    x, w, b, add = leaves

    def count(function: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    def ours() -> Tensor:
        return case.call(Tensors(x, w, b, add))

    def theirs() -> Tensor:
        return F.conv_transpose3d(x, w, b, **case.conv_arguments()) + add

    again = int(activation != "none")
    one = count(theirs)
    assert one == 2 * x.numel() * (6 // groups) * 27
    assert count(ours) == one
    with torch.no_grad():
        assert count(ours) == one
    if groups == 1:  # in the weight's gradient PyTorch forgets that groups share nothing
        assert count(lambda: theirs().sum().backward()) == 3 * one
    assert count(lambda: ours().sum().backward()) == (3 + again) * one
    if precision is not None:  # decomposed into convt3d::product
        gradient = torch.func.grad(lambda x, w: case.call(Tensors(x, w, b, add)).sum(), (0, 1))
        assert count(lambda: gradient(x.detach(), w.detach())) == 3 * one
    skip = torch.randn(2, 3, *case.out_size())
    with torch.no_grad():
        assert count(lambda: conv_transpose3d_cat(x, w, b, **case.conv_arguments(), skip=skip)) == one
    x.requires_grad_(False)
    assert count(lambda: ours().sum().backward()) == (2 + again) * one


def test_skip_init_and_materialisation() -> None:
    module = nn.utils.skip_init(FusedConvTranspose3d, 4, 6, 3, stride=2, activation="relu")
    assert not module.weight.is_meta and module.activation == "relu"
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    again = FusedConvTranspose3d(4, 6, 3, stride=2, activation="relu")
    x = torch.randn(1, 4, 3, 3, 3)
    assert torch.equal(module(x), again(x))
    # Assigned into a module that was made without memory.
    with torch.device("meta"):
        empty = FusedConvTranspose3d(4, 6, 3, stride=2, activation="relu")
    empty.load_state_dict(again.state_dict(), assign=True)
    assert torch.equal(empty(x), again(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_compiled(reentrant: bool) -> None:
    """Recomputation inside a compiled step, and the old kind of checkpoint outside one."""
    from torch.utils.checkpoint import checkpoint

    case = Case(activation="gelu")
    leaves = [t.requires_grad_() for t in case.make().present()]

    def step(x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> Tensor:
        return conv_transpose3d(x, w, b, add=add, **case.arguments()).sin()

    def checked(*tensors: Tensor) -> Any:
        return checkpoint(step, *tensors, use_reentrant=reentrant)

    torch._dynamo.reset()
    function = checked if reentrant else torch.compile(checked, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(step(*leaves).sum(), leaves)
    function(*leaves).sum().backward()
    for leaf, true in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, true)


def test_saved_tensors_may_be_packed() -> None:
    """What hooks give back is what the gradients are made of."""
    case = Case(activation="silu", dtype=torch.float64)
    leaves = [t.requires_grad_() for t in case.make().present()]

    def loss() -> Tensor:
        return case.call(Tensors(*leaves)).square().sum()

    expected = torch.autograd.grad(loss(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().tobytes(), _unpack(leaves)):
        packed = loss()
    for a, b in zip(torch.autograd.grad(packed, leaves), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_inference_tensors_in_training() -> None:
    """PyTorch's add takes one as a residual, and its convolution as a bias: neither is saved there."""
    case = Case(activation="silu")
    t = case.make()
    with torch.inference_mode():
        bias, add = t.bias.clone(), t.add.clone()  # type: ignore[union-attr]
    found = []
    for tensors in (t, Tensors(t.input, t.weight, bias, add)):
        weight = tensors.weight.clone().requires_grad_()
        out = case.call(Tensors(tensors.input, weight, tensors.bias, tensors.add))
        found.append(torch.autograd.grad(out.square().sum(), weight)[0])
    assert torch.equal(*found)


def _unpack(leaves: list[Tensor]) -> Any:
    by_size: dict[int, torch.Size] = {t.numel() * 8: t.shape for t in leaves}

    def unpack(data: bytes) -> Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=torch.float64)
        return flat.view(by_size[len(data)]) if len(data) in by_size else flat.sum()

    return unpack


def test_anomaly_mode_names_the_forward_call() -> None:
    x = torch.full((1, 1, 1, 1, 1), torch.inf, requires_grad=True)
    w = torch.zeros(1, 1, 1, 1, 1, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan values"):
            (conv_transpose3d(x, w, activation="tanh") * torch.inf).sum().backward()
    assert any("conv_transpose3d(x, w" in str(w.message) for w in caught)


def test_deterministic_training_is_bitwise_repeatable() -> None:
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            torch.manual_seed(5)
            model = ModelNew(*SMALL)
            optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(*inputs()).square().mean().backward()
                optimiser.step()
                optimiser.zero_grad()
            runs.append([p.detach().clone() for p in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_parametrized_weights_compiled() -> None:
    from torch.nn.utils import parametrizations

    module = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="relu")
    parametrizations.spectral_norm(module, n_power_iterations=1).eval()
    torch._dynamo.reset()
    x, add = inputs()
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(x, add)
    torch.testing.assert_close(out, module(x, add))
    plain = replace(Case(activation="relu"), add_order="before")
    expected = plain.call(Tensors(x, module.weight, module.bias, add))
    torch.testing.assert_close(out, expected)


def test_lazy_modules() -> None:
    """A network whose channels its first input tells: fused before that it waits, fused after it is right."""
    x = torch.randn(2, 4, 3, 3, 3)

    def lazy() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.LazyConvTranspose3d(6, 2, 2), nn.ReLU())

    net = lazy()
    expected = net(x)
    torch.testing.assert_close(convt3d.fuse(net)(x), expected)
    early = convt3d.fuse(lazy())
    torch.testing.assert_close(early(x), expected)
    torch.testing.assert_close(convt3d.fuse(early)(x), expected)
    assert convt3d.fuse_report(early)["0"].replaced
