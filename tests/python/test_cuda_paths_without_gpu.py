# SPDX-License-Identifier: Apache-2.0
"""What Python does around the CUDA kernels, with fake CUDA tensors and a stand-in for the binding."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import NAMED, Case, Tensors
from convt3d import _aten, _autocast, _backward, _functional, _native, _ops
from convt3d._activations import ACTIVATIONS
from cuda_stand_in import Binding, arguments, install, on_cuda, problem_of

CASE = Case(activation="x_hardswish", add="channel", negative_slope=0.25)


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Binding]:
    return partial(install, monkeypatch)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def quick(case: Case, t: Tensors) -> Tensor | None:
    return _native.quick(
        (t.input, t.weight, t.bias, t.add),
        (case.stride, case.padding, case.output_padding, case.dilation),
        case.groups,
        case.add_order,
        case.activation,
        case.negative_slope,
        case.precision,
    )


def test_arguments_of_the_binding(bind: Callable[[Any], Binding], fake: FakeTensorMode) -> None:
    """The order and the codes of python/csrc/binding.cpp."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    t = on_cuda(replace(CASE, input_channels_last=True))
    result = torch.empty(1)
    binding = bind(result)
    expected = (
        t.input, t.weight, t.bias, (2, 2, 2), (1, 1, 1), (1, 1, 1), 1, (1, 1, 1), t.add, 0, 10, 0.25, 1, 0, 1,
    )  # fmt: skip
    assert _ops._forward_native(problem_of(CASE, t), arguments(CASE, t)) is result
    (call,) = binding.calls
    assert all(a is b or a == b for a, b in zip(call, expected, strict=True))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of short calls as lists, since the tensors of a fake mode have no values; none is known."""
    monkeypatch.setattr(_native, "_settings", {})
    monkeypatch.setattr(_native, "_settings_by_bits", {})
    monkeypatch.setattr(_native, "_tensor", list)


SLOPE = struct.unpack("q", struct.pack("d", 0.25))[0]


def test_packed_settings(bind: Callable[[Any], Binding], fake: FakeTensorMode, settings: None) -> None:
    """The order and the codes of quick() in python/csrc/binding.cpp and eager_rules.hpp."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    t = on_cuda(CASE)
    result = torch.empty(1)
    binding = bind(result)
    assert quick(CASE, t) is result
    (call,) = binding.calls
    assert all(a is b for a, b in zip(call[:4], (t.input, t.weight, t.bias, t.add), strict=True))
    usual = [2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert call[4] == [*usual, 10, 0, 1, SLOPE]
    after = replace(
        CASE,
        add_order="after",
        precision="ieee",
        activation="leaky_relu",
        stride=(1, 2, 3),
        padding=(3, 0, 1),
    )
    quick(after, t)
    assert binding.calls[-1][4] == [1, 2, 3, 3, 0, 1, *usual[6:], 2, 1, 0, SLOPE]
    # PyTorch's switch as it is now; for 16-bit types, too, where the binding ignores it.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    quick(CASE, t)
    assert binding.calls[-1][4] == [*usual, 10, 0, 0, SLOPE]
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    for activation, spec in ACTIVATIONS.items():
        quick(replace(CASE, activation=activation), t)
        assert binding.calls[-1][4][-4:] == [spec.code, 0, 1, SLOPE]


def test_settings_are_packed_once(
    bind: Callable[[Any], Binding], fake: FakeTensorMode, settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal ones of equal types are known, other objects or not; and no more are kept than a few."""
    t = on_cuda(CASE)
    binding = bind(torch.empty(1))
    monkeypatch.setattr(_native, "_MOST_SETTINGS", 3)

    def run(*triples: Any, slope: Any = 0.5, groups: Any = 1) -> Any:
        made = _native.quick(
            (t.input, t.weight, None, None), triples, groups, "before", "leaky_relu", slope, "tf32"
        )
        return None if made is None else binding.calls[-1][4]

    two = [2, 2, 2]
    first = run(tuple(two), 0, 0, 1)
    assert run(tuple(two), 0, 0, 1) is first
    assert run(tuple(two), 0, 0, 1, slope=float("0.5")) is first
    assert run(2, 0, 0, 1) == first
    for stride in ((2, True, 2), (2, 2.0, 2), torch.Size([2, 2, 2]), 2.0):
        assert run(stride, 0, 0, 1) is None
    assert run(2, 0, 0, True) is None and run(2, False, 0, 1) is None
    assert run(2, 0, 0, 1, groups=True) is None and run(2, 0, 0, 1, slope=1) is None
    zero, negative = run(2, 0, 0, 1, slope=0.0), run(2, 0, 0, 1, slope=-0.0)
    assert zero[-1] == 0 and negative[-1] == -(1 << 63)
    for _ in range(2):  # other objects, in turn
        assert run(2, 0, 0, 1, slope=float("0")) is zero
        assert run(2, 0, 0, 1, slope=float("-0")) is negative
    assert run(2, 0, 0, 1, slope=0) is None and run(2, 0, 0, 1, slope=False) is None
    count = len(_native._settings)
    nan = run(2, 0, 0, 1, slope=float("nan"))
    assert all(run(2, 0, 0, 1, slope=float("nan")) is nan for _ in range(5))
    assert struct.unpack("d", struct.pack("q", nan[-1]))[0] != 0.0 and len(_native._settings) == count
    assert run(2, 0, 0, True, slope=float("nan")) is None
    for padding in range(10):
        assert run(2, padding, 0, 1)[3:6] == [padding] * 3
        assert run(2, padding, 0, 1, slope=float("nan"))[3:6] == [padding] * 3
        assert len(_native._settings) <= 3 and len(_native._settings_by_bits) <= 3


def test_settings_of_inference_mode_serve_other_calls() -> None:
    with torch.inference_mode():
        kept = _native._tensor([1, 2])
    assert not kept.is_inference() and kept.tolist() == [1, 2] and kept.dtype == torch.int64


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (1, (True, 0, 0, 1)),
        (1, ((2, 2), 0, 0, 1)),
        (1, ((2, 2, True), 0, 0, 1)),
        (1, ((2, 2, 2.0), 0, 0, 1)),
        (1, ([2, 2, 2], 0, 0, 1)),
        (1, (1 << 20, 0, 0, 1)),
        (1, ((1, 1, 1 << 20), 0, 0, 1)),
        (1, (1, -1, 0, 1)),
        (1, (1, 0, (0, -1, 0), 1)),
        (1, (1, 0, 0, None)),
        (2, 0),
        (2, True),
        (2, 1 << 20),
        (3, "later"),
        (3, None),
        (4, "swish"),
        (4, 3),
        (5, 1),
        (6, "fp32"),
        (6, "default"),
        (6, True),
    ],
)
def test_the_short_way_leaves_what_is_unusual(
    argument: int, value: Any, bind: Callable[[Any], Binding], fake: FakeTensorMode
) -> None:
    binding = bind(torch.empty(1))
    t = on_cuda(CASE)
    usual: list[Any] = [(t.input, t.weight, t.bias, t.add), (2, 1, 1, 1), 1, "before", "relu", 0.01, None]
    assert _native.quick(*usual) is not None and len(binding.calls) == 1
    usual[argument] = value
    assert _native.quick(*usual) is None and len(binding.calls) == 1


def test_the_short_way_is_for_cuda_tensors(bind: Callable[[Any], Binding]) -> None:
    binding = bind(torch.empty(1))
    t = CASE.make()
    assert quick(CASE, t) is None
    assert quick(CASE, replace(t, input=None)) is None  # type: ignore[arg-type]
    assert quick(CASE, replace(t, weight=None)) is None  # type: ignore[arg-type]
    assert not binding.calls


@pytest.mark.parametrize(("kernel", "code"), [("", 0), ("auto", 0), ("sm80", 1), ("sm90", 2)])
def test_the_environment_chooses_the_kernel(
    kernel: str,
    code: int,
    bind: Callable[[Any], Binding],
    fake: FakeTensorMode,
    force_kernel: Callable[[str], None],
) -> None:
    """On the short way the binding reads it: tests/cpp/test_eager_rules.cpp."""
    force_kernel(kernel)
    binding = bind(torch.empty(1))
    t = on_cuda(CASE)
    _ops._forward_native(problem_of(CASE, t), arguments(CASE, t))
    assert binding.calls[0][13] == code
    force_kernel("aten")
    assert _ops._forward_native(problem_of(CASE, t), arguments(CASE, t)) is None
    assert len(binding.calls) == 1


# The one left out crops a gradient, and a fake CUDA tensor cannot be made contiguous by a torch without CUDA.
@pytest.mark.parametrize("case", [c for c in NAMED if "under-dilation" not in c.name], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=lambda d: str(d)[6:])
def test_a_refused_call_falls_back(
    case: Case, dtype: torch.dtype, bind: Callable[[Any], Binding], fake: FakeTensorMode
) -> None:
    """ATen's part on CUDA, as far as shapes, strides and types go, in each precision, and its gradients."""
    bind(None)
    for precision in (None, "ieee", "tf32"):
        c = replace(case, dtype=dtype, precision=precision)
        t = on_cuda(c)
        problem = problem_of(c, t)
        assert _ops._forward_native(problem, arguments(c, t)) is None
        out = _aten.forward(problem, t.input, t.weight, t.bias, t.add)
        like = problem.empty_output()
        assert (out.shape, out.stride(), out.dtype, out.device) == (
            like.shape, like.stride(), like.dtype, like.device,
        )  # fmt: skip
        mask = [True, True, t.bias is not None, t.add is not None]
        grads = _backward.backward(
            problem, torch.empty_like(out), t.input, t.weight, t.bias, t.add, mask, lambda out=out: out
        )
        wanted = _backward.empty_gradients(problem, t.input, t.weight, t.bias, t.add, mask)
        for grad, like in zip(grads, wanted, strict=True):
            assert (grad.shape, grad.stride(), grad.dtype) == (like.shape, like.stride(), like.dtype)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_the_operators_cuda_kernel(
    batched: bool, bind: Callable[[Any], Binding], fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernels take is theirs; what they refuse, and what has no outputs, runs through ATen."""
    case = replace(CASE, batch=1)
    t = on_cuda(case)
    t = t if batched else replace(t, input=t.input.squeeze(0))
    args = arguments(case, t)
    shape = case.output_shape() if batched else case.output_shape()[1:]
    kernels = torch.empty(case.output_shape(), device="cuda")
    binding = bind(kernels)
    out = _ops._forward_cuda(*args)
    assert out is kernels and len(binding.calls) == 1
    monkeypatch.setattr(_native, "quick", lambda *arguments: None)
    binding = bind(kernels)
    out = _ops._forward_cuda(*args)
    assert out is kernels if batched else out._base is kernels
    assert out.shape == shape and binding.calls[0][0].dim() == 5
    binding = bind(None)
    out = _ops._forward_cuda(*args)
    assert out is not kernels and out.shape == shape and len(binding.calls) == 1
    empty = replace(case, batch=0)
    out = _ops._forward_cuda(*arguments(empty, on_cuda(empty)))
    assert out.shape == empty.output_shape() and len(binding.calls) == 1


@pytest.mark.parametrize("text", ["an illegal memory access was encountered (status 4)", "API call failed"])
def test_failures_of_the_binding(text: str, bind: Callable[[Any], Binding], fake: FakeTensorMode) -> None:
    """No failure turns into another path with another arithmetic."""
    t = on_cuda(CASE)
    bind(RuntimeError(text))
    with pytest.raises(RuntimeError, match=re.escape(text)):
        quick(CASE, t)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        _ops._forward_native(problem_of(CASE, t), arguments(CASE, t))


def test_memory_that_runs_out(
    bind: Callable[[Any], Binding], fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises its own error when asked for the same memory; where it finds some, ours stands."""
    t = on_cuda(CASE)
    bind(RuntimeError("convt3d: cannot allocate 96 bytes of output and 32 of workspace at binding.cpp:1"))
    with pytest.raises(RuntimeError, match="cannot allocate 96"):
        quick(CASE, t)
    asked: list[int] = []

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype == torch.uint8 and device.type == "cuda"
        asked.append(size)
        if sum(asked) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError):
        quick(CASE, t)
    assert asked == [96, 32]


def test_the_binding_reports_memory_in_the_words_that_are_understood() -> None:
    source = Path(__file__).resolve().parents[2] / "python" / "csrc" / "support.hpp"
    (call,) = re.findall(
        r'STD_TORCH_CHECK\(false, ("convt3d: cannot allocate.*?)\);', source.read_text(), re.S
    )
    message = "".join(
        piece.strip('"') if piece[0] == '"' else "7" for piece in re.split(r",\s*(?=[\w\"])", call)
    )
    found = _native._OUT_OF_MEMORY.search(message)
    assert found is not None and found.groups() == ("7", "7")


def test_what_keeps_a_call_off_the_short_way() -> None:
    plain = (torch.zeros(1), torch.nn.Parameter(torch.zeros(1), requires_grad=False), None, None)
    assert _functional.nothing_in_between(plain)
    wants_grad = (torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), None, None)
    assert not _functional.nothing_in_between(wants_grad)
    with torch.no_grad():
        assert _functional.nothing_in_between(wants_grad)
    with FakeTensorMode() as mode:
        assert not _functional.nothing_in_between((mode.from_tensor(torch.zeros(1)), None, None, None))
    with FakeTensorMode():
        assert not _functional.nothing_in_between(plain)
    with torch.autograd.forward_ad.dual_level():
        assert not _functional.nothing_in_between(plain)
    torch.func.vmap(lambda x: (_expect(not _functional.nothing_in_between((x, None, None, None))), x)[1])(
        torch.zeros(2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_the_short_way(
    dtype: torch.dtype, bind: Callable[[Any], Binding], fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are cast before it, as the rule on the long way would; double keeps its type."""
    monkeypatch.setattr(_functional, "nothing_in_between", lambda tensors: True)  # fake tensors are
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    t, double = on_cuda(CASE), on_cuda(replace(CASE, dtype=torch.float64))
    result = torch.empty(1)
    binding = bind(result)
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        for given, wanted in ((t, dtype), (double, torch.float64)):
            assert CASE.call(given) is result
            tensors = binding.calls[-1][:4]
            assert [x.dtype for x in tensors] == [wanted] * 4
            assert [x.shape for x in tensors] == [x.shape for x in given.present()]
        mixed = (t.input, None, torch.zeros(1))
        assert [getattr(x, "dtype", x) for x in _autocast.after_autocast(mixed)] == [
            dtype,
            None,
            torch.float32,
        ]
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert _autocast.after_autocast(tuple(t.present()))[0] is t.input


def _expect(condition: bool) -> None:
    assert condition


def test_why_there_is_no_binding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in _native._load().reason
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_native, "KERNELS_LIBRARY", tmp_path / "none.so")
    assert "does not exist" in _native._load().reason
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(_native, "KERNELS_LIBRARY", broken)
    monkeypatch.setattr(_native, "BINDING_LIBRARY", broken)
    assert "does not load" in _native._load().reason
