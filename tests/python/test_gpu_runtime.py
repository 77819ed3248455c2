# SPDX-License-Identifier: Apache-2.0
"""Streams, graphs, threads and repeatability on a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accuracy import assert_accurate
from cases import Case, Tensors
from convt3d import FusedConvTranspose3d, ModelNew, conv_transpose3d
from families import Family, families, own_families
from toolchain import needs_python_headers

pytestmark = pytest.mark.gpu

CASE = Case(batch=4, cin=32, cout=64, size=(8, 8, 8), activation="x_hardswish", precision="ieee")


def case_for(family: Family) -> Case:
    return replace(CASE, precision="tf32") if family.name == "sm90" else CASE


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_report_18_bitwise_repeatable(dtype: torch.dtype, family: Family) -> None:
    torch.backends.cudnn.deterministic = True  # where a call lands on it
    ran = False
    try:
        for layout in (False, True):
            case = replace(case_for(family), dtype=dtype, input_channels_last=layout)
            tensors = case.make("cuda")
            if not family.takes(case, tensors):
                continue
            ran = True
            first = family.call(case, tensors)
            for _ in range(20):
                assert torch.equal(family.call(case, tensors), first)
    finally:
        torch.backends.cudnn.deterministic = False
    if not ran:
        pytest.skip(f"{family} takes neither layout: {family.refusal}")


@pytest.mark.parametrize("family", ["sm80", "auto"], indirect=True)
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_sums_in_parts_are_repeatable(dtype: torch.dtype, channels_last: bool, family: Family) -> None:
    """Few voxels and many channels: blocks share a sum, and its parts are added in one order."""
    case = Case(
        batch=1,
        cin=512,
        cout=256,
        size=(4, 4, 4),
        dtype=dtype,
        precision="tf32",
        activation="leaky_relu",
        input_channels_last=channels_last,
        weight_channels_last=channels_last,
    )
    tensors = case.make("cuda")
    first = family.call(case, tensors)
    assert_accurate(case, tensors, first)
    busy = torch.randn(2048, 2048, dtype=torch.float16, device="cuda")
    for index in range(20):
        if index % 2:
            busy = torch.tanh(busy @ busy)
        assert torch.equal(family.call(case, tensors), first)


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
def test_repeatable_under_load(dtype: torch.dtype, channels_last: bool, family: Family) -> None:
    """Tiles are handed out dynamically: other work changes who computes what, and no bit of the result."""
    case = replace(
        case_for(family),
        batch=8,
        cin=32,
        cout=64,
        size=(16, 16, 16),
        dtype=dtype,
        input_channels_last=channels_last,
    )
    tensors = case.make("cuda")
    family.require(case, tensors)
    expected = family.call(case, tensors)
    assert_accurate(case, tensors, expected)
    busy = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    load = torch.cuda.Stream()
    outs = []
    overlapped = 0
    for _ in range(30):  # each call behind some milliseconds of load, however late this thread gets to it
        with torch.cuda.stream(load):
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
        outs.append(family.call(case, tensors))
        overlapped += not load.query()
    torch.cuda.synchronize()
    assert overlapped > 0, "the load was over before every call was enqueued"
    assert all(torch.equal(out, expected) for out in outs)


@families
def test_report_23_side_stream(family: Family) -> None:
    """Inputs are produced late on a side stream; a launch on another stream would read them too early."""
    case = case_for(family)
    tensors = case.make("cuda")
    family.require(case, tensors)
    expected = family.call(case, tensors)
    late = Tensors(*(None if t is None else torch.zeros_like(t) for t in vars(tensors).values()))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for target, source in zip(late.present(), tensors.present(), strict=True):
            target.copy_(source)
        out = family.call(case, late)
    stream.synchronize()
    if family.name == "aten":
        assert_accurate(case, tensors, out)  # cuDNN need not repeat itself
    else:
        assert torch.equal(out, expected)


@own_families
def test_does_not_synchronise(family: Family) -> None:
    case = case_for(family)
    tensors = case.make("cuda")
    family.require(case, tensors)
    family.call(case, tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        family.call(case, tensors)
        torch.cuda._sleep(200_000_000)
        marker = torch.cuda.Event()
        marker.record()
        family.call(case, tensors)
        assert not marker.query(), "the call waited for the stream"
    finally:
        torch.cuda.set_sync_debug_mode("default")


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_report_34_cuda_graph_replays_with_changed_contents(dtype: torch.dtype, family: Family) -> None:
    case = replace(case_for(family), dtype=dtype)
    static = case.make("cuda")
    family.require(case, static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            family.call(case, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = family.call(case, static)
    for seed in (1, 2, 3):
        fresh = case.make("cuda", seed=seed)
        for target, source in zip(static.present(), fresh.present(), strict=True):
            target.copy_(source)  # weights too
        graph.replay()
        assert_accurate(case, fresh, out)


@needs_python_headers
def test_compile_reduce_overhead_sees_updates() -> None:
    torch._dynamo.reset()
    module = FusedConvTranspose3d(32, 64, 3, 2, 1, 1, activation="x_hardswish", precision="ieee").cuda()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            case = replace(CASE, bias=True)
            fresh = case.make("cuda", seed=seed)
            assert fresh.bias is not None and module.bias is not None
            module.weight.copy_(fresh.weight)
            module.bias.copy_(fresh.bias)
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(fresh.input, fresh.add).clone()
            assert_accurate(case, fresh, out)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_python_headers)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiled_training_step(backend: str, channels_last: bool) -> None:
    torch._dynamo.reset()
    case = replace(CASE, input_channels_last=channels_last)
    results = []
    for compiled in (False, True):
        leaves = [t.requires_grad_() for t in case.make("cuda").present()]

        def step(x: Tensor, w: Tensor, b: Tensor, add: Tensor) -> Tensor:
            return conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="x_hardswish", precision="ieee")

        function = torch.compile(step, backend=backend, fullgraph=True) if compiled else step
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append((out, *grads))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(plain, fast, rtol=1e-4, atol=1e-4)
        assert plain.stride() == fast.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_gradients_against_float64(order: str, dtype: torch.dtype) -> None:
    case = replace(CASE, dtype=dtype, add_order=order, batch=2)
    tensors = case.make("cuda").present()
    grad = torch.randn(case.output_shape(), device="cuda").to(dtype)
    ours, eager, exact = (
        [t.clone().to(kind).requires_grad_() for t in tensors] for kind in (dtype, dtype, torch.float64)
    )
    for leaves in (ours, exact):
        x, w, b, add = leaves
        out = conv_transpose3d(
            x, w, b, 2, 1, 1, add=add, activation="x_hardswish", precision="ieee", add_order=order
        )
        out.backward(grad.to(out.dtype))
    x, w, b, add = eager
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        t = F.conv_transpose3d(x, w, b, 2, 1, 1)
        t = t + add if order == "before" else t
        out = t * F.hardswish(t)
        (out if order == "before" else out + add).backward(grad)
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None and true.grad is not None
        error, eager_error = ((g.grad.double() - true.grad).abs().max() for g in (mine, theirs))  # type: ignore[union-attr]
        # 16-bit: the derivative jumps at 3; a rounded pre-activation may lie on its other side, eager's too.
        allowed = 1e-5 * true.grad.abs().max() if dtype == torch.float32 else 1.5 * eager_error
        assert error <= allowed


def test_gradgradcheck_double() -> None:
    x = torch.randn(1, 2, 2, 1, 2, dtype=torch.float64, device="cuda", requires_grad=True)
    w = torch.randn(2, 2, 3, 2, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    call = lambda x, w: conv_transpose3d(x, w, None, 2, 1, 1, activation="silu")  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w), nondet_tol=1e-10)
    assert torch.autograd.gradgradcheck(call, (x, w), fast_mode=True, nondet_tol=1e-10)


def test_opcheck_on_cuda() -> None:
    t = replace(CASE, size=(3, 3, 3), cin=8, cout=8).make("cuda")
    for tensor in t.present():
        tensor.requires_grad_()
    torch.library.opcheck(
        torch.ops.convt3d.conv_transpose3d.default,
        (
            t.input,
            t.weight,
            t.bias,
            [2] * 3,
            [1] * 3,
            [1] * 3,
            1,
            [1] * 3,
            t.add,
            "before",
            "silu",
            0.01,
            "ieee",
        ),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_report_27_autocast(dtype: torch.dtype) -> None:
    case = replace(CASE, precision=None)
    tensors = case.make("cuda")
    with torch.autocast("cuda", dtype=dtype):
        out = case.call(tensors)
        theirs = F.conv_transpose3d(tensors.input, tensors.weight, tensors.bias, **case.conv_arguments())
    assert out.dtype == theirs.dtype == dtype
    cast = Tensors(*(None if t is None else t.to(dtype) for t in vars(tensors).values()))  # type: ignore[arg-type]
    narrow = replace(case, dtype=dtype)
    assert torch.equal(out, narrow.call(cast))
    assert_accurate(narrow, cast, out)


def test_both_ways_into_the_operator_agree() -> None:
    """The short way (no gradient) and the registered operator give the same bits."""
    tensors = CASE.make("cuda")
    short = CASE.call(tensors)
    tensors.weight.requires_grad_()
    long = CASE.call(tensors)
    assert long.requires_grad and torch.equal(long, short)


def test_report_07_empty_batch_and_zero_size() -> None:
    x, w = torch.randn(0, 4, 3, 3, 3, device="cuda"), torch.randn(4, 6, 3, 3, 3, device="cuda")
    assert conv_transpose3d(x, w, stride=2).shape == (0, 6, 7, 7, 7)
    x, w = torch.randn(2, 4, 1, 3, 3, device="cuda"), torch.randn(4, 6, 2, 3, 3, device="cuda")
    assert conv_transpose3d(x, w, padding=(1, 0, 0)).shape == (2, 6, 0, 5, 5)


def test_unbatched() -> None:
    tensors = CASE.make("cuda")
    assert tensors.add is not None
    whole = CASE.call(tensors)
    one = conv_transpose3d(
        tensors.input[0],
        tensors.weight,
        tensors.bias,
        2,
        1,
        1,
        add=tensors.add[0],
        activation="x_hardswish",
        precision="ieee",
    )
    torch.testing.assert_close(one, whole[0], rtol=1e-5, atol=1e-5)


def test_threads() -> None:
    kinds = [{"dtype": dtype} for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    # Two shapes of each, which want different amounts of shared memory of one kernel.
    cases = [
        replace(CASE, cin=cin, size=(4, width, width), **kind)  # type: ignore[arg-type]
        for kind in (*kinds, {"precision": "tf32"})
        for cin, width in ((16, 8), (256, 16))
    ]
    tensors = [case.make("cuda", seed=i) for i, case in enumerate(cases)]
    expected = [case.call(t) for case, t in zip(cases, tensors, strict=True)]
    torch.cuda.synchronize()
    wrong: list[int | Exception] = []

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    if not torch.equal(cases[index].call(tensors[index]), expected[index]):
                        wrong.append(index)
        except Exception as error:  # a thread's end is nobody's failure
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@families
def test_first_call_of_a_fresh_thread(family: Family) -> None:
    """Memory from the allocator's cache, so that nothing has bound a CUDA context to the thread before."""
    case = case_for(family)
    tensors = case.make("cuda")
    expected = family.call(case, tensors)
    results: list[Tensor] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(case.call(tensors))
        except Exception as error:
            errors.append(error)

    family.call(case, tensors)  # leaves its output's memory to the thread
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert_accurate(case, tensors, results[0])
    if family.name != "aten":  # cuDNN promises no bits
        assert torch.equal(results[0], expected)


