# SPDX-License-Identifier: Apache-2.0
"""What explain() says, value by value: path, reasons, precision, error bound, traffic, work and floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accuracy import C, allowed_error, exact
from cases import NAMED, Case, random_cases
from convt3d import _kernel_query, _native, explain
from test_library import built

REFERENCE = NAMED[0]


@pytest.fixture
def library() -> None:
    built("libconvt3d.so")


@pytest.mark.parametrize(
    ("changes", "factor", "text"),
    [
        ({"precision": "ieee"}, 2.0**-20, "1/2 ulp(float32) + L * 2^-20 * (sum |x||w| + |bias| + |add|)"),
        (
            {"precision": "tf32"},
            2.0**-19,
            "1/2 ulp(float32) + L * 2^-19 * (sum |x||w| + |bias| + |add|), for operands rounded to TF32",
        ),
        (
            {"dtype": torch.float16},
            2.0**-20,
            "1/2 ulp(float16) + L * 2^-20 * (sum |x||w| + |bias| + |add|)",
        ),
        ({"dtype": torch.float64}, 2.0**-50, "1/2 ulp(float64) + L * 2^-50 * (sum |x||w| + |bias| + |add|)"),
        ({"dtype": torch.complex64, "activation": "none"}, None, "as PyTorch's"),
        ({"dtype": torch.int64, "activation": "relu"}, None, "exact"),
    ],
    ids=["ieee", "tf32", "fp16", "fp64", "complex", "int"],
)
def test_error_bound(changes: dict[str, Any], factor: float | None, text: str) -> None:
    case = replace(Case(activation="silu"), **changes)
    e = case.explain(case.make())
    assert (e.error_factor, e.error_bound) == (factor, text)
    assert e.rounds_operands == (case.precision == "tf32")
    assert text in str(e)


def test_the_bound_that_is_told_is_the_bound_that_is_judged_by() -> None:
    """Every output is within what explain() says, by its numbers alone."""
    for case in random_cases(5, 25, (torch.float32, torch.bfloat16, torch.float64)):
        case = replace(case, activation="none")  # L is 1
        t = case.make()
        e = case.explain(t)
        y, pre, magnitude = exact(case, t, tf32=e.rounds_operands)
        half_ulp, allowed = allowed_error(case, y, pre, magnitude, _mode(e))
        assert e.error_factor is not None
        torch.testing.assert_close(allowed, e.error_factor * magnitude)
        assert ((case.call(t).double() - y).abs() <= half_ulp + e.error_factor * magnitude).all()


def _mode(e: Any) -> str:
    return next(mode for mode, c in C.items() if c * 2.0**-22 == e.error_factor)


def test_the_fallback_on_a_gpu_promises_less(force_kernel: Callable[[str], None]) -> None:
    """cuDNN's algorithms and its TF32 are not ours to bound."""
    force_kernel("aten")
    for setting, factor in (("tf32", 2.0**-9), ("ieee", 2.0**-18)):
        torch.backends.cudnn.conv.fp32_precision = setting
        e = REFERENCE.explain(REFERENCE.make("meta"))
        assert (e.path, e.precision, e.error_factor) == ("aten + tail", setting, factor)
        assert not e.rounds_operands


DEPTHWISE: dict[str, Any] = {
    "batch": 1, "cin": 64, "cout": 64, "groups": 64, "stride": (1, 1, 1), "output_padding": (0, 0, 0),
}  # fmt: skip


LONG_SUMS: dict[str, Any] = {
    "batch": 2, "cin": 256, "cout": 256, "size": (8, 8, 8), "stride": (1, 1, 1), "output_padding": (0, 0, 0),
    "precision": "ieee",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"cin": 33, "cout": 33, "groups": 33, "stride": (9, 1, 1), "output_padding": (0, 0, 0)},
            {"sm90": "groups is 33", "sm80": "with groups, a stride is 9"},
        ),
        ({"dtype": torch.float64}, {"sm90": "torch.float64", "sm80": "torch.float64"}),
        ({"dtype": torch.complex64, "activation": "none"}, {"sm90": "complex64", "sm80": "complex64"}),
        ({"batch": 0}, {"sm90": "the output is empty", "sm80": "the output is empty"}),
        ({"stride": (65, 1, 1), "output_padding": (0, 0, 0)}, {"sm90": "stride", "sm80": "stride"}),
        (
            DEPTHWISE | {"size": (48, 48, 48)},
            {"sm90": "groups is 64", "sm80": "ATen computes such groups faster"},
        ),
        (
            LONG_SUMS,
            dict.fromkeys(("sm90", "sm80"), "ATen computes such long sums faster"),
        ),
    ],
    ids=["groups", "double", "complex", "empty", "stride", "large depthwise", "long sums"],
)
def test_why_no_kernel_takes_a_call(changes: dict[str, Any], reasons: dict[str, str], library: None) -> None:
    case = replace(REFERENCE, **changes)
    e = case.explain(case.make("meta"))
    assert e.path == "aten + tail" and e.workspace_bytes == 0
    assert set(e.refused) == set(reasons)
    for kernel, reason in reasons.items():
        assert reason in e.refused[kernel]
        assert f"not {kernel}" in str(e)


