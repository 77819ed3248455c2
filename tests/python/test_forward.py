# SPDX-License-Identifier: Apache-2.0
"""Values on the CPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accuracy import assert_accurate
from cases import ACTIVATIONS, NAMED, Case, random_cases
from convt3d import conv_transpose3d

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def gather(x: Tensor, w: Tensor, case: Case) -> Tensor:
    """The definition, one output at a time: y[o] takes tap k from input i where o + p - k * d == s * i."""
    n, c, od, oh, ow = case.output_shape()
    out = torch.zeros(n, c, od, oh, ow, dtype=torch.float64)
    per_group_in, per_group_out = case.cin // case.groups, case.cout // case.groups
    for kd in range(case.kernel[0]):
        for kh in range(case.kernel[1]):
            for kw in range(case.kernel[2]):
                for d in range(od):
                    for h in range(oh):
                        for v in range(ow):
                            source = []
                            for axis, (o, k) in enumerate(((d, kd), (h, kh), (v, kw))):
                                reach = o + case.padding[axis] - k * case.dilation[axis]
                                i, rest = divmod(reach, case.stride[axis])
                                source.append(i if rest == 0 and 0 <= i < case.size[axis] else None)
                            if None in source:
                                continue
                            voxel = x[:, :, source[0], source[1], source[2]].double()
                            for g in range(case.groups):
                                inputs = slice(g * per_group_in, (g + 1) * per_group_in)
                                outputs = slice(g * per_group_out, (g + 1) * per_group_out)
                                out[:, outputs, d, h, v] += (
                                    voxel[:, inputs] @ w[inputs, :, kd, kh, kw].double()
                                )
    return out


@pytest.mark.parametrize(
    "case",
    [
        Case(size=(2, 3, 2)),
        Case(size=(2, 2, 3), kernel=(2, 3, 1), stride=(1, 2, 3), padding=(1, 0, 0), output_padding=(0, 1, 2)),
        Case(size=(2, 2, 2), dilation=(2, 1, 3), stride=(1, 2, 1), output_padding=(1, 0, 2), cin=4, groups=2),
    ],
    ids=["k3s2", "mixed", "dilated-groups"],
)
def test_the_definition(case: Case) -> None:
    tensors = replace(case, bias=False, add="none", dtype=torch.float64).make()
    result = conv_transpose3d(tensors.input, tensors.weight, **case.conv_arguments())
    torch.testing.assert_close(result, gather(tensors.input, tensors.weight, case), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_what_networks_run(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    tensors = case.make()
    assert_accurate(case, tensors, case.call(tensors))


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int) -> None:
    for index, case in enumerate(random_cases(seed, 40, DTYPES)):
        tensors = case.make(seed=index)
        assert_accurate(case, tensors, case.call(tensors))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_activations(activation: str, order: str, dtype: torch.dtype) -> None:
    """Pre-activations over [-6, 6], so that every piece of every activation is met."""
    case = Case(activation=activation, add_order=order, dtype=dtype, negative_slope=0.2)
    tensors = case.make(scale=2.0)
    assert_accurate(case, tensors, case.call(tensors))


def test_report_16_large_fp16_values_do_not_overflow_inside() -> None:
    """t * hardswish(t) of t = 200 is 40000, in range for fp16, though its steps in fp16 are not exact."""
    x = torch.full((1, 1, 1, 1, 1), 200.0, dtype=torch.float16)
    w = torch.ones(1, 1, 1, 1, 1, dtype=torch.float16)
    assert conv_transpose3d(x, w, activation="x_hardswish").item() == 40000.0
    # An intermediate beyond fp16's range that the add brings back.
    big = torch.full((1, 1, 1, 1, 1), 60000.0, dtype=torch.float16)
    two = torch.full((1, 1, 1, 1, 1), 2.0, dtype=torch.float16)
    assert conv_transpose3d(big, two, add=-big).item() == 60000.0


def test_sixteen_bit_rounds_once() -> None:
    """The result is the float32 result rounded: no rounding between convolution, add and activation."""
    for dtype in (torch.float16, torch.bfloat16):
        case = Case(dtype=dtype, activation="x_hardswish")
        tensors = case.make()
        wide = replace(case, dtype=torch.float32)
        exact = convert(wide, tensors)
        assert torch.equal(case.call(tensors), exact.to(dtype))


def convert(case: Case, tensors: object) -> Tensor:
    from cases import Tensors

    assert isinstance(tensors, Tensors)
    assert tensors.bias is not None and tensors.add is not None
    return case.call(
        Tensors(tensors.input.float(), tensors.weight.float(), tensors.bias.float(), tensors.add.float())
    )


def test_unbatched_input() -> None:
    case = Case(activation="silu")
    t = case.make()
    assert t.add is not None
    for add in (t.add[0], torch.ones(1), t.add[0, :, :1, :1, :1]):
        batched = conv_transpose3d(
            t.input[:1], t.weight, t.bias, 2, 1, 1, add=add.unsqueeze(0), activation="silu"
        )
        single = conv_transpose3d(t.input[0], t.weight, t.bias, 2, 1, 1, add=add, activation="silu")
        assert single.shape == batched.shape[1:]
        assert torch.equal(single, batched[0])


@pytest.mark.parametrize("value", [2, (2,), [2], (2, 2, 2), [2, 2, 2], torch.Size([2, 2, 2])])
def test_ints_and_sequences(value: object) -> None:
    x, w = torch.randn(1, 2, 3, 3, 3), torch.randn(2, 3, 2, 2, 2)
    assert torch.equal(
        conv_transpose3d(x, w, stride=value),
        F.conv_transpose3d(x, w, stride=2),  # type: ignore[arg-type]
    )


def test_positional_arguments_are_pytorchs() -> None:
    x, w, b = torch.randn(1, 4, 3, 3, 3), torch.randn(4, 3, 3, 3, 3), torch.randn(6)
    arguments = (x, w, b, (2, 1, 2), (1, 0, 1), (1, 0, 0), 2, (1, 2, 1))
    torch.testing.assert_close(conv_transpose3d(*arguments), F.conv_transpose3d(*arguments))


@pytest.mark.parametrize("channels_last", [False, True])
def test_report_07_empty_batch(channels_last: bool) -> None:
    case = Case(batch=0, activation="x_hardswish", input_channels_last=channels_last)
    tensors = case.make()
    for tensor in tensors.present():
        tensor.requires_grad_()
    out = case.call(tensors)
    assert out.shape == case.output_shape()
    out.sum().backward()
    for tensor in tensors.present():
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def test_report_06_zero_size_output() -> None:
    x, w = torch.randn(2, 4, 1, 3, 3, requires_grad=True), torch.randn(4, 6, 2, 3, 3)
    out = conv_transpose3d(x, w, padding=(1, 0, 0), activation="gelu", add=torch.randn(6, 1, 1, 1))
    assert out.shape == F.conv_transpose3d(x, w, padding=(1, 0, 0)).shape == (2, 6, 0, 5, 5)
    out.sum().backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("activation", ["none", "silu", "sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_report_29_complex(dtype: torch.dtype, activation: str) -> None:
    x, w = torch.randn(1, 2, 2, 3, 2, dtype=dtype), torch.randn(2, 3, 2, 2, 2, dtype=dtype)
    add = torch.randn(1, 3, 4, 6, 4, dtype=dtype)
    t = F.conv_transpose3d(x, w, stride=2) + add
    expected = {"none": t, "silu": F.silu(t), "sigmoid": t.sigmoid(), "tanh": t.tanh()}[activation]
    torch.testing.assert_close(conv_transpose3d(x, w, stride=2, add=add, activation=activation), expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_report_29_halves_of_complex_numbers(activation: str) -> None:
    """Rounded once; ATen has convolutions of these, but neither sums nor activations."""
    half, single = torch.complex32, torch.complex64
    x, w = torch.randn(1, 2, 2, 3, 2).to(half), torch.randn(2, 3, 2, 2, 2).to(half)
    add = torch.randn(1, 3, 4, 6, 4).to(half)
    x.requires_grad_()
    t = F.conv_transpose3d(x.to(single), w.to(single), stride=2) + add.to(single)
    expected = t.tanh() if activation == "tanh" else t
    out = conv_transpose3d(x, w, stride=2, add=add, activation=activation)
    assert out.dtype == half and torch.equal(out.to(single), expected.to(half).to(single))
    got, true = (torch.autograd.grad(y.to(single).abs().sum(), x)[0].to(single) for y in (out, expected))
    torch.testing.assert_close(got, true, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_report_29_int64(activation: str) -> None:
    x, w = torch.randint(-9, 9, (1, 2, 2, 3, 2)), torch.randint(-9, 9, (2, 3, 2, 2, 2))
    add = torch.randint(-9, 9, (3, 1, 1, 1))
    t = F.conv_transpose3d(x, w, stride=2) + add
    expected = t.relu() if activation == "relu" else t
    assert torch.equal(conv_transpose3d(x, w, stride=2, add=add, activation=activation), expected)


def test_report_25_strided_and_offset_views() -> None:
    case = Case(activation="hardswish")
    t = case.make()
    assert t.bias is not None and t.add is not None
    expected = case.call(t)
    wide = torch.randn(2, 4, 3, 4, 11)[..., 1:11:2]
    wide.copy_(t.input)
    wide_bias = torch.randn(13)[1::2]
    wide_bias.copy_(t.bias)
    wide_add = torch.randn(2, 9, *t.add.shape[2:])[:, 2:8]
    wide_add.copy_(t.add)
    weight = t.weight.permute(4, 2, 0, 1, 3).contiguous().permute(2, 3, 1, 4, 0)
    result = conv_transpose3d(wide, weight, wide_bias, 2, 1, 1, add=wide_add, activation="hardswish")
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_inputs_are_not_written() -> None:
    for dtype in DTYPES:
        case = Case(dtype=dtype, activation="relu")
        tensors = case.make()
        copies = [t.clone() for t in tensors.present()]
        first, second = case.call(tensors), case.call(tensors)
        for tensor, copy in zip(tensors.present(), copies, strict=True):
            assert torch.equal(tensor, copy)
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()


def test_result_never_aliases_an_input() -> None:
    """Nothing to add, no activation, one tap: the result still is a tensor of its own."""
    x, w = torch.randn(1, 1, 2, 2, 2), torch.ones(1, 1, 1, 1, 1)
    out = conv_transpose3d(x, w)
    out.zero_()
    assert x.any()
