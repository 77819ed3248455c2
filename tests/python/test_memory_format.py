# SPDX-License-Identifier: Apache-2.0
"""Shapes and strides: the real operator, the fake one and the gradients agree with one rule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from convt3d import conv_transpose3d
from convt3d._memory_format import suggests_channels_last_3d, with_exact_strides

# (N, C, D, H, W) with size-1 dimensions in every place.
SHAPES = [
    (2, 4, 3, 2, 3),
    (1, 4, 3, 2, 3),
    (2, 1, 3, 2, 3),
    (2, 4, 1, 1, 1),
    (1, 1, 1, 1, 1),
    (1, 4, 1, 2, 1),
]
FORMATS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last_3d),
    "permuted": lambda t: t.permute(4, 2, 0, 1, 3).contiguous().permute(2, 3, 1, 4, 0),
    "sliced": lambda t: torch.cat([t, t], 4)[..., ::2],
    "sliced_channels_last": lambda t: torch.cat([t, t], 1).contiguous(memory_format=torch.channels_last_3d)[
        :, ::2
    ],
    "expanded": lambda t: t[:, :1].expand_as(t),
}


def pytorch_suggests(tensor: Tensor) -> bool:
    return suggest_memory_format(tensor) == torch.channels_last_3d


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rule_against_pytorchs(shape: tuple[int, ...], fmt: str) -> None:
    tensor = FORMATS[fmt](torch.zeros(shape))
    assert suggests_channels_last_3d(tensor.shape, tensor.stride()) == pytorch_suggests(tensor)


def test_rule_on_ambiguous_strides() -> None:
    for strides, expected in [
        ((1, 1, 1, 1, 1), False),
        ((4, 1, 4, 4, 4), True),
        ((4, 1, 1, 1, 1), False),
        ((0, 0, 0, 0, 0), False),
        ((1, 0, 1, 1, 1), False),
    ]:
        assert suggests_channels_last_3d((2, 4, 1, 1, 1), strides) == expected
    assert not suggests_channels_last_3d((2, 4, 0, 1, 1), (4, 1, 4, 4, 4))


def calls() -> Any:
    yield from itertools.product(
        SHAPES, FORMATS, ("contiguous", "channels_last"), (torch.float32, torch.float64, torch.bfloat16)
    )


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 1, 1)], ids=["k3", "k1"])
def test_report_03_fake_is_real(kernel: tuple[int, int, int]) -> None:
    """One table over formats, types and size-1 dimensions."""
    for shape, x_format, w_format, dtype in calls():
        x = FORMATS[x_format](torch.randn(shape, dtype=torch.float32).to(dtype))
        w = FORMATS[w_format](torch.randn(shape[1], 4, *kernel).to(dtype))
        arguments = {"stride": 2, "padding": 0, "output_padding": 1, "activation": "silu"}
        real = conv_transpose3d(x, w, **arguments)  # type: ignore[arg-type]
        what = f"{shape} {x_format} {w_format} {dtype}"
        last = dtype != torch.float64 and (
            suggests_channels_last_3d(x.shape, x.stride()) or suggests_channels_last_3d(w.shape, w.stride())
        )
        memory_format = torch.channels_last_3d if last else torch.contiguous_format
        wanted = torch.empty(real.shape, device="meta", memory_format=memory_format).stride()
        assert real.stride() == wanted, what
        with FakeTensorMode() as mode:
            for device in ("cpu", "cuda"):
                fake_x, fake_w = mode.from_tensor(x), mode.from_tensor(w)
                if device == "cuda":
                    fake_x = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda")
                    fake_w = torch.empty_strided(w.shape, w.stride(), dtype=dtype, device="cuda")
                fake = conv_transpose3d(fake_x, fake_w, **arguments)  # type: ignore[arg-type]
                assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, wanted, dtype), what
                assert fake.device.type == device
        meta = conv_transpose3d(
            torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta"),
            torch.empty_strided(w.shape, w.stride(), dtype=dtype, device="meta"),
            **arguments,  # type: ignore[arg-type]
        )
        assert meta.stride() == wanted, what


def test_the_add_does_not_change_the_format() -> None:
    x, w = torch.randn(2, 4, 3, 3, 3), torch.randn(4, 6, 2, 2, 2)
    add = torch.randn(2, 6, 6, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    assert conv_transpose3d(x, w, stride=2, add=add).is_contiguous()
    last = x.contiguous(memory_format=torch.channels_last_3d)
    out = conv_transpose3d(last, w, stride=2, add=add.contiguous())
    assert out.is_contiguous(memory_format=torch.channels_last_3d)


def test_unbatched_strides() -> None:
    x, w = torch.randn(4, 3, 3, 3), torch.randn(4, 6, 2, 2, 2)
    for weight in (w, w.contiguous(memory_format=torch.channels_last_3d)):
        real = conv_transpose3d(x, weight)
        with FakeTensorMode() as mode:
            fake = conv_transpose3d(mode.from_tensor(x), mode.from_tensor(weight))
        assert real.stride() == fake.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("x_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("w_format", ["contiguous", "channels_last"])
def test_report_01_gradient_strides(x_format: str, w_format: str, dtype: torch.dtype) -> None:
    x = FORMATS[x_format](torch.randn(2, 4, 3, 2, 3).to(dtype)).requires_grad_()
    w = FORMATS[w_format](torch.randn(4, 6, 3, 3, 3).to(dtype)).requires_grad_()
    b = torch.randn(6).to(dtype).requires_grad_()
    add = torch.randn(2, 6, 6, 4, 6).to(dtype).requires_grad_()
    out = conv_transpose3d(x, w, b, 2, 1, 1, add=add, activation="hardswish")
    last = dtype != torch.float64 and "channels_last" in (x_format, w_format)
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    grads = torch.autograd.grad(out, (x, w, b, add), torch.ones_like(out))
    for grad in (grads[0], grads[1], grads[3]):
        assert grad.stride() == torch.empty(grad.shape, device="meta", memory_format=memory_format).stride()
    plain = [t.detach() for t in (x, w, b, add)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t).requires_grad_() for t in plain]
        fake_out = conv_transpose3d(*fakes[:3], 2, 1, 1, add=fakes[3], activation="hardswish")
        fake_grads = torch.autograd.grad(fake_out, fakes, torch.ones_like(fake_out))
    assert [g.stride() for g in fake_grads] == [g.stride() for g in grads]


def test_with_exact_strides_copies_only_where_it_must() -> None:
    x = torch.randn(2, 1, 3, 2, 3)
    relabelled = with_exact_strides(x, channels_last=True)
    assert relabelled.data_ptr() == x.data_ptr()
    assert relabelled.stride() == torch.empty(x.shape, memory_format=torch.channels_last_3d).stride()
    assert torch.equal(relabelled, x)
    copied = with_exact_strides(torch.randn(2, 3, 3, 2, 3), channels_last=True)
    assert copied.is_contiguous(memory_format=torch.channels_last_3d)
