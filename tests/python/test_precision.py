# SPDX-License-Identifier: Apache-2.0
"""fp32 arithmetic: TF32 rounding, the switch, and operands of every magnitude."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from accuracy import assert_accurate
from cases import Case, Tensors
from convt3d import FusedConvTranspose3d, _precision, conv_transpose3d, explain
from convt3d._precision import conv_fp32_switch, resolve_precision, round_to_tf32

LARGEST_TF32 = 0x7F7FE000


def bits(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.float32).copy())


def to_bits(tensor: torch.Tensor) -> list[int]:
    return [int(v) for v in tensor.numpy().view(np.uint32)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x00000000, 0x00000000),
        (0x80000000, 0x80000000),
        (0x3F800000, 0x3F800000),
        (0x3F800FFF, 0x3F800000),  # below the tie
        (0x3F801000, 0x3F800000),  # a tie goes to even: down
        (0x3F801001, 0x3F802000),  # above the tie
        (0x3F803000, 0x3F804000),  # a tie goes to even: up
        (0xBF803000, 0xBF804000),
        (0x3FFFF000, 0x40000000),  # carries into the exponent
        (0x00001000, 0x00000000),  # subnormals round too
        (0x00001001, 0x00002000),
        (0x007FF000, 0x00800000),  # the largest subnormals become normal
        (0x7F7FFFFF, LARGEST_TF32),  # the largest finite value does not become infinite
        (0xFF7FFFFF, 0x80000000 | LARGEST_TF32),
        (0x7F7FF000, LARGEST_TF32),
        (0x7F7FEFFF, LARGEST_TF32),
        (0x7F800000, 0x7F800000),  # infinities
        (0xFF800000, 0xFF800000),
        (0x7FFFFFFF, 0x7FFFFFFF),  # nans
        (0x7F800001, 0x7F800001),
        (0xFF800001, 0xFF800001),
        (0xFFFFFFFF, 0xFFFFFFFF),
    ],
)
def test_tf32_rounding_of_bit_patterns(value: int, expected: int) -> None:
    assert to_bits(round_to_tf32(bits(value))) == [expected]


def test_tf32_rounding_against_float64_arithmetic() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.exp2(
        torch.randint(-100, 100, (100_000,)).float()
    )
    exponent = torch.frexp(x.double())[1] - 1
    spacing = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 10)
    expected = torch.round(x.double() / spacing) * spacing  # torch.round ties to even
    assert torch.equal(round_to_tf32(x).double(), expected)


def test_tf32_rounding_of_strided_and_scalar_tensors() -> None:
    x = torch.randn(4, 6)[:, ::2]
    assert torch.equal(round_to_tf32(x), round_to_tf32(x.contiguous()))
    assert torch.equal(round_to_tf32(x.expand(2, 4, 3)), round_to_tf32(x).expand(2, 4, 3))
    assert round_to_tf32(torch.tensor(1.0)).item() == 1.0


@pytest.mark.parametrize("activation", ["none", "x_hardswish"])
def test_explicit_tf32_rounds_operands_on_a_cpu(activation: str) -> None:
    case = Case(cin=16, cout=8, precision="tf32", activation=activation)
    tensors = case.make()
    result = case.call(tensors)
    assert_accurate(case, tensors, result)
    ieee = replace(case, precision="ieee").call(tensors)
    assert_accurate(replace(case, precision="ieee"), tensors, ieee)
    assert (result - ieee).abs().max() > 1e-5  # it really is another arithmetic


def test_precision_does_not_touch_other_types() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        case = Case(dtype=dtype)
        tensors = case.make()
        results = [replace(case, precision=p).call(tensors) for p in (None, "ieee", "tf32")]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_default_follows_the_switch_when_the_operator_runs() -> None:
    conv = torch.backends.cudnn.conv
    for setting, expected in (("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")):
        conv.fp32_precision = setting
        # "none" may fall back to a more general setting of PyTorch's: whatever it reads as is what counts.
        wanted = "tf32" if conv.fp32_precision == "tf32" else "ieee"
        assert resolve_precision("default", "cuda") == wanted
        if setting != "none":
            assert wanted == expected
        assert resolve_precision("tf32", "cuda") == "tf32"
        assert resolve_precision("ieee", "cuda") == "ieee"
        assert resolve_precision("default", "cpu") == "ieee"


def test_default_follows_every_setting(general: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older switch, which speaks for all of cuDNN, and the newer ones, also where they differ."""
    conv, rnn = general.cudnn.conv, general.cudnn.rnn
    before = rnn.fp32_precision
    monkeypatch.setattr(_precision, "_flags_differ", False)

    def check() -> None:
        wanted = "tf32" if conv.fp32_precision == "tf32" else "ieee"
        assert _precision.conv_precision() == wanted and resolve_precision("default", "cuda") == wanted

    try:
        for allowed in (True, False, True):
            general.cudnn.allow_tf32 = allowed
            check()
            assert _precision.conv_precision() == ("tf32" if allowed else "ieee")
        assert not _precision._flags_differ
        for ours in ("tf32", "ieee", "none"):
            for theirs in ("ieee", "none", "tf32"):
                conv.fp32_precision, rnn.fp32_precision = ours, theirs
                check()
        assert _precision._flags_differ
        for setting in ("ieee", "tf32"):
            general.cudnn.allow_tf32 = setting == "tf32"
            check()
            general.fp32_precision = setting
            check()
    finally:
        general.cudnn.allow_tf32 = True
        rnn.fp32_precision = before


