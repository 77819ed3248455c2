# SPDX-License-Identifier: Apache-2.0
"""A graph and the autocast that it runs in: what an ``nn.ConvTranspose3d`` in the same place would do.

PyTorch's own layers tell what is right, in every way to make a graph, made with and without an autocast, and
run with and without one. The layer in front of ours gives the autocast type wherever it follows the autocast:
an operator that did not would meet operands of two types.
"""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import convt3d
from convt3d import FusedConvTranspose3d, _cat, _composite, _functional, _ops, conv_transpose3d_cat
from convt3d._inductor_pass import fuse_graph
from toolchain import needs_python_headers

Graph = Callable[..., Tensor]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
CORE = (_ops.core_op, _cat.cat_core_op)
COMPOSITE = (_composite.forward_op, _cat.cat_op)


@pytest.fixture(autouse=True)
def _true_fp32() -> Iterator[None]:
    """A GPU's layers of two graphs agree to fp32's rounding, not to TF32's."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


class Net(nn.Module):
    """A convolution, a transposed one (with a relu, and with a skip beside it), and what follows."""

    def __init__(self, ours: bool, cat: bool, inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv3d(4, 8, 1)
        self.ours, self.cat, self.inside = ours, cat, inside
        self.up: nn.Module = nn.ConvTranspose3d(8, 6, 3, 2, 1, 1)
        if ours:
            theirs = self.up.state_dict()
            self.up = FusedConvTranspose3d(8, 6, 3, 2, 1, 1, activation="relu")
            self.up.load_state_dict(theirs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if not self.inside:
            return self.run(x, skip)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.run(x, skip)

    def run(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.first(x)
        up: Any = self.up
        if not self.ours:
            return up(x).relu().sin()
        if not self.cat:
            return up(x).sin()
        return conv_transpose3d_cat(x, up.weight, up.bias, 2, 1, 1, skip=skip, activation="relu").sin()


def inputs(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 4, 3, 2, 3, device=device), torch.randn(2, 5, 6, 4, 6, device=device)


def autocast(device: str, dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- ways to make a graph ----------------------------------------------------------------------------------


def export(net: nn.Module, *args: Tensor) -> Graph:
    return torch.export.export(net, args, strict=False).module()


def export_strict(net: nn.Module, *args: Tensor) -> Graph:
    return torch.export.export(net, args, strict=True).module()


def save_and_load(net: nn.Module, *args: Tensor) -> Graph:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(net, args), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def decompositions(net: nn.Module, *args: Tensor) -> Graph:
    return torch.export.export(net, args).run_decompositions().module()


def inference(net: nn.Module, *args: Tensor) -> Graph:
    with torch.inference_mode():
        return torch.export.export(net, args).run_decompositions().module()


def fx(net: nn.Module, *args: Tensor) -> Graph:
    return make_fx(net)(*args)


def fx_pre_dispatch(net: nn.Module, *args: Tensor) -> Graph:
    return make_fx(net, pre_dispatch=True)(*args)


IN_FRONT = (export, export_strict, save_and_load, fx_pre_dispatch)
BEHIND = (decompositions, inference, fx)


@devices
@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
@pytest.mark.parametrize("made_under", [None, torch.bfloat16, "inside"], ids=str)
@pytest.mark.parametrize("make", [*IN_FRONT, *BEHIND], ids=lambda f: f.__name__)
def test_report_27_types_in_a_graph(make: Any, made_under: Any, cat: bool, device: str) -> None:
    graphs = []
    args = inputs(device)
    inside = made_under == "inside"
    for ours in (True, False):
        net = Net(ours, cat and ours, inside).to(device).eval().requires_grad_(False)
        with quietly(), autocast(device, None if inside else made_under):
            graphs.append((net, make(net, *args)))
    (net, ours), (_, theirs) = graphs
    for run_under in (None, torch.float16):
        with autocast(device, run_under):
            out, expected = ours(*args), theirs(*args)
        # On CUDA autocast casts for aten::convolution, too, of which their graph consists. Ours does not
        # follow: what was compiled for one type must not get another.
        apart = device == "cuda" and make in BEHIND and run_under is not None
        traced = torch.float32 if made_under is None else torch.bfloat16
        dtype = traced if apart else expected.dtype
        assert out.dtype == dtype
        # The same layers run as they are, under the autocast that gives this type.
        with autocast(device, None if dtype == torch.float32 else dtype):
            direct = net.run(*args)
        coarse = {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(out, direct, **(coarse if apart else {}))
        torch.testing.assert_close(out[:, :6].float(), expected.float(), **coarse)


@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
@pytest.mark.parametrize("make", [*IN_FRONT, *BEHIND], ids=lambda f: f.__name__)
def test_operators_in_graphs(make: Any, cat: bool) -> None:
    with quietly():
        graph: Any = make(Net(True, cat).requires_grad_(False), *inputs("cpu"))
    (target,) = [n.target for n in graph.graph.nodes if "convt3d" in str(n.target)]
    assert target == (COMPOSITE if make in IN_FRONT else CORE)[cat]


def test_a_trace_in_front_of_the_dispatcher_is_seen() -> None:
    """It has no mode that the dispatcher knows, and the short way would be recorded as it is."""
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(_functional.observed())
        return x + 1

    for pre_dispatch in (True, False):
        make_fx(function, pre_dispatch=pre_dispatch)(torch.ones(2))
    assert seen == [True, True] and not _functional.observed()


@needs_python_headers
@pytest.mark.parametrize(("made_under", "inference"), [(None, True), (torch.bfloat16, False)], ids=str)
def test_aot_inductor(tmp_path: Path, made_under: Any, inference: bool) -> None:
    """Its code reads results as the types that it was compiled for."""
    check_aot_inductor(tmp_path, made_under, inference, "cpu")


def check_aot_inductor(
    folder: Path, made_under: Any, inference: bool, device: str, ours: bool = True
) -> None:
    net = Net(ours, False, made_under is not None).to(device).eval()
    args = inputs(device)
    with quietly(), torch.inference_mode() if inference else torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(net, args), package_path=str(folder / "model.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        expected = net(*args)
        for run_under in (None, torch.float16):
            if device == "cuda" and run_under is not None:
                continue  # the layer in front gives autocast's type there, which the code does not expect
            with autocast(device, run_under):
                out = loaded(*args)
            assert out.dtype == expected.dtype == (made_under or torch.float32)
            torch.testing.assert_close(out, expected)


@needs_python_headers
@pytest.mark.gpu
def test_aot_inductor_on_cuda(tmp_path: Path) -> None:
    """In processes of their own: where PyTorch's own layers cannot be loaded either, loading may crash."""

    def status(ours: bool) -> int:
        call = f"t.check_aot_inductor(t.Path({str(tmp_path)!r}), None, False, 'cuda', {ours})"
        code = f"import test_graphs_under_autocast as t; t.torch.backends.cudnn.allow_tf32 = False; {call}"
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            capture_output=True,
            timeout=300,
            check=False,
        ).returncode

    if status(ours=False) != 0:
        pytest.skip("AOTInductor does not run PyTorch's own layers on CUDA here")
    assert status(ours=True) == 0


