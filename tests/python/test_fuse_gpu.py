# SPDX-License-Identifier: Apache-2.0
"""fuse() on the GPU: through the kernels, in both layouts, fp32 and autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import convt3d
from convt3d import _autocast
from convt3d._fuse import _module
from fuse_nets import LocalNetLike, Residual, StereoLike, ZerosSkip, calibrated, gradients, inputs, inside

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [LocalNetLike, StereoLike, ZerosSkip])
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
def test_patterns(make: Callable[[], nn.Module], channels_last: bool, autocast: torch.dtype | None) -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    args = [t.cuda() for t in inputs()]
    model = calibrated(make().cuda(), *args)
    exact = copy.deepcopy(model).double()(*(t.double() for t in args))
    if channels_last:
        model = model.to(memory_format=torch.channels_last_3d)
        args = [t.to(memory_format=torch.channels_last_3d) for t in args]

    def run() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cuda", autocast, enabled=autocast is not None):
            return model(*args)

    plain = run()
    convt3d.fuse(model)
    fused = run()
    assert fused.dtype == plain.dtype and fused.stride() == plain.stride()
    scale = exact.abs().max().item()
    error, before = ((t.double() - exact).square().mean().sqrt().item() for t in (fused, plain))
    if autocast is None:
        assert (fused - exact).abs().max().item() <= 1e-5 * scale
    else:
        assert error <= 1.05 * before


@pytest.mark.parametrize("training", [False, True])
def test_gradients(training: bool) -> None:
    args = [t.cuda() for t in inputs()]
    model = calibrated(StereoLike().cuda(), *args)
    wanted = gradients(copy.deepcopy(model), args, training)
    found = gradients(convt3d.fuse(model), args, training)
    for a, b in zip(found, wanted, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_in_a_cuda_graph() -> None:
    """Batch norm is folded anew in each replay: an update of its statistics is seen."""
    args = [t.cuda() for t in inputs()]
    model = convt3d.fuse(calibrated(StereoLike().cuda(), *args))
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(*args)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(*args)
        model.conv5[1].running_var.mul_(3)  # type: ignore[operator, union-attr]
        args[0].mul_(0.5)
        graph.replay()
        torch.testing.assert_close(out, model(*args))


def test_a_part_in_a_cuda_graph() -> None:
    """The plan goes on outside of what is captured: the convolution is in the graph all the same."""
    x, skip = (t.cuda() for t in inputs(torch.float64))
    model = convt3d.fuse(Residual().cuda().double())
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model.up(x).clone()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model.up(x)
        for _ in range(2):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(model.act(out + skip), model(x, skip))


def test_streams() -> None:
    """A result that another stream asks for is computed where the network called for it, and waited for."""
    x, skip = (t.cuda() for t in inputs(torch.float64))
    model = convt3d.fuse(Residual().cuda().double())
    stream = torch.cuda.Stream()
    with torch.no_grad():
        wanted = model(x, skip)
        x_later = x.clone()
        x.zero_()
        torch.cuda.synchronize()

        def run() -> torch.Tensor:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                x.copy_(x_later)
                y = model.up(x)
            assert type(y) is not torch.Tensor
            return model.act(y + skip)

        out = inside(run, model)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_a_parameter_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does for PyTorch's convolutions: until it ends, and with gradients afterwards."""
    weights = [torch.randn(4, 4, *size, device="cuda") for size in ((2, 2, 2), (1, 3, 1))]
    weights += [w.to(memory_format=torch.channels_last_3d) for w in weights]
    for weight in map(nn.Parameter, weights):
        with torch.no_grad():
            for value in (1.0, 2.0):
                weight.data.fill_(value)  # changes neither version nor address
                # As if casts had been of use before.
                monkeypatch.setattr(_autocast, "_used", True)
                monkeypatch.setattr(_autocast, "_without", 0)
                with torch.autocast("cuda", dtype):
                    first, second = (_autocast.after_autocast((weight,))[0] for _ in range(2))
                assert first.data_ptr() == second.data_ptr() and first.stride() == weight.stride()
                assert torch.equal(first, weight.to(dtype)) and first.dtype == dtype
        with torch.autocast("cuda", dtype):
            x = torch.randn(1, 4, 2, 2, 2, device="cuda")
            with torch.no_grad():
                convt3d.conv_transpose3d(x, weight)
            convt3d.conv_transpose3d(x, weight).sum().backward()
        assert weight.grad is not None and weight.grad.abs().max() > 0


def test_small_results_wait_while_a_graph_is_captured(
    deferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the host's time does not matter."""
    monkeypatch.setattr(_module, "WORTH_WAITING", 1 << 40)
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    args = [t.cuda() for t in inputs()]
    model = convt3d.fuse(Residual().cuda().eval())
    with torch.no_grad():
        expected = model(*args)
        assert deferred == []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(*args)
        assert deferred == ["relu"]
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
