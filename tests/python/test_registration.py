# SPDX-License-Identifier: Apache-2.0
"""The operator as torch sees it: opcheck, compile, export, autocast, subclasses."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import convt3d
from cases import Case, Tensors
from convt3d import FusedConvTranspose3d, ModelNew, conv_transpose3d, conv_transpose3d_cat
from toolchain import needs_python_headers

OPS = torch.ops.convt3d

CASES = [
    Case(activation="x_hardswish"),
    Case(activation="gelu", input_channels_last=True, add="channel", add_order="after"),
    Case(activation="none", dtype=torch.bfloat16, bias=False, add="none"),
    Case(activation="silu", dtype=torch.float64, weight_channels_last=True, groups=2),
    Case(activation="relu", batch=0),
    Case(activation="tanh", precision="tf32"),
]
IDS = ["f32", "channels-last", "bf16", "f64-groups", "empty", "tf32"]


def schema_arguments(case: Case, t: Tensors) -> tuple[Any, ...]:
    return (
        t.input,
        t.weight,
        t.bias,
        list(case.stride),
        list(case.padding),
        list(case.output_padding),
        case.groups,
        list(case.dilation),
        t.add,
        case.add_order,
        case.activation,
        case.negative_slope,
        case.precision or "default",
    )


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck_forward(case: Case, grad: bool) -> None:
    tensors = case.make()
    for tensor in tensors.present():
        tensor.requires_grad_(grad)
    torch.library.opcheck(OPS.conv_transpose3d.default, schema_arguments(case, tensors))


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("grad", [False, True], ids=["first", "second-order"])
def test_opcheck_backward(case: Case, grad: bool) -> None:
    if grad and case.dtype == torch.bfloat16:
        pytest.skip("opcheck compares gradients more tightly than bfloat16 allows")
    tensors = case.make()
    for tensor in tensors.present():
        tensor.requires_grad_(grad)
    mask = [True, True, tensors.bias is not None, tensors.add is not None]
    cotangent = torch.randn(case.output_shape()).to(case.dtype)
    torch.library.opcheck(
        OPS.conv_transpose3d_backward.default, (cotangent, *schema_arguments(case, tensors), mask)
    )


@pytest.mark.parametrize("add", ["full", "channel"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("grad", [False, True], ids=["first", "second-order"])
def test_opcheck_backward_of_the_add_alone(add: str, order: str, channels_last: bool, grad: bool) -> None:
    """Its gradient may be the output's, which no operator may return itself."""
    case = Case(add=add, add_order=order, input_channels_last=channels_last)
    tensors = case.make()
    cotangent = torch.randn(case.output_shape()).requires_grad_(grad)
    arguments = (cotangent, *schema_arguments(case, tensors), [False, False, False, True])
    torch.library.opcheck(OPS.conv_transpose3d_backward.default, arguments)
    (out,) = OPS.conv_transpose3d_backward(*arguments)
    assert out.untyped_storage().data_ptr() != cotangent.untyped_storage().data_ptr()


@pytest.mark.parametrize("add", ["full", "channel"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_operator_values(add: str, order: str, create_graph: bool) -> None:
    """Every gradient of the operator itself, which autograd asks for fewer."""
    case = Case(add=add, add_order=order, activation="tanh", dtype=torch.float64)
    tensors = case.make()
    leaves = [t.requires_grad_() for t in tensors.present()]
    cotangent = torch.randn(case.output_shape(), dtype=torch.float64)
    conv = F.conv_transpose3d(tensors.input, tensors.weight, tensors.bias, **case.conv_arguments())
    added = tensors.add
    assert added is not None
    plain = (conv + added).tanh() if order == "before" else conv.tanh() + added
    with torch.set_grad_enabled(create_graph):
        got = OPS.conv_transpose3d_backward(cotangent, *schema_arguments(case, tensors), [True] * 4)
    for a, b in zip(got, torch.autograd.grad(plain, leaves, cotangent), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.double(), r"grad_output must be torch.float32 on cpu .*got torch.float64"),
        (lambda g: g[..., :-1], r"grad_output must have the output's shape \(., 6, 6, 8, 10\)"),
        (lambda g: g.sum(0), "grad_output must have the output's shape"),
        (lambda g: g.to("meta"), "got torch.float32 on meta"),
    ],
    ids=["dtype", "shape", "rank", "device"],
)
def test_backward_refuses_another_outputs_gradient(
    change: Callable[[Tensor], Tensor], message: str, grad: bool, batch: int
) -> None:
    case = Case(activation="relu", batch=batch)
    tensors = case.make()
    tensors.weight.requires_grad_(grad)
    cotangent = change(torch.randn(case.output_shape()))
    with pytest.raises(RuntimeError, match=message):
        OPS.conv_transpose3d_backward(cotangent, *schema_arguments(case, tensors), [True] * 4)