def test_default_is_the_operators_word_and_not_the_users() -> None:
    x, w = torch.zeros(1, 2, 2, 2, 2), torch.zeros(2, 2, 2, 2, 2)
    for call in (
        lambda: conv_transpose3d(x, w, precision="default"),
        lambda: explain(x, w, precision="default"),
        lambda: FusedConvTranspose3d(2, 2, 2, precision="default"),
    ):
        with pytest.raises(ValueError, match="must be None, 'ieee' or 'tf32', got 'default'"):
            call()


def test_the_switch_is_restored_and_only_touched_where_it_differs() -> None:
    conv = torch.backends.cudnn.conv
    conv.fp32_precision = "tf32"
    with conv_fp32_switch("tf32", "cuda"):
        assert conv.fp32_precision == "tf32"
    with conv_fp32_switch("default", "cuda"):
        assert conv.fp32_precision == "tf32"
    with pytest.raises(KeyError), conv_fp32_switch("ieee", "cuda"):
        assert conv.fp32_precision == "ieee"
        raise KeyError
    assert conv.fp32_precision == "tf32"


@pytest.fixture
def general() -> Iterator[Any]:
    """``torch.backends``, whose settings are put back."""
    backends = torch.backends
    cuda, cpu = backends.cudnn.conv, backends.mkldnn.conv
    before = cuda.fp32_precision
    yield backends
    backends.fp32_precision = "none"
    cpu.fp32_precision = "none"
    cuda.fp32_precision = before


@pytest.mark.parametrize(
    ("device", "own", "inherited", "found"),
    [
        ("cuda", "none", "tf32", "none"),
        ("cuda", "none", "ieee", "ieee"),
        ("cuda", "none", "none", "none"),
        ("cuda", "tf32", "none", "tf32"),
        ("cuda", "tf32", "ieee", "tf32"),
        ("cuda", "ieee", "tf32", "ieee"),
        ("cpu", "none", "bf16", "none"),
        ("cpu", "bf16", "ieee", "bf16"),
        ("cpu", "none", "none", "none"),
    ],
)
def test_the_switch_goes_on_following_a_general_setting(
    device: str, own: str, inherited: str, found: str, general: Any
) -> None:
    """Behind the block it reads as before, and a change of the general setting reaches it as before."""
    conv = (general.cudnn if device == "cuda" else general.mkldnn).conv
    conv.fp32_precision, general.fp32_precision = own, inherited
    before = conv.fp32_precision
    for precision in ("tf32", "ieee"):
        with conv_fp32_switch(precision, device):
            assert conv.fp32_precision in (precision, "ieee", "none")
        assert conv.fp32_precision == before
    for later in ("ieee", "tf32" if device == "cuda" else "bf16", "none"):
        general.fp32_precision = later
        assert conv.fp32_precision == (later if found == "none" else found)


