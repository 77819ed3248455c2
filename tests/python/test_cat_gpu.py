# SPDX-License-Identifier: Apache-2.0
"""conv_transpose3d_cat on a GPU: values on poisoned memory, training, CUDA graphs and torch.compile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accuracy import judge, mode_of
from cases import NAMED, Case, Tensors, random_cases, random_hopper_case
from cat_calls import call, make_skip
from convt3d import _native

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def poison(case: Case, channels: int) -> None:
    """Leaves nan where the allocator will put the result."""
    n, c, *size = case.output_shape()
    blocks = [torch.full((n, c + channels, *size), float("nan"), device="cuda") for _ in range(3)]
    blocks += [torch.full((2**k,), float("nan"), device="cuda") for k in (7, 9, 14, 18, 20, 22)]
    del blocks


def check_on_gpu(case: Case, seed: int, into: list[bool]) -> None:
    channels = (8, 3, 16, 1)[seed % 4]
    t = case.make("cuda", seed)
    skip = make_skip(case, channels, case.channels_last() != (seed % 5 == 0), "cuda")
    skip_first = seed % 3 == 0
    mode = case.explain(t)
    del into[:]
    poison(case, channels)
    result = call(case, t, skip, skip_first)
    torch.cuda.synchronize()
    start = channels if skip_first else 0
    up = result.narrow(1, start, case.cout)
    other = result.narrow(1, 0 if skip_first else case.cout, channels)
    assert torch.equal(other, skip)
    path = "sm80" if into and into[-1] else mode.path
    tf32 = (case.precision or "tf32") == "tf32"
    verdict = judge(case, t, up, mode_of(case, tf32, path))
    assert not verdict.failure, verdict.failure
    whole = case.call(t)
    assert result.stride() == torch.cat([skip, whole] if skip_first else [whole, skip], 1).stride()


@pytest.fixture
def into(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernels took each call that was to go into a slice, by either way into the binding."""
    found: list[bool] = []
    real, loaded = _native.call_into, _native.native()

    def spy(*arguments: Any) -> bool:
        found.append(real(*arguments))
        return found[-1]

    def quick_cat(*arguments: Any) -> Tensor | None:
        result: Tensor | None = loaded.quick_cat(*arguments)
        if result is not None:  # what it leaves, `call_into` takes or refuses
            found.append(True)
        return result

    monkeypatch.setattr(_native, "call_into", spy)
    monkeypatch.setattr(_native, "_native", replace(loaded, quick_cat=quick_cat))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "sm80", "aten"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_values(
    kernel: str, dtype: torch.dtype, into: list[bool], force_kernel: Callable[[str], None]
) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    force_kernel(kernel)
    taken = 0
    cases = [*NAMED, *random_cases(3, 30, (dtype,))]
    rng = random.Random(4)
    cases += [random_hopper_case(rng) for _ in range(20)]
    for seed, case in enumerate(cases):
        for last in (False, True):
            here = replace(case, dtype=dtype, input_channels_last=last, weight_channels_last=False)
            check_on_gpu(here, seed, into)
            taken += bool(into and into[-1])
    assert taken == 0 if kernel == "aten" else taken > len(cases)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_gpu_training_step(channels_last: bool) -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    case = Case(cin=16, cout=8, size=(4, 4, 8), input_channels_last=channels_last, activation="leaky_relu")
    t, skip = case.make("cuda"), make_skip(case, 8, channels_last, "cuda")
    leaves = [x.requires_grad_() for x in (*t.present(), skip)]
    result = call(case, t, skip)
    cotangent = torch.randn_like(result)
    grads = torch.autograd.grad(result, leaves, cotangent)
    expected = torch.autograd.grad(torch.cat([case.call(t), skip], 1), leaves, cotangent)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "aten"])
def test_gpu_without_a_batch(kernel: str, force_kernel: Callable[[str], None]) -> None:
    force_kernel(kernel)
    case = Case(batch=1, cin=16, cout=8, size=(4, 4, 8), activation="gelu")
    t, skip = case.make("cuda"), make_skip(case, 8, device="cuda")
    assert t.add is not None
    one = Tensors(t.input[0], t.weight, t.bias, t.add[0])
    result = call(case, one, skip[0])
    torch.testing.assert_close(result, torch.cat([case.call(one), skip[0]]))


@pytest.mark.gpu
def test_gpu_graph_and_compile() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    case = Case(cin=32, cout=16, size=(8, 8, 8), add="none", activation="relu")
    t, skip = case.make("cuda"), make_skip(case, 16, device="cuda")
    expected = call(case, t, skip)
    compiled = torch.compile(lambda s: call(case, t, s), fullgraph=True)
    assert torch.equal(compiled(skip), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(case, t, skip)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
