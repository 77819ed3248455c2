# SPDX-License-Identifier: Apache-2.0
"""The kernel of the backward pass by itself: grad_output * act'(t) in place, and each channel's sum of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accuracy import ulp
from cases import ACTIVATIONS
from convt3d import _native
from convt3d._activations import ACTIVATIONS as TABLE

pytestmark = pytest.mark.gpu

SLOPE = 0.2
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
Shape = tuple[int, int, int, int, int]


def run(grad: Tensor, t: Tensor | None, activation: str, sums: bool = True) -> Tensor:
    result = _native.activation_backward_(grad, t, activation, SLOPE, sums)
    assert result is not None, "the library did not take the call"
    return result


def check(grad: Tensor, t: Tensor, activation: str) -> None:
    """Values, surroundings, sums and repeatability, on copies of ``t`` in memory that holds nan."""
    slope = TABLE[activation].backward(torch.ones_like(t.double()), t.double(), SLOPE)
    expected = grad.double() * slope
    function = 2.0**-21 * grad.double().abs() * slope.abs().clamp_min(1.0)
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    offset = t.storage_offset() % 16
    results = []
    for sums in (True, True, False):
        buffer = torch.full((offset + reach + 64,), torch.nan, dtype=t.dtype, device="cuda")
        out = buffer.as_strided(t.shape, t.stride(), offset)
        out.copy_(t)
        before = grad.clone()
        summed = run(grad, out, activation, sums)
        assert torch.equal(grad, before)
        error = (out.double() - expected).abs()
        assert bool((error <= function + ulp(expected, t.dtype) / 2).all()), f"error {error.max().item()}"
        channel_error = (summed.double() - expected.sum((0, 2, 3, 4))).abs() if sums else summed.double()
        allowed = function.sum((0, 2, 3, 4)) + 2.0**-21 * expected.abs().sum((0, 2, 3, 4))
        assert summed.shape == ((t.shape[1],) if sums else (0,)) and summed.dtype == torch.float32
        assert bool((channel_error <= allowed[: summed.numel()]).all())
        results.append((out.clone(), summed))
        out.fill_(torch.nan)
        assert bool(buffer.isnan().all()), "wrote outside of t"
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[2][0])
    alone = run(grad, None, "none")
    total = grad.double().sum((0, 2, 3, 4))
    assert bool(((alone.double() - total).abs() <= 2.0**-21 * grad.double().abs().sum((0, 2, 3, 4))).all())


def check_turned(grad: Tensor, t: Tensor, activation: str) -> None:
    """In channels-last order, into memory of nan: the other kernels' bits, in place as well and alone."""
    expected = t.clone()
    sums = run(grad, expected, activation)
    for in_place in (True, False):
        buffer = torch.full((t.numel() + 64,), torch.nan, dtype=t.dtype, device="cuda")
        c, d, h, w = t.shape[1:]
        out = buffer.as_strided(t.shape, (c * d * h * w, 1, h * w * c, w * c, c))
        own = t.clone()
        summed = _native.activation_backward_(grad, own, activation, SLOPE, True, out, in_place)
        assert summed is not None, "the library did not take the call"
        assert torch.equal(out, expected) and torch.equal(own, expected if in_place else t)
        assert bool(buffer[t.numel() :].isnan().all())
        torch.testing.assert_close(summed, sums, rtol=1e-4, atol=1e-2)


def draw(shape: Shape, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape, device="cuda")).to(dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "ncdhw": lambda t: t.contiguous(),
    "ndhwc": lambda t: t.contiguous(memory_format=torch.channels_last_3d),
    "depth-first": lambda t: t.permute(0, 2, 1, 3, 4).contiguous().permute(0, 2, 1, 3, 4),
    "reversed": lambda t: t.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0),
    "channel-slice": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "ndhwc-channel-slice": lambda t: torch.cat([t, t, t], 1).contiguous(memory_format=torch.channels_last_3d)[
        :, t.shape[1] : 2 * t.shape[1]
    ],
    "cropped": lambda t: torch.nn.functional.pad(t, (1, 2, 1, 1, 2, 1))[..., 2:-1, 1:-1, 1:-2],
    "every-other": lambda t: t.repeat_interleave(2, 4)[..., ::2],
}
SHAPES: tuple[Shape, ...] = (
    (2, 16, 4, 6, 8),
    (3, 5, 3, 5, 7),
    (1, 1, 1, 1, 1),
    (4, 64, 1, 1, 1),
    (1, 3, 17, 19, 23),
    (2, 300, 2, 3, 3),
    (1, 2056, 1, 2, 1),
)


@TYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_layouts(shape: Shape, layout: str, dtype: torch.dtype) -> None:
    t, grad = draw(shape, dtype), draw(shape, dtype)
    same = LAYOUTS[layout]
    check(same(grad), same(t), "silu")
    check(grad, same(t), "x_hardswish")
    check(same(grad), t, "gelu")


