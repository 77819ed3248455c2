# SPDX-License-Identifier: Apache-2.0
"""Threads, forks, and the state of the process: what calls may not disturb, and what may not disturb them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import Case, Tensors
from convt3d import FusedConvTranspose3d, _native, conv_transpose3d
from convt3d._precision import conv_fp32_switch

KINDS = (
    Case(activation="x_hardswish"),
    Case(activation="gelu", dtype=torch.float16, input_channels_last=True),
    Case(activation="silu", dtype=torch.bfloat16, add="channel"),
    Case(activation="tanh", precision="tf32"),
    Case(activation="relu", precision="ieee", add_order="after"),
    Case(activation="elu", dtype=torch.float64, groups=2),
)


def in_threads(*work: Callable[[], None]) -> None:
    """Runs all at once and raises the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(function: Callable[[], None]) -> None:
        try:
            start.wait(30)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def gradients(case: Case, tensors: Tensors) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors.present()]
    out = case.call(Tensors(*leaves))
    return (out.detach(), *torch.autograd.grad(out.square().sum(), leaves))


@pytest.fixture
def bf16_switch() -> Iterator[None]:
    """PyTorch's CPU switch allows bf16, so that explicit precisions have something to hold against."""
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    yield
    torch.backends.mkldnn.conv.fp32_precision = "none"


def test_concurrent_calls(one_thread: None, bf16_switch: None) -> None:
    """Forward and backward of every kind at once, each in its own arithmetic; the switch is as it was."""
    # A "default" call would follow the switch, which the explicit ones change meanwhile.
    cases = [c if c.dtype != torch.float32 else replace(c, precision=c.precision or "ieee") for c in KINDS]
    tensors = [case.make(seed=i) for i, case in enumerate(cases)]
    expected: list[tuple[Tensor, ...]] = []
    for case, t in zip(cases, tensors, strict=True):
        # In a thread, too: how many threads of its own a call may use is a property of the thread.
        in_threads(lambda case=case, t=t: expected.append(gradients(case, t)))  # type: ignore[misc]

    def work(index: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(15):
                got = gradients(cases[index], tensors[index])
                assert all(torch.equal(a, b) for a, b in zip(got, expected[index], strict=True)), cases[index]

        return run

    in_threads(*(work(i) for i in range(len(cases))))
    assert torch.backends.mkldnn.conv.fp32_precision == "bf16"


def test_modes_are_each_threads_own(one_thread: None) -> None:
    """Autocast, no_grad and inference_mode in one thread do not reach another."""
    module = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="silu")
    x = torch.randn(1, 4, 3, 3, 3)

    def autocast() -> None:
        for _ in range(30):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert module(x).dtype == torch.bfloat16

    def no_grad() -> None:
        with torch.no_grad():
            for _ in range(30):
                out = module(x)
                assert out.dtype == torch.float32 and not out.requires_grad

    def inference() -> None:
        with torch.inference_mode():
            assert all(module(x).is_inference() for _ in range(30))

    def plain() -> None:
        for _ in range(30):
            out = module(x)
            assert out.requires_grad and out.dtype == torch.float32

    in_threads(autocast, no_grad, inference, plain)


def test_the_library_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []

    def load() -> _native.Native:
        loads.append(1)
        time.sleep(0.05)
        return _native.Native(reason="not in this test")

    monkeypatch.setattr(_native, "_native", None)
    monkeypatch.setattr(_native, "_load", load)
    seen: list[_native.Native] = []
    in_threads(*(lambda: seen.append(_native.native()) for _ in range(8)))
    assert len(loads) == 1 and len(set(map(id, seen))) == 1


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
import os, sys, threading, time
import torch, convt3d
from convt3d._precision import conv_fp32_switch
torch.set_num_threads(1)
torch.manual_seed(0)
x, w = torch.randn(1, 4, 3, 3, 3), torch.randn(4, 6, 3, 3, 3, requires_grad=True)

def call():
    y = convt3d.conv_transpose3d(x, w, stride=2, activation="silu", precision="tf32")
    return y.detach(), torch.autograd.grad(y.sum(), w)[0]

expected = call()
torch.backends.mkldnn.conv.fp32_precision = "bf16"
inside = threading.Event()

def hold():
    with conv_fp32_switch("ieee", "cpu"):
        inside.set()
        time.sleep(0.5)

holder = threading.Thread(target=hold)
holder.start()
inside.wait()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(60)
    same = all(torch.equal(a, b) for a, b in zip(call(), expected))
    untouched = torch.backends.mkldnn.conv.fp32_precision == "bf16"
    os._exit(0 if same and untouched else 1)
_, status = os.waitpid(child, 0)
holder.join()
again = all(torch.equal(a, b) for a, b in zip(call(), expected))
print("child", os.waitstatus_to_exitcode(status), "parent", again)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_while_another_thread_holds_the_switch() -> None:
    """The child gets neither a lock that nobody will release nor the other thread's setting."""
    assert python(FORK).strip() == "child 0 parent True"


def test_the_switch_block_is_reentrant_and_free_again() -> None:
    with conv_fp32_switch("ieee", "cuda"), conv_fp32_switch("ieee", "cuda"):
        pass
    in_threads(lambda: conv_fp32_switch("tf32", "cuda").__enter__() and None)  # does not wait


def test_import_changes_nothing_of_torch() -> None:
    code = """
import torch
def state():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.benchmark, torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().sum().item(),
            torch.cuda.is_initialized())
before = state()
import convt3d
convt3d.conv_transpose3d(torch.zeros(1, 2, 2, 2, 2), torch.zeros(2, 2, 2, 2, 2), activation="relu")
print(before == state())
"""
    assert python(code).strip() == "True"


@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case.activation}-{str(case.dtype)[6:]}")
def test_the_surroundings_do_not_change_a_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default type and device, the determinism switch, flush-to-zero: all of it is other people's state."""
    tensors = case.make()
    expected = gradients(case, tensors)

    def same() -> None:
        got = gradients(case, tensors)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))

    with torch.device("meta"):
        same()
    torch.set_default_dtype(torch.float64)
    try:
        same()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)  # which also fills new memory with nan
    try:
        same()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    same()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_nothing_grows_over_10_000_calls(one_thread: None) -> None:
    """Neither memory nor live objects, with gradients and without."""
    x, w = torch.randn(1, 2, 2, 2, 2), torch.randn(2, 2, 2, 2, 2, requires_grad=True)
    add = torch.randn(1, 2, 4, 4, 4)

    def calls(count: int) -> None:
        for i in range(count):
            out = conv_transpose3d(x, w, None, 2, add=add, activation="silu", precision="ieee")
            if i % 10 == 0:
                out.sum().backward()
                w.grad = None

    calls(500)
    gc.collect()
    objects, before = len(gc.get_objects()), resident_bytes()
    calls(10_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resident_bytes() - before < 4 * 2**20