@pytest.mark.parametrize("grad", [False, True])
def test_backward_refuses_the_gradient_of_no_add(grad: bool) -> None:
    case = Case(add="none")
    tensors = case.make()
    tensors.weight.requires_grad_(grad)
    with pytest.raises(RuntimeError, match="mask asks for the gradient of add, but there is none"):
        OPS.conv_transpose3d_backward(
            torch.randn(case.output_shape()), *schema_arguments(case, tensors), [True] * 4
        )


@pytest.mark.parametrize(
    "name", ["conv_transpose3d", "conv_transpose3d_core", "conv_transpose3d_backward", "product"]
)
@pytest.mark.parametrize("backend", ["CPU", "CUDA", "MPS", "XPU", "HPU", "PrivateUse1", "Meta"])
def test_every_device_has_an_implementation(name: str, backend: str) -> None:
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"convt3d::{name}", backend)


class Chain(nn.Module):
    """Two fused layers with plain PyTorch around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up1 = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="hardswish")
        self.norm = nn.InstanceNorm3d(6)
        self.up2 = FusedConvTranspose3d(
            6, 3, 2, 2, activation="leaky_relu", negative_slope=0.2, add_order="after"
        )

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.up2(self.norm(self.up1(x, skip)), skip.new_ones(1)).sigmoid()


def chain_inputs(n: int = 2, d: int = 3, channels_last: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n * 10 + d)
    x, skip = torch.randn(n, 4, d, 3, 4), torch.randn(n, 6, 2 * d, 6, 8)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    return x.requires_grad_(), skip.requires_grad_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_compile_fullgraph(backend: str, channels_last: bool) -> None:
    torch._dynamo.reset()
    model = Chain()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    inputs = chain_inputs(channels_last=channels_last)
    plain, fast = model(*inputs), compiled(*inputs)
    torch.testing.assert_close(fast, plain, rtol=0, atol=0)
    assert fast.stride() == plain.stride()
    leaves = [*inputs, *model.parameters()]
    for a, b in zip(
        torch.autograd.grad(plain.sum(), leaves), torch.autograd.grad(fast.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_report_20_dynamic_shapes() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = Chain()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    compiled_graphs = []
    for n, d in ((2, 7), (5, 9), (8, 11), (9, 10)):  # no two sizes alike: those would share a symbol
        inputs = chain_inputs(n, d)
        plain, fast = model(*inputs), compiled(*inputs)
        torch.testing.assert_close(fast, plain)
        fast.sum().backward()
        compiled_graphs.append(counter.frame_count)
    assert len(set(compiled_graphs)) == 1, "a new size was compiled anew"


@needs_python_headers
def test_compile_inductor() -> None:
    pytest.importorskip("torch._inductor")
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor needs a C++ compiler: {error}")
    torch._dynamo.reset()
    model = Chain()
    inputs = chain_inputs(channels_last=True)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_precision_is_not_baked_into_a_graph() -> None:
    """ "default" stays "default" in the graph; reading the switch happens when the operator runs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x, w = torch.randn(1, 2, 2, 2, 2), torch.randn(2, 2, 2, 2, 2)
    torch.compile(lambda x, w: conv_transpose3d(x, w), backend=backend, fullgraph=True)(x, w)
    (node,) = [n for n in graphs[0].graph.nodes if n.op == "call_function" and "convt3d" in str(n.target)]
    assert node.args[-1] == "default"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_export_save_and_load(dynamic: bool) -> None:
    model = ModelNew(4, 6, 3, 2, 1, 1, (6, 1, 1, 1, 1)).eval()
    x, add = torch.randn(2, 4, 3, 3, 3), torch.randn(2, 6, 6, 6, 6)
    shapes = None
    if dynamic:
        batch = torch.export.Dim("batch", min=2)
        shapes = {"x": {0: batch}, "add_input": {0: batch}}
    program = torch.export.export(model, (x, add), dynamic_shapes=shapes)
    assert any("convt3d.conv_transpose3d" in str(node.target) for node in program.graph.nodes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    assert torch.equal(loaded(x, add), model(x, add))
    if dynamic:
        x, add = torch.randn(5, 4, 3, 3, 3), torch.randn(5, 6, 6, 6, 6)
        assert torch.equal(loaded(x, add), model(x, add))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_report_27_autocast(dtype: torch.dtype) -> None:
    """Each autocast gives its own type; fp32 parameters, bias and residual are cast by rule."""
    case = Case(activation="hardswish")
    tensors = case.make()
    with torch.autocast("cpu", dtype=dtype):
        out = case.call(tensors)
        theirs = F.conv_transpose3d(tensors.input, tensors.weight, tensors.bias, **case.conv_arguments())
    assert out.dtype == theirs.dtype == dtype
    cast = Tensors(*(None if t is None else t.to(dtype) for t in vars(tensors).values()))  # type: ignore[arg-type]
    assert torch.equal(out, replace(case, dtype=dtype).call(cast))
    assert case.call(tensors).dtype == torch.float32


def test_autocast_mixed_inputs_and_gradients() -> None:
    module = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="silu")
    x = torch.randn(1, 4, 3, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    add = torch.randn(1, 6, 6, 6, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, add)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    assert add.grad is not None and add.grad.dtype == torch.float32
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_autocast_leaves_double_alone_and_can_be_disabled() -> None:
    case = Case(dtype=torch.float64)
    tensors = case.make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert case.call(tensors).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            wide = Case()
            assert wide.call(wide.make()).dtype == torch.float32


@pytest.mark.parametrize("cat", [False, True], ids=["up", "cat"])
@pytest.mark.parametrize("device", ["xpu", "mps", "cuda"])
def test_autocast_of_other_devices(device: str, cat: bool) -> None:
    """As PyTorch's own rule has it; fake tensors need no such device."""
    with FakeTensorMode():
        x, w = torch.empty(1, 4, 3, 3, 3, device=device).half(), torch.empty(4, 6, 2, 2, 2, device=device)
        skip = torch.empty(1, 2, 6, 6, 6, device=device)
        torch.set_autocast_enabled(device, True)
        try:
            out = conv_transpose3d_cat(x, w, None, 2, skip=skip) if cat else conv_transpose3d(x, w, None, 2)
            expected = F.conv_transpose3d(x, w, None, 2)
        finally:
            torch.set_autocast_enabled(device, False)
    assert out.dtype == expected.dtype and out.device == expected.device


def test_autocast_compiled() -> None:
    torch._dynamo.reset()
    module = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="silu")
    x = torch.randn(1, 4, 3, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, module(x))