@devices
@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_python_headers)])
def test_the_backward_of_compiled_checkpoints(backend: str, cat: bool, device: str) -> None:
    """It computes the forward pass again, and no guard asks which autocast is around backward()."""
    torch._dynamo.reset()
    net = Net(True, cat).to(device)
    x, skip = inputs(device)
    if (
        device == "cuda"
    ):  # where the layer in front gives autocast's type, which Inductor's code does not expect
        net.first, x = nn.Identity(), x.repeat(1, 2, 1, 1, 1)
    args = tuple(t.requires_grad_() for t in (x, skip))

    def step(*tensors: Tensor) -> Any:
        return checkpoint(net, *tensors, use_reentrant=False)

    wanted = [*net.parameters(), args[0]]
    expected = torch.autograd.grad(net(*args).square().sum(), wanted)
    loss = torch.compile(step, backend=backend, fullgraph=True)(*args).square().sum()
    with torch.autocast(device, dtype=torch.bfloat16):
        grads = torch.autograd.grad(loss, wanted)
    for got, true in zip(grads, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, true, rtol=1e-3, atol=1e-4)


@devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_their_autocast(reentrant: bool, device: str) -> None:
    """Eager: forward under one autocast, backward under another or none."""
    net = Net(True, False).to(device)
    args = tuple(t.requires_grad_() for t in inputs(device))
    wanted = [net.up.weight, args[0]]
    gradients = []
    for checked in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = checkpoint(net, *args, use_reentrant=reentrant) if checked else net(*args)
        loss = out.float().sum()
        with autocast(device, torch.float16 if checked else None):
            for tensor in wanted:
                tensor.grad = None
            loss.backward()
        gradients.append([tensor.grad for tensor in wanted])
    for got, true in zip(*gradients, strict=True):
        torch.testing.assert_close(got, true, rtol=0.02, atol=0.02)