def test_report_34_no_stale_results() -> None:
    """Two calls with changed inputs or weights, in place and otherwise, in reused memory."""
    model = ModelNew(32, 64, 3, 2, 1, 1, (64, 1, 1, 1, 1)).cuda()
    x, add = torch.randn(2, 32, 8, 8, 8, device="cuda"), torch.randn(2, 64, 16, 16, 16, device="cuda")
    torch.backends.cudnn.conv.fp32_precision = "ieee"

    def check() -> None:
        conv = model.conv_transpose
        assert conv.bias is not None
        case = replace(CASE, batch=2, precision=None)
        with torch.no_grad():
            tensors = Tensors(x, conv.weight.detach(), conv.bias.detach(), add)
            assert_accurate(case, tensors, model(x, add))

    check()
    x.normal_()
    check()
    add.uniform_()
    check()
    model.conv_transpose.weight.data.normal_(std=0.1)
    check()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x, add).square().mean().backward()
    optimiser.step()
    check()
    model.load_state_dict(ModelNew(32, 64, 3, 2, 1, 1, (64, 1, 1, 1, 1)).state_dict())
    check()
    for _ in range(3):
        x = torch.randn_like(x)  # memory comes back from the allocator's pool
        check()


def test_functorch_and_forward_mode_on_cuda() -> None:
    import torch.autograd.forward_ad as forward_ad

    x = torch.randn(2, 3, 2, 2, 2, device="cuda", dtype=torch.float64)
    w = torch.randn(3, 2, 2, 2, 2, device="cuda", dtype=torch.float64)

    def ours(x: Tensor) -> Tensor:
        return conv_transpose3d(x, w, stride=2, activation="tanh")

    def theirs(x: Tensor) -> Tensor:
        return F.conv_transpose3d(x, w, stride=2).tanh()

    torch.testing.assert_close(torch.func.jvp(ours, (x,), (x,))[1], torch.func.jvp(theirs, (x,), (x,))[1])
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, x))).tangent
        expected = forward_ad.unpack_dual(theirs(forward_ad.make_dual(x, x))).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, expected)
    torch.testing.assert_close(torch.func.vmap(ours)(x), theirs(x))