def test_depthwise_problems_that_are_not_left_to_aten(
    library: None, force_kernel: Callable[[str], None]
) -> None:
    """Smaller ones, channels last, 16-bit types, strides; and where the kernel is asked for."""
    large = replace(REFERENCE, **DEPTHWISE, size=(48, 48, 48))
    others: tuple[dict[str, Any], ...] = (
        {"size": (16, 16, 16)},
        {"input_channels_last": True},
        {"dtype": torch.float16},
        {"stride": (1, 1, 2)},
    )
    for changes in others:
        case = replace(large, **changes)
        assert case.explain(case.make("meta")).path == "sm80", changes
    force_kernel("sm80")
    assert large.explain(large.make("meta")).path == "sm80"


def test_long_sums_that_are_not_left_to_aten(library: None, force_kernel: Callable[[str], None]) -> None:
    """Other types and precisions, strides, few channels; and where the kernel is asked for."""
    long = replace(REFERENCE, **LONG_SUMS)
    others: tuple[dict[str, Any], ...] = (
        {"precision": "tf32"},
        {"dtype": torch.float16},
        {"stride": (1, 1, 2)},
        {"cin": 16},
    )
    for changes in others:
        case = replace(long, **changes)
        assert case.explain(case.make("meta")).path in ("sm80", "sm90"), changes
    # Groups one after the other go to the faster family.
    groups: dict[str, Any] = {"groups": 2, "cin": 604, "cout": 596, "size": (35, 11, 13)}
    case = replace(long, **groups, kernel=(2, 5, 4), padding=(1, 2, 2))
    assert case.explain(case.make("meta")).path == "sm80"
    force_kernel("sm80")
    assert long.explain(long.make("meta")).path == "sm80"


def test_each_faster_path_has_its_reason(library: None) -> None:
    """On an SM90 GPU, or for one where there is none: nothing is refused without a word."""
    order = ["sm90", "sm80", "aten + tail"]
    for case in (*NAMED, *random_cases(9, 60, (torch.float32, torch.float16, torch.float64))):
        e = case.explain(case.make("meta"))
        assert list(e.refused) == order[: order.index(e.path)], case
        assert all(len(reason) > 5 for reason in e.refused.values()), case


def test_a_kernel_that_was_asked_for(library: None, force_kernel: Callable[[str], None]) -> None:
    force_kernel("sm80")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    e = REFERENCE.explain(REFERENCE.make("meta"))
    assert e.path == "sm80"
    assert e.refused == {"sm90": "CONVT3D_KERNEL asks for sm80"}


def test_bytes_count_what_is_in_memory_once() -> None:
    """A residual that is expanded is read as often as it is stored."""
    case = Case(bias=False, add="none")
    t = case.make()
    out = case.call(t)
    plain = case.explain(t).bytes
    assert plain == t.input.nbytes + t.weight.nbytes + out.nbytes
    row = torch.randn(6, 1, 1, 1)
    for add in (row, row.expand(6, 6, 8, 10), row.expand(2, 6, 6, 8, 10)):
        e = explain(t.input, t.weight, None, **case.conv_arguments(), add=add)
        assert e.bytes == plain + row.nbytes
    assert explain(t.input[:0], t.weight, None, **case.conv_arguments()).bytes == t.weight.nbytes


