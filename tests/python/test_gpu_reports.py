# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/known-issues-elsewhere.md on a GPU, as far as other files do not have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accuracy import allowed_error, assert_accurate, exact, mode_of
from cases import Case, Tensors
from convt3d import conv_transpose3d
from families import Family, families, own_families
from forms import FORMS, differentiable_forms, forms, run
from test_memory_format import FORMATS, SHAPES

pytestmark = pytest.mark.gpu

GIB = 2**30
CASE = Case(cin=32, cout=64, size=(4, 5, 8), activation="x_hardswish", precision="tf32")


def need(gib: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory")


def run_case(form: str, case: Case, t: Tensors) -> Tensor:
    return run(form, t.input, t.weight, t.bias, add=t.add, **case.arguments())


@differentiable_forms
@pytest.mark.parametrize("layouts", ["x", "w", ""])
def test_report_01_gradient_strides_on_a_gpu(layouts: str, form: str) -> None:
    case = replace(CASE, input_channels_last="x" in layouts, weight_channels_last="w" in layouts)
    leaves = [t.requires_grad_() for t in case.make("cuda").present()]
    x, w, b, add = leaves
    plain = F.conv_transpose3d(x, w, b, **case.conv_arguments()) + add
    expected = torch.autograd.grad((plain * F.hardswish(plain)).sum(), leaves)
    got = torch.autograd.grad(run(form, x, w, b, add=add, **case.arguments()).sum(), leaves)
    for name, a, b_ in zip(("input", "weight", "bias"), got, expected, strict=False):
        assert a.stride() == b_.stride(), name
        torch.testing.assert_close(a, b_, rtol=2e-2, atol=2e-2 * b_.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=lambda d: str(d)[6:])
def test_report_02_strides_are_eagers_on_a_gpu(dtype: torch.dtype) -> None:
    """Every format of input and weight, size-1 dimensions included."""
    wrong = []
    for shape in SHAPES:
        for x_format, make_x in FORMATS.items():
            for w_format, make_w in FORMATS.items():
                x = make_x(torch.randn(shape, device="cuda").to(dtype))
                w = make_w(torch.randn(shape[1], 4, 3, 3, 3, device="cuda").to(dtype))
                eager = F.conv_transpose3d(x, w, None, 2, 0, 1)
                ours = conv_transpose3d(x, w, None, 2, 0, 1)
                if ours.stride() != eager.stride():
                    wrong.append((shape, x_format, w_format, ours.stride(), eager.stride()))
    assert not wrong, f"{len(wrong)} of them: {wrong[:4]}"


@forms
def test_report_06_a_spatial_size_that_comes_out_zero_on_a_gpu(form: str) -> None:
    x, w = torch.randn(2, 8, 1, 3, 3, device="cuda"), torch.randn(8, 8, 2, 3, 3, device="cuda")
    add = torch.randn(8, 1, 1, 1, device="cuda")
    out = run(form, x, w, None, padding=(1, 0, 0), add=add, activation="gelu")
    assert out.shape == (2, 8, 0, 5, 5)
    x.requires_grad_()
    conv_transpose3d(x, w, None, padding=(1, 0, 0)).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm80"], indirect=True)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_report_08_a_large_video(channels_last: bool, family: Family) -> None:
    """k5 s2 p2 op1, one sample of more than 2^31 outputs: both far corners against float64."""
    need(16)
    case = Case(
        batch=1,
        cin=16,
        cout=8,
        size=(34, 1030, 1030),
        kernel=(5, 5, 5),
        padding=(2, 2, 2),
        dtype=torch.float16,
        add="none",
        activation="hardswish",
        input_channels_last=channels_last,
    )
    small = replace(case, size=(8, 8, 8))
    near, far = small.make("cuda", seed=1), small.make("cuda", seed=2)
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.zeros((1, 16, *case.size), dtype=case.dtype, device="cuda").contiguous(
        memory_format=memory_format
    )
    x[..., :8, :8, :8] = near.input
    x[..., -8:, -8:, -8:] = far.input
    tensors = replace(near, input=x)
    family.require(case, tensors)
    out = family.call(case, tensors)
    assert out.numel() > 2**31
    # Two outputs at the cut see inputs beyond it.
    for corner, result, inner in (
        (near, out[..., :16, :16, :16], slice(0, 14)),
        (replace(near, input=far.input), out[..., -16:, -16:, -16:], slice(2, 16)),
    ):
        y, t, magnitude = exact(small, corner)
        half_ulp, allowed = allowed_error(small, y, t, magnitude, mode_of(small, False, family.name))
        bad = (result.double() - y).abs() > half_ulp + allowed
        assert not bad[..., inner, inner, inner].any()


@pytest.mark.slow
@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_report_09_an_input_of_more_than_2_to_31_elements(channels_last: bool, family: Family) -> None:
    """The ends and the middle are compared with the same samples alone; the other samples are zero."""
    need(16)
    batch = 1025  # of 64 channels of 32^3: 2^21 inputs a sample
    dtype = torch.float16 if family.name == "sm80" or channels_last else torch.float32
    case = Case(batch=3, cin=64, cout=8, size=(32, 32, 32), dtype=dtype, add="one", precision="tf32")
    case = replace(case, input_channels_last=channels_last, kernel=(2, 2, 2), padding=(0, 0, 0))
    case = replace(case, output_padding=(0, 0, 0))
    t = case.make("cuda")
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.zeros((batch, *t.input.shape[1:]), dtype=dtype, device="cuda").contiguous(
        memory_format=memory_format
    )
    assert x.numel() > 2**31
    places = (0, 512, batch - 1)
    for place, sample in zip(places, t.input, strict=True):
        x[place] = sample
    large, tensors = replace(case, batch=batch), replace(t, input=x)
    family.require(large, tensors)
    out = family.call(large, tensors)
    assert_accurate(case, t, torch.stack([out[place] for place in places]))
    silent = replace(t, input=torch.zeros_like(t.input))
    assert_accurate(case, silent, torch.stack([out[place] for place in (1, 511, batch - 2)]))


@pytest.mark.slow
@own_families
def test_report_10_no_memory_explosion_past_2_to_31(family: Family) -> None:
    """A call with just more than 2^31 outputs takes its output and the workspace that explain() says."""
    need(24)
    case = replace(CASE, batch=1025, size=(16, 16, 16), add="none")
    t = replace(CASE, batch=1, size=(16, 16, 16), add="none").make("cuda")
    x = torch.zeros(1025, 32, 16, 16, 16, device="cuda")
    tensors = replace(t, input=x)
    family.require(case, tensors)
    workspace = case.explain(tensors).workspace_bytes
    assert workspace <= 4 * (x.nbytes + t.weight.nbytes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        out = family.call(case, tensors)
    torch.cuda.synchronize()
    assert out.numel() > 2**31
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + workspace + 2**21


@families
@pytest.mark.parametrize("activation", ["hardswish", "x_hardswish"])
def test_report_17_hardswish_of_large_fp16_values_on_a_gpu(activation: str, family: Family) -> None:
    """One tap of weight 1 in each output, so that pre-activations are the input's values."""
    case = Case(batch=1, cin=8, cout=8, size=(2, 2, 8), kernel=(2, 2, 2), padding=(0, 0, 0))
    case = replace(case, output_padding=(0, 0, 0), add="none", bias=False, activation=activation)
    case = replace(case, dtype=torch.float16)
    t = case.make("cuda")
    values = [-60000.0, -3.0, 3.0, 200.0, 10944.0, 60000.0, 65504.0, 0.0]
    if activation == "x_hardswish":
        values = [-60000.0, -3.0, 3.0, 200.0, 255.9, -255.9, 2.0, 0.0]
    t.input.copy_(torch.tensor(values, device="cuda").expand_as(t.input))
    t.weight.copy_(torch.eye(8, device="cuda").view(8, 8, 1, 1, 1).expand_as(t.weight))
    family.require(case, t)
    out = family.call(case, t)
    assert out.isfinite().all()
    assert_accurate(case, t, out)


@families
def test_report_20_dynamic_shapes_on_a_gpu(family: Family) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, b, add: conv_transpose3d(x, w, b, add=add, **CASE.arguments()),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for batch, size in ((2, (3, 5, 8)), (5, (4, 6, 12)), (3, (7, 2, 16))):
        case = replace(CASE, batch=batch, size=size)
        t = case.make("cuda")
        if not family.takes(case, t):
            continue
        with family.runs():
            out = compiled(*t.present())
        assert_accurate(case, t, out)


@families
def test_report_26_the_planes_of_output_padding_on_a_gpu(family: Family) -> None:
    for case in (
        replace(CASE, size=(7, 7, 7)),
        replace(CASE, size=(4, 4, 4), kernel=(2, 2, 2), padding=(0, 0, 0)),
        replace(CASE, size=(4, 4, 4), kernel=(1, 1, 1), padding=(0, 0, 0), add="one"),
    ):
        t = case.make("cuda")
        if family.takes(case, t):
            assert_accurate(case, t, family.call(case, t))


@own_families
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_report_32_channels_last_takes_no_copy(kind: torch.dtype, family: Family) -> None:
    """The output has the neighbours' format, and nothing of the size of x or y is there beside it."""
    case = replace(CASE, batch=8, size=(16, 16, 16), dtype=kind, input_channels_last=True)
    t = case.make("cuda")
    family.require(case, t)
    workspace = case.explain(t).workspace_bytes
    with torch.no_grad():
        family.call(case, t)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = family.call(case, t)
        torch.cuda.synchronize()
    assert out.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + workspace + 2**21
    assert workspace < out.nbytes


@families
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}, {"input_channels_last": True}], ids=str)
def test_every_form_runs_the_same_kernel(form: str, options: dict[str, Any], family: Family) -> None:
    """Compiled and exported programs reach the family that an eager call reaches, with its bits."""
    case = replace(CASE, **options)
    t = case.make("cuda")
    family.require(case, t)
    expected = family.call(case, t)
    with family.runs():
        out = run_case(form, case, t)
    assert out.stride() == expected.stride()
    if family.name == "aten":
        assert_accurate(case, t, out)  # cuDNN need not repeat itself
    else:
        assert torch.equal(out, expected)