@devices
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
def test_the_core_has_no_autocast(cat: bool, grad: bool, device: str) -> None:
    """Called under one it computes in its operands' types, and so does all that it calls."""
    x, skip = inputs(device)
    w = torch.randn(4, 6, 3, 3, 3, device=device, requires_grad=grad)
    tail = (skip, False) if cat else ()
    args = (x, w, None, [2] * 3, [1] * 3, [1] * 3, 1, [1] * 3, None, "before", "gelu", 0.0, "ieee", *tail)
    expected = CORE[cat](*args)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = CORE[cat](*args)
        cast = COMPOSITE[cat](*args)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), expected, rtol=0.05, atol=0.05)
    if grad:
        with torch.autocast(device, dtype=torch.bfloat16):
            (got,) = torch.autograd.grad(out.sum(), w)
        torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), w)[0], rtol=1e-4, atol=1e-4)


@devices
@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
def test_the_core_takes_its_weights_type(cat: bool, device: str) -> None:
    """Under an autocast that has given what comes before it another type than the graph says."""
    x, skip = inputs(device)
    w, bias = torch.randn(4, 6, 3, 3, 3, device=device), torch.randn(6, device=device)
    tail = (skip.half(), False) if cat else ()
    arguments = (bias, [2] * 3, [1] * 3, [1] * 3, 1, [1] * 3, None, "before", "relu", 0.0, "ieee")
    with torch.autocast(device, dtype=torch.float16):
        out = CORE[cat](x.half(), w, *arguments, *tail)
    with pytest.raises(RuntimeError, match="one dtype"):
        CORE[cat](x.half(), w, *arguments, *tail)
    expected = CORE[cat](x.half().float(), w, *arguments, *((skip.half().float(), False) if cat else ()))
    assert out.dtype == torch.float32 and torch.equal(out, expected)


@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
@pytest.mark.parametrize("which", ["input", "weight"])
def test_the_core_takes_no_double_for_its_weights_type(which: str, cat: bool) -> None:
    """No autocast has made it: the caller has mixed types, which is refused as it is without autocast."""
    x, skip = inputs("cpu")
    w = torch.randn(4, 6, 3, 3, 3)
    x, w = (x.double(), w) if which == "input" else (x, w.double())
    tail = (skip, False) if cat else ()
    arguments = (None, [2] * 3, [1] * 3, [1] * 3, 1, [1] * 3, None, "before", "relu", 0.0, "ieee")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="one dtype"):
        CORE[cat](x, w, *arguments, *tail)


@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(cat: bool, grad: bool) -> None:
    x, skip = inputs("cpu")
    w = torch.randn(4, 6, 3, 3, 3, requires_grad=grad)
    tail = (skip, True) if cat else ()
    args = (x, w, None, [2] * 3, [1] * 3, [1] * 3, 1, [1] * 3, None, "before", "silu", 0.0, "default", *tail)
    for op in (CORE[cat], COMPOSITE[cat]):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_compiled_call_is_traced_anew_for_each_autocast(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    net = Net(True, False).eval().requires_grad_(False)
    args = inputs("cpu")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for run_under in (None, dtype, None):
        with autocast("cpu", run_under):
            out, expected = compiled(*args), net(*args)
        assert out.dtype == (run_under or torch.float32) and torch.equal(out, expected)


def test_a_program_of_an_earlier_version_loads() -> None:
    """There the composite stood in decomposed programs, too."""
    x, _ = inputs("cpu")
    w = torch.randn(4, 6, 3, 3, 3)
    graph: Any = make_fx(lambda x, w: convt3d.conv_transpose3d(x, w, None, 2))(x, w)
    for node in graph.graph.nodes:
        if node.target is CORE[0]:
            node.target = COMPOSITE[0]
    graph.recompile()
    assert torch.equal(graph(x, w), convt3d.conv_transpose3d(x, w, None, 2))
    program = torch.export.export(graph, (x, w))
    assert torch.equal(program.run_decompositions().module()(x, w), graph(x, w))


@pytest.mark.parametrize("cat", [False, True])
def test_what_is_fused_with_a_core_keeps_its_types(cat: bool) -> None:
    """A decomposed program, compiled with more behind it under an autocast, with and without the pass."""
    torch.manual_seed(0)
    up = FusedConvTranspose3d(4, 6, 2, 2)
    x, skip = torch.randn(2, 4, 3, 3, 3), torch.randn(2, 5, 6, 6, 6)
    program = torch.export.export(up, (x,)).run_decompositions().module()

    def network(x: Tensor, skip: Tensor) -> Tensor:
        y: Tensor = torch.relu(program(x))
        return torch.cat([y, skip], 1) if cat else y

    def fusing(module: torch.fx.GraphModule, inputs: Any) -> Any:
        assert fuse_graph(module.graph, {"cpu"}) == 1
        module.recompile()
        return aot_eager(module, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        want = network(x, skip)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = torch.compile(network, backend=fusing)(x, skip)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