class Tagged(Tensor):
    """A subclass without any behaviour of its own."""


def test_tensor_subclass() -> None:
    case = Case(activation="relu")
    t = case.make()
    expected = case.call(t)
    out = case.call(replace(t, input=t.input.as_subclass(Tagged)))
    assert type(out) is Tagged
    assert torch.equal(out.as_subclass(Tensor), expected)


def test_torch_function_override_sees_the_call() -> None:
    seen: list[Any] = []

    class Spy(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = torch.randn(1, 2, 2, 2, 2).as_subclass(Spy), torch.randn(2, 2, 2, 2, 2)
    conv_transpose3d(x, w, activation="relu", precision="ieee")
    assert conv_transpose3d in seen


def test_dispatch_mode_sees_one_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        conv_transpose3d(torch.randn(1, 2, 2, 2, 2), torch.randn(2, 2, 2, 2, 2), activation="relu")
    assert seen.count("convt3d.conv_transpose3d_core.default") == 1


def test_import_does_not_load_cuda_libraries() -> None:
    import subprocess
    import sys

    code = (
        "import convt3d, convt3d._native as n; assert n._native is None; "
        "import torch; assert not torch.cuda.is_initialized(); print(convt3d.__version__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == convt3d.__version__


UNKNOWN: dict[str, Callable[..., Tensor]] = {
    "batch": lambda x, w, b, keep: conv_transpose3d(x[keep], w, b, 2, 1, 1, activation="relu"),
    "batch-and-add": lambda x, w, b, keep: conv_transpose3d(
        x[keep], w, b, 2, add=x.new_ones(4, 3, 8, 1, 1)[keep], activation="silu"
    ),
    "broadcast-add": lambda x, w, b, keep: conv_transpose3d(x[keep], w, b, 2, add=x.new_ones(3, 1, 1, 1)),
    "depth": lambda x, w, b, keep: conv_transpose3d(x[:, :, keep], w, b, 2, 1, 1),
    "width": lambda x, w, b, keep: conv_transpose3d(x[..., keep], w, b, 2, 1, 1, activation="tanh"),
    "unbatched": lambda x, w, b, keep: conv_transpose3d(x[0, :, keep], w, b, 2),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("channels_last", [False, True])
def test_sizes_that_only_the_data_tell(name: str, backend: str, channels_last: bool) -> None:
    torch._dynamo.reset()
    x, w, b = torch.randn(4, 2, 4, 4, 4), torch.randn(2, 3, 2, 2, 2), torch.randn(3)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(UNKNOWN[name], backend=backend, fullgraph=True)
        for keep in ([True, False, True, True], [True, True, False, False]):
            mask = torch.tensor(keep)
            expected = UNKNOWN[name](x, w, b, mask)
            assert torch.equal(compiled(x, w, b, mask), expected)
    # What was not known while tracing is still checked when it runs.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        wrong = torch.compile(
            lambda x, w, keep, other: conv_transpose3d(x[keep], w, add=x.new_ones(4, 3, 1, 1, 1)[other]),
            backend=backend,
            fullgraph=True,
        )
        with pytest.raises(RuntimeError):
            wrong(x, w, torch.tensor([True] * 4), torch.tensor([True, True, False, False]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_slope_that_is_an_argument(backend: str, grad: bool) -> None:
    """Not a constant of the graph: one graph where torch.compile itself makes one of F.leaky_relu."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def call(x: Tensor, w: Tensor, slope: float) -> Tensor:
        return conv_transpose3d(x, w, stride=2, activation="leaky_relu", negative_slope=slope)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    x, w = torch.randn(2, 4, 3, 3, 3), torch.randn(4, 2, 2, 2, 2, requires_grad=grad)
    for slope in (0.01, 0.25, 0.5, -1.0):
        plain, fast = call(x, w, slope), compiled(x, w, slope)
        assert torch.equal(fast, plain)
        if grad:
            a, b = (torch.autograd.grad(out.sum(), w)[0] for out in (plain, fast))
            torch.testing.assert_close(a, b)
    if backend == "eager":
        assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_geometry_that_is_an_argument(backend: str) -> None:
    """Integers that change from call to call become symbols, as they do for PyTorch's own operators."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def call(x: Tensor, w: Tensor, stride: int, groups: int) -> Tensor:
        return conv_transpose3d(x, w, None, (stride, stride, 2), groups=groups, activation="relu")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    x, w = torch.randn(1, 8, 2, 2, 2), torch.randn(8, 3, 2, 2, 2)
    for stride, groups in ((1, 2), (2, 4), (3, 8), (4, 1), (5, 2)):
        assert torch.equal(compiled(x, w, stride, groups), call(x, w, stride, groups))
    assert counter.frame_count == 2, "a constant at first, a symbol from then on"


def test_a_slope_that_only_the_data_tell() -> None:
    class Learned(nn.Module):
        def forward(self, x: Tensor, w: Tensor, slope: Tensor) -> Tensor:
            return conv_transpose3d(x, w, activation="leaky_relu", negative_slope=slope.item())

    torch._dynamo.reset()
    model, x, w = Learned(), torch.randn(1, 2, 3, 3, 3), torch.randn(2, 2, 2, 2, 2)
    program = torch.export.export(model, (x, w, torch.tensor(0.125))).module()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for value in (0.5, -0.25):
            slope = torch.tensor(value)
            assert torch.equal(compiled(x, w, slope), model(x, w, slope))
            assert torch.equal(program(x, w, slope), model(x, w, slope))


def test_export_with_an_unknown_batch() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = FusedConvTranspose3d(2, 3, 2, 2, activation="relu")

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.up(x[keep])  # type: ignore[no-any-return]

    model, x = Masked().eval(), torch.randn(4, 2, 3, 3, 3)
    program = torch.export.export(model, (x, torch.tensor([True, False, True, True]))).module()
    for keep in ([True, True, False, False], [False] * 4):
        mask = torch.tensor(keep)
        assert torch.equal(program(x, mask), model(x, mask))
