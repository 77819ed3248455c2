# SPDX-License-Identifier: Apache-2.0
"""Laws that hold for every call, on calls that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import ACTIVATIONS, Case, Tensors
from convt3d import conv_transpose3d, explain
from convt3d._precision import round_to_tf32

bounded = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


def triples(low: int, high: int) -> st.SearchStrategy[tuple[int, int, int]]:
    extent = st.integers(low, high)
    return st.tuples(extent, extent, extent)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    stride, dilation = draw(triples(1, 3)), draw(triples(1, 2))
    case = Case(
        batch=draw(st.integers(0, 3)),
        cin=groups * draw(st.integers(1, 4)),
        cout=groups * draw(st.integers(1, 4)),
        size=draw(triples(1, 4)),
        kernel=draw(triples(1, 4)),
        stride=stride,
        padding=draw(triples(0, 3)),
        output_padding=tuple(  # type: ignore[arg-type]
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16))),
        input_channels_last=draw(st.booleans()),
        weight_channels_last=draw(st.booleans()),
        bias=draw(st.booleans()),
        add=draw(st.sampled_from(("none", "full", "channel", "plane", "one"))),
        add_order=draw(st.sampled_from(("before", "after"))),
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )
    assume(min(case.out_size()) >= 0)
    return case


@bounded
@given(cases())
def test_fake_real_and_explain_agree(case: Case) -> None:
    tensors = case.make()
    real = case.call(tensors)
    assert real.shape == case.output_shape()
    with FakeTensorMode() as mode:
        fakes = Tensors(*(None if t is None else mode.from_tensor(t) for t in vars(tensors).values()))  # type: ignore[arg-type]
        fake = case.call(fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    explained = case.explain(tensors)
    assert (explained.output_shape, explained.output_stride) == (real.shape, real.stride())


@bounded
@given(cases())
def test_linear_in_the_input(case: Case) -> None:
    case = replace(case, dtype=torch.float64, activation="none", bias=False, add="none")
    a, b = case.make(seed=1), case.make(seed=2)
    both = case.call(replace(a, input=a.input + 3 * b.input))
    apart = case.call(a) + 3 * case.call(replace(a, input=b.input))
    torch.testing.assert_close(both, apart)


@bounded
@given(cases())
def test_adjoint_of_the_convolution(case: Case) -> None:
    """<conv_transpose(x, w), y> == <x, conv(y, w)>, wherever the convolution's output is as large as x."""
    case = replace(case, dtype=torch.float64, activation="none", bias=False, add="none")
    assume(case.batch > 0 and min(case.out_size()) > 0)
    assume(all(op < s for op, s in zip(case.output_padding, case.stride, strict=True)))
    tensors = case.make()
    up = case.call(tensors)
    y = torch.randn(up.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    down = F.conv3d(y, tensors.weight, None, case.stride, case.padding, case.dilation, case.groups)
    torch.testing.assert_close((up * y).sum(), (tensors.input * down).sum(), rtol=1e-9, atol=1e-9)


@bounded
@given(cases())
def test_samples_do_not_mix(case: Case) -> None:
    assume(case.batch >= 2)
    case = replace(case, add="channel")
    tensors = case.make()
    alone = replace(case, batch=1).call(replace(tensors, input=tensors.input[1:2]))
    torch.testing.assert_close(case.call(tensors)[1:2], alone, rtol=1e-5, atol=1e-5)


@bounded
@given(st.floats(width=32), st.floats(width=32))
def test_tf32_rounding_is_monotone_and_idempotent(a: float, b: float) -> None:
    pair = torch.tensor([a, b], dtype=torch.float32)
    rounded = round_to_tf32(pair)
    assert torch.equal(round_to_tf32(rounded).nan_to_num(), rounded.nan_to_num())
    assert torch.equal(pair.isnan(), rounded.isnan())
    assert torch.equal(pair.isinf(), rounded.isinf())
    if a <= b:
        assert rounded[0] <= rounded[1]
    if pair[0].isfinite() and abs(a) >= 2.0**-126:
        assert abs(rounded[0].double() - pair[0].double()) <= abs(pair[0].double()) * 2.0**-11 + (
            2.0**116 if abs(a) > 3.4e38 else 0
        )


@bounded
@given(st.data())
def test_report_14_any_integers_give_a_result_or_a_python_error(data: st.DataObject) -> None:
    """Extreme arguments never crash the process."""
    extreme = st.one_of(
        st.integers(-2, 5), st.sampled_from((2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64, -1))
    )
    x, w = torch.zeros(1, 4, 2, 2, 2), torch.zeros(4, 2, 2, 2, 2)
    arguments = {
        name: data.draw(st.one_of(extreme, st.tuples(extreme, extreme, extreme)), label=name)
        for name in ("stride", "padding", "output_padding", "dilation")
    }
    groups = data.draw(extreme, label="groups")
    try:
        shape = explain(x, w, groups=groups, **arguments).output_shape  # type: ignore[arg-type]
    except (RuntimeError, ValueError, TypeError):
        return
    if torch.Size(shape).numel() < 10**6:
        assert conv_transpose3d(x, w, groups=groups, **arguments).shape == shape  # type: ignore[arg-type]