def test_an_explicit_precision_outlives_another_threads_block() -> None:
    """A block that finds the switch right, because another thread has set it for a while, keeps it right."""
    conv = torch.backends.cudnn.conv
    conv.fp32_precision = "tf32"
    second_is_inside, first_is_gone = threading.Event(), threading.Event()
    seen: list[str] = []

    def second() -> None:
        with conv_fp32_switch("ieee", "cuda"):
            second_is_inside.set()
            assert first_is_gone.wait(10)
            seen.append(conv.fp32_precision)

    thread = threading.Thread(target=second)
    with conv_fp32_switch("ieee", "cuda"):
        thread.start()
        # Blocks take turns. One that got in here would see the switch change under it below.
        together = second_is_inside.wait(0.3)
    first_is_gone.set()
    thread.join(10)
    assert seen == ["ieee"] and not together
    assert conv.fp32_precision == "tf32"


def test_blocks_nest() -> None:
    conv = torch.backends.cudnn.conv
    conv.fp32_precision = "tf32"
    with conv_fp32_switch("ieee", "cuda"):
        with conv_fp32_switch("tf32", "cuda"), conv_fp32_switch("tf32", "cuda"):
            assert conv.fp32_precision == "tf32"
        assert conv.fp32_precision == "ieee"
    assert conv.fp32_precision == "tf32"


def test_a_call_within_a_block_leaves_the_fast_way_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_precision, "_flags_differ", False)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with conv_fp32_switch("ieee", "cuda"):
        assert _precision.conv_precision() == "ieee"
        assert _precision._flags_differ
    assert not _precision._flags_differ
    assert _precision.conv_precision() == "tf32"


@pytest.mark.parametrize("x_scale", [1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_ieee_operands_of_any_magnitude(x_scale: float) -> None:
    """Each tensor far from 1, with products in range."""
    case = Case(precision="ieee", cin=8, cout=8, add="none", bias=False)
    tensors = case.make()
    scaled = Tensors(tensors.input * x_scale, tensors.weight / x_scale, None, None)
    assert_accurate(case, scaled, case.call(scaled))


def test_ieee_magnitudes_within_one_tensor() -> None:
    """Every output keeps fp32 accuracy relative to its own terms, whatever else the tensor holds."""
    case = Case(precision="ieee", cin=4, cout=4, size=(4, 6, 8), add="none", bias=False)
    tensors = case.make()
    powers = torch.linspace(-30, 30, 8)
    scaled = Tensors(tensors.input * 10.0**powers, tensors.weight, None, None)
    assert_accurate(case, scaled, case.call(scaled))


def test_report_31_no_silent_tf32_in_gradients() -> None:
    case = Case(cin=16, cout=8, precision="ieee", add="none")
    t = case.make()
    x, w = t.input.requires_grad_(), t.weight.requires_grad_()
    grad = torch.randn(case.output_shape())
    case.call(t).backward(grad)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    conv_transpose3d(x64, w64, None, **case.conv_arguments()).backward(grad.double())
    for got, exact in ((x.grad, x64.grad), (w.grad, w64.grad)):
        assert got is not None and exact is not None
        assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_explicit_tf32_holds_in_gradients() -> None:
    case = Case(cin=16, cout=8, precision="tf32", add="none")
    t = case.make()
    x, w = t.input.requires_grad_(), t.weight.requires_grad_()
    grad = torch.randn(case.output_shape())
    case.call(t).backward(grad)
    x64 = round_to_tf32(x.detach()).double().requires_grad_()
    w64 = round_to_tf32(w.detach()).double().requires_grad_()
    conv_transpose3d(x64, w64, None, **case.conv_arguments()).backward(round_to_tf32(grad).double())
    for got, exact in ((x.grad, x64.grad), (w.grad, w64.grad)):
        assert got is not None and exact is not None
        assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_a_torch_without_the_fast_getter() -> None:
    """The attribute says the same."""
    for backend, module in (("cuda", torch.backends.cudnn), ("mkldnn", torch.backends.mkldnn)):
        before = _precision.fp32_precision(backend, "conv")
        try:
            for setting in ("ieee", "tf32"):
                module.conv.fp32_precision = setting
                assert _precision._by_attribute(backend, "conv") == setting
                assert _precision.fp32_precision(backend, "conv") == setting
        finally:
            module.conv.fp32_precision = before