@TYPES
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activations(activation: str, layout: str, dtype: torch.dtype) -> None:
    t = draw((2, 24, 9, 10, 11), dtype)
    t.view(-1)[:5] = torch.tensor([-3.0, 0.0, 3.0, -20.0, 20.0])
    same = LAYOUTS[layout]
    check(same(draw((2, 24, 9, 10, 11), dtype)), same(t), activation)


@TYPES
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
def test_broadcast_gradients(layout: str, dtype: torch.dtype) -> None:
    """A summed or averaged loss has one value everywhere; others repeat along some dimensions."""
    shape: Shape = (3, 16, 5, 6, 7)
    t = LAYOUTS[layout](draw(shape, dtype))
    for own in ((1, 1, 1, 1, 1), (3, 16, 1, 1, 1), (3, 1, 5, 6, 7), (1, 1, 5, 1, 7), (3, 1, 1, 1, 1)):
        check(draw(own, dtype).expand(shape), t, "silu")  # type: ignore[arg-type]


@TYPES
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
def test_offset_views(layout: str, dtype: torch.dtype) -> None:
    """Tensors that begin at any element of an allocation."""
    shape: Shape = (2, 8, 3, 4, 5)
    for t_offset, grad_offset in ((1, 1), (3, 3), (2, 0), (0, 5), (7, 4)):
        t, grad = LAYOUTS[layout](draw(shape, dtype)), LAYOUTS[layout](draw(shape, dtype))
        moved = []
        for tensor, offset in ((t, t_offset), (grad, grad_offset)):
            buffer = torch.empty(tensor.numel() + offset, dtype=dtype, device="cuda")
            moved.append(buffer.as_strided(shape, tensor.stride(), offset).copy_(tensor))
        check(moved[1], moved[0], "hardswish")


@TYPES
@pytest.mark.parametrize("activation", ["silu", "x_hardswish"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 64, 4, 8, 16),
        (1, 72, 3, 5, 8),
        (3, 8, 1, 1, 8),
        (1, 200, 9, 9, 16),
        (2, 16, 30, 31, 8),
        (4, 128, 20, 8, 8),
    ],
    ids=str,
)
def test_channels_last_as_well(shape: Shape, activation: str, dtype: torch.dtype) -> None:
    t = draw(shape, dtype)
    check_turned(draw(shape, dtype), t, activation)
    check_turned(draw((1, 1, 1, 1, 1), dtype).expand(shape), t, activation)
    check_turned(torch.cat([t, draw(shape, dtype)], 1)[:, shape[1] :], t, activation)


def test_more_elements_than_blocks_take_at_once() -> None:
    for layout in ("ncdhw", "ndhwc"):
        same = LAYOUTS[layout]
        check(
            same(draw((2, 40, 50, 60, 70), torch.float32)),
            same(draw((2, 40, 50, 60, 70), torch.float32)),
            "tanh",
        )


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_kinks_and_nonfinite_values(activation: str) -> None:
    """What the installed torch gives on the GPU for the same pre-activation."""
    points = [-3.0, 0.0, -0.0, 3.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan]
    t = torch.tensor(points, device="cuda").view(1, 1, 1, 1, -1)
    grad = torch.full_like(t, 1.5)
    expected = TABLE[activation].backward(grad, t, SLOPE)
    run(grad, t, activation)
    torch.testing.assert_close(t, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_an_empty_tensor() -> None:
    t = torch.empty(0, 4, 2, 2, 2, device="cuda")
    assert torch.equal(run(t, t.clone(), "relu"), torch.zeros(4, device="cuda"))


def test_what_is_not_for_the_library_is_left_alone() -> None:
    t = draw((1, 2, 3, 4, 5), torch.float32)
    before = t.clone()
    for grad in (t.double(), t.cpu(), t[0], t[..., :-1], t.half()):
        assert _native.activation_backward_(grad, t, "relu", 0.0, True) is None
    assert _native.activation_backward_(t, None, "relu", 0.0, True) is None
    assert _native.activation_backward_(t, t.expand(1, 2, 3, 4, 5), "none", 0.0, True) is None
    overlapping = t.as_strided((2, 1, 3, 4, 5), (1, 60, 20, 5, 1))
    grad = draw((2, 1, 3, 4, 5), torch.float32)
    assert _native.activation_backward_(grad, overlapping, "relu", 0.0, True) is None
    assert torch.equal(t, before)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
def test_more_than_2_to_31_elements(layout: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    shape: Shape = (1025, 64, 32, 32, 32)
    memory_format = torch.contiguous_format if layout == "ncdhw" else torch.channels_last_3d
    t = torch.empty(shape, dtype=torch.bfloat16, device="cuda", memory_format=memory_format).fill_(2.0)
    grad = torch.zeros_like(t)
    places = (0, 512, 1024)
    for place in places:
        grad[place] = 1.0
    summed = run(grad, t, "x_hardswish")  # the slope at 2 is 4
    for place in (*places, 1, 511, 1023):
        assert bool((t[place] == (4.0 if place in places else 0.0)).all())
    assert torch.equal(summed, torch.full((64,), 3 * 4.0 * 32**3, device="cuda"))
