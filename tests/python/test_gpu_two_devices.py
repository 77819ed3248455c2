# SPDX-License-Identifier: Apache-2.0
"""Tensors of one GPU while another is the current device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from accuracy import assert_accurate
from cases import Case
from families import Family, families

pytestmark = pytest.mark.gpu

CASE = Case(batch=4, cin=32, cout=64, size=(8, 8, 8), activation="x_hardswish", precision="ieee")


def case_for(family: Family) -> Case:
    return replace(CASE, precision="tf32") if family.name == "sm90" else CASE


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two_gpus
@families
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
def test_report_22_device_guard(family: Family, channels_last: bool) -> None:
    case = replace(case_for(family), input_channels_last=channels_last)
    tensors = case.make("cuda:1")
    assert torch.cuda.current_device() == 0
    out = family.call(case, tensors)
    assert out.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):  # some of torch's own operators, ldexp among them, run on the current device
        assert_accurate(case, tensors, out)
    with pytest.raises(RuntimeError, match="on one device"):
        case.call(replace(tensors, weight=tensors.weight.to("cuda:0")))


@needs_two_gpus
@pytest.mark.parametrize("kernel", ["auto", "sm80", "sm90"])
def test_report_22_first_device_untouched(kernel: str) -> None:
    """torch calls device 0 current, but puts the change to it off while nothing has been done there."""
    program = """
import torch, convt3d
torch.manual_seed(0)
torch.backends.cudnn.conv.fp32_precision = "tf32"
x, w = torch.randn(2, 32, 8, 8, 8), torch.randn(32, 64, 3, 3, 3)
case = dict(stride=2, padding=1, output_padding=1)
outs = [convt3d.conv_transpose3d(x.to("cuda:1"), w.to("cuda:1"), **case) for _ in range(3)]
assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) == 0
y64 = torch.nn.functional.conv_transpose3d(x.double(), w.double(), **case)
for out in outs:
    assert out.device == torch.device("cuda:1")
    assert (out.cpu() - y64).abs().max() < 0.1, (out.cpu() - y64).abs().max()
"""
    environment = {**os.environ, "CONVT3D_KERNEL": kernel}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr


@needs_two_gpus
def test_report_22_another_device_everywhere() -> None:
    """Gradients, a fresh thread, a stream and a graph of a device that is not the current one."""
    here, there = CASE.make("cuda:0"), CASE.make("cuda:1")
    expected = CASE.call(here)
    found: list[Tensor] = []

    def work() -> None:
        found.append(CASE.call(there))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        found.append(CASE.call(there))
        torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    # The default capture stream belongs to the device of the process's first graph.
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
        captured = CASE.call(there)
    assert torch.cuda.current_device() == 0
    captured.fill_(float("nan"))
    graph.replay()
    found.append(captured)
    torch.cuda.synchronize("cuda:1")
    for result in found:
        assert torch.equal(result.to("cuda:0"), expected)
    grads = []
    for tensors in (here, there):
        leaves = [t.requires_grad_() for t in tensors.present()]
        out = CASE.call(tensors)
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.device == torch.device("cuda:1")
        torch.testing.assert_close(theirs.to("cuda:0"), mine, rtol=1e-5, atol=1e-4)
