# SPDX-License-Identifier: Apache-2.0
"""Training steps on a GPU: their memory, their bits, and the layouts in which the convolutions run."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Case, Tensors
from convt3d import _grad_pre
from convt3d._grad_pre import to_channels_last, to_contiguous
from gradient_accuracy import assert_gradients
from test_gradient_accuracy import gradients

pytestmark = pytest.mark.gpu

CASE = Case(cin=16, cout=24, size=(3, 4, 6), negative_slope=0.2)
LAYOUTS = pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])


def spy(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each backward pass: whether its convolutions ran on the channels-last gradient."""
    turned: list[bool] = []
    real = _grad_pre.GradPre.for_convolutions

    def watch(self: _grad_pre.GradPre) -> Tensor:
        turned.append(self.ndhwc is not None)
        return real(self)

    monkeypatch.setattr(_grad_pre.GradPre, "for_convolutions", watch)
    return turned


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("add", ["none", "full", "channel", "plane"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ["none", "silu", "x_hardswish"])
def test_convolutions_in_channels_last(
    activation: str, order: str, add: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grad_pre, "_LEAST_BYTES", 0)
    turned = spy(monkeypatch)
    case = replace(
        CASE, activation=activation, add_order=order, add=add, dtype=dtype, precision="tf32", name=""
    )
    tensors = case.make("cuda")
    grad = torch.randn(case.output_shape(), device="cuda").to(dtype)
    got = gradients(case, tensors, grad)
    assert turned == [True]
    wide = dtype == torch.float32
    assert_gradients(case, tensors, grad, got, "tf32" if wide else "16-bit", "aten tf32" if wide else "aten")
    for tensor in got:
        assert tensor is None or tensor.is_contiguous()


def test_what_keeps_convolutions_in_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(CASE, activation="silu", dtype=torch.float16, name="")
    cases = {
        "small": base,
        "odd-channels": replace(base, cout=12),
        "groups": replace(base, groups=2),
        "ieee": replace(base, dtype=torch.float32, precision="ieee"),
        "channels-last": replace(base, input_channels_last=True),
        "odd-rows": replace(base, output_padding=(0, 0, 0)),
    }
    turned = spy(monkeypatch)
    for name, case in cases.items():
        monkeypatch.setattr(_grad_pre, "_LEAST_BYTES", 2**24 if name == "small" else 0)
        tensors = case.make("cuda")
        grad = torch.randn(case.output_shape(), device="cuda").to(case.dtype)
        gradients(case, tensors, grad)
        assert turned == [False], name
        turned.clear()
    monkeypatch.setattr(_grad_pre, "_LEAST_BYTES", 0)
    monkeypatch.setenv("CONVT3D_KERNEL", "aten")
    tensors = base.make("cuda")
    gradients(base, tensors, torch.randn(base.output_shape(), device="cuda").half())
    assert turned == [False]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize(
    "shape",
    [(2, 16, 4, 4, 8), (1, 8, 1, 1, 8), (3, 72, 5, 6, 8), (2, 6, 3, 3, 3), (4, 64, 16, 16, 16)],
    ids=str,
)
def test_turning_a_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bit for bit, whether the kernel takes it or not."""
    tensor = torch.randn(shape, device="cuda").to(dtype)
    turned = to_channels_last(tensor)
    assert turned.is_contiguous(memory_format=torch.channels_last_3d) and torch.equal(turned, tensor)
    back = to_contiguous(turned)
    assert back.is_contiguous() and torch.equal(back, tensor)
    assert to_channels_last(turned) is turned
    assert to_contiguous(tensor) is tensor
    part = tensor[:, ::2]
    assert torch.equal(to_channels_last(part), part) and torch.equal(to_contiguous(part), part)


def leaves_of(case: Case) -> Tensors:
    tensors = case.make("cuda")
    for tensor in tensors.present():
        tensor.requires_grad_()
    return tensors


def step(case: Case, tensors: Tensors, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(case.call(tensors), tensors.present(), grad)


def eager_step(case: Case, tensors: Tensors, grad: Tensor) -> tuple[Tensor, ...]:
    t = F.conv_transpose3d(tensors.input, tensors.weight, tensors.bias, **case.conv_arguments())
    if tensors.add is not None:
        t = t + tensors.add
    return torch.autograd.grad(t * F.hardswish(t), tensors.present(), grad)


def _settled_memory() -> int:
    """Allocated bytes; waits for autograd's thread, which lets go of a step's gradients in its own time."""
    gc.collect()
    amounts = [torch.cuda.memory_allocated()]
    for _ in range(100):
        if len(amounts) >= 4 and len(set(amounts[-4:])) == 1:
            break
        time.sleep(0.05)
        amounts.append(torch.cuda.memory_allocated())
    return amounts[-1]


@LAYOUTS
def test_memory_of_a_training_step(channels_last: bool) -> None:
    """Beside inputs and grad_output: the output, grad_pre (which is grad_add), and convolution workspace.

    cuDNN's in NCDHW holds a channels-last copy of grad_pre; ours is that copy.
    """
    case = Case(
        batch=32,
        cin=32,
        cout=64,
        size=(16, 16, 16),
        activation="x_hardswish",
        precision="tf32",
        input_channels_last=channels_last,
        weight_channels_last=channels_last,
    )
    tensors = leaves_of(case)
    assert tensors.add is not None
    grad = torch.randn_like(tensors.add)
    size = grad.nbytes
    peaks = {}
    for name, function in (("ours", step), ("eager", eager_step)):
        function(case, tensors, grad)
        torch.cuda.synchronize()
        before = _settled_memory()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        function(case, tensors, grad)
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        assert _settled_memory() == before
    small = 0.2 * size  # gradients of input and weight, prepared weights, cuDNN's own workspace
    assert peaks["ours"] <= (2 if channels_last else 3) * size + small
    assert peaks["ours"] <= 0.7 * peaks["eager"]


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_repeat_bit_for_bit(channels_last: bool, dtype: torch.dtype) -> None:
    """In PyTorch's deterministic mode all of them, as eager's; those without a convolution always."""
    case = Case(
        batch=8,
        cin=32,
        cout=64,
        size=(16, 16, 16),
        activation="x_hardswish",
        dtype=dtype,
        input_channels_last=channels_last,
        weight_channels_last=channels_last,
    )
    tensors = leaves_of(case)
    grad = torch.randn(case.output_shape(), device="cuda").to(dtype)
    for deterministic in (False, True):
        with torch.backends.cudnn.flags(enabled=True, deterministic=deterministic, allow_tf32=True):
            first = step(case, tensors, grad)
            for _ in range(5):
                again = step(case, tensors, grad)
                for a, b in list(zip(first, again, strict=True))[0 if deterministic else 2 :]:
                    assert torch.equal(a, b)


def test_ten_thousand_calls_hold_no_memory() -> None:
    case = Case(batch=1, cin=8, cout=8, size=(4, 4, 4), activation="silu")
    tensors = case.make("cuda")
    with torch.no_grad():
        for _ in range(10):
            out = case.call(tensors)
        torch.cuda.synchronize()
        del out
        gc.collect()  # what earlier tests left in cycles must not be freed in between
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(10_000):
            case.call(tensors)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == reserved


def test_a_thousand_training_steps_hold_no_memory() -> None:
    case = Case(batch=1, cin=8, cout=8, size=(4, 4, 4), activation="silu")
    tensors = leaves_of(case)
    grad = torch.randn(case.output_shape(), device="cuda")
    for _ in range(10):
        step(case, tensors, grad)
    torch.cuda.synchronize()
    before, reserved = _settled_memory(), torch.cuda.memory_reserved()
    for _ in range(1000):
        step(case, tensors, grad)
    torch.cuda.synchronize()
    assert _settled_memory() == before
    assert torch.cuda.memory_reserved() == reserved


def test_a_training_step_in_a_cuda_graph() -> None:
    """Nothing in the backward pass allocates outside the graph's pool, synchronises, or remembers a call."""
    case = Case(batch=2, cin=16, cout=32, size=(8, 8, 8), activation="x_hardswish", precision="ieee")
    tensors = leaves_of(case)
    grad = torch.randn(case.output_shape(), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(case, tensors, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(case, tensors, grad)
    for seed in (1, 2):
        fresh = case.make("cuda", seed=seed)
        with torch.no_grad():
            for target, source in zip(tensors.present(), fresh.present(), strict=True):
                target.copy_(source)
            grad.normal_()
        graph.replay()
        assert_gradients(case, fresh, grad, captured, "ieee", "aten")