def test_floor_and_intensity() -> None:
    t = REFERENCE.make("meta")
    e = explain(t.input, t.weight, t.bias, add=t.add, **REFERENCE.arguments(), bandwidth=4e12)
    assert e.floor_seconds == e.bytes / 4e12
    assert e.arithmetic_intensity == e.flops / e.bytes
    assert f"{e.bytes / 4e12 * 1e3:.4g} ms at 4 TB/s" in str(e)
    if not torch.cuda.is_available():
        unknown = REFERENCE.explain(t)
        assert unknown.floor_seconds is None and "floor" not in str(unknown)
    on_cpu = Case().explain(Case().make())
    assert on_cpu.bandwidth is None


class FakeGpu:
    """torch.cuda as it answers on a machine with two GPUs, of which the second is another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **memory: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(_native, "_native", _native.Native(forward=lambda *a: None))
        monkeypatch.setattr(_kernel_query, "current_device", lambda: (_kernel_query.Device(90, 132), ""))
        self.memory = memory

    def properties(self, index: int) -> SimpleNamespace:
        major = 9 if index == 0 else 8
        return SimpleNamespace(major=major, minor=0, multi_processor_count=132, **self.memory)


def test_the_gpus_nominal_bandwidth(monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    FakeGpu(monkeypatch, memory_clock_rate=3_201_000, memory_bus_width=6144)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    e = REFERENCE.explain(REFERENCE.make("meta"))
    assert e.bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert e.floor_seconds == e.bytes / e.bandwidth  # type: ignore[operator]
    assert "the bandwidth is nominal" in e.note and "no GPU" not in e.note
    t = REFERENCE.make("meta")
    given = explain(t.input, t.weight, t.bias, add=t.add, **REFERENCE.arguments(), bandwidth=1e12)
    assert given.bandwidth == 1e12 and "nominal" not in given.note


def test_a_gpu_of_which_torch_tells_less(monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    FakeGpu(monkeypatch)
    e = REFERENCE.explain(REFERENCE.make("meta"))
    assert e.bandwidth is None and e.floor_seconds is None


def test_the_tensors_gpu_counts_and_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch, library: None
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeGpu(monkeypatch)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    paths = []
    case = replace(REFERENCE, size=(16, 16, 16))
    with FakeTensorMode():
        for device in ("cuda:0", "cuda:1"):
            made = vars(case.make("meta")).values()
            x, w, b, add = (torch.empty(t.shape, device=device) for t in made)
            e = explain(x, w, b, add=add, **REFERENCE.arguments())
            paths.append(e.path)
    assert paths[0] == "sm90" and paths[1] == "sm80"
    assert "sm90" in e.refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about an SM90 GPU")
def test_a_faster_family_may_be_left_aside(library: None) -> None:
    """sm90 takes a 4^3 image, whose tiles would be mostly empty."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    e = replace(REFERENCE, size=(4, 4, 4)).explain(REFERENCE.make("meta"))
    assert e.path == "sm80"
    assert e.refused == {"sm90": "it takes the call, but sm80 is likely to be faster"}


@pytest.mark.parametrize("what", ["binding", "device"])
def test_what_a_gpu_machine_lacks(what: str, monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    FakeGpu(monkeypatch)
    if what == "binding":
        monkeypatch.setattr(_native, "_native", _native.Native(reason="it does not load"))
    else:
        monkeypatch.setattr(_kernel_query, "current_device", lambda: (None, "it does not load"))
    e = REFERENCE.explain(REFERENCE.make("meta"))
    assert e.path == "aten + tail"
    assert set(e.refused.values()) == {"it does not load"}


def test_other_devices() -> None:
    """A device without a kernel of its own, by a stand-in: none can be had here."""
    case = Case()
    t = case.make("meta")

    class Elsewhere:
        """Answers as a tensor on such a device does."""

        device = torch.device("xpu")

    from convt3d._explain import _path
    from convt3d._problem import Problem

    problem = Problem.create(
        t.input, t.weight, t.bias, *(getattr(case, n) for n in ("stride", "padding", "output_padding")),
        case.groups, case.dilation, t.add, "before", "none", 0.01, "default",
    )  # fmt: skip
    path, refused, note, workspace = _path(
        replace(problem, device=Elsewhere.device), "ieee", t.input, t.weight, t.bias, t.add, None
    )
    assert (path, note, workspace) == ("aten + tail", "", 0)
    assert set(refused.values()) == {"the tensors are on xpu"}


def test_a_skip_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="skip must be a Tensor, got int"):
        explain(torch.zeros(1, 2, 2, 2, 2), torch.zeros(2, 3, 2, 2, 2), None, 2, skip=1)  # type: ignore[arg-type]
