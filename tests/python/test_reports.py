# SPDX-License-Identifier: Apache-2.0
"""What has gone wrong in other operators, by the rows of docs/known-issues-elsewhere.md, on a CPU.

Rows whose tests belong with others (errors, gradients, modules) are tested there, under the row's number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accuracy import assert_accurate
from cases import ACTIVATIONS, Case, Tensors
from convt3d import FusedConvTranspose3d, conv_transpose3d, explain
from forms import differentiable_forms, forms, in_form, run
from test_forward import gather
from test_library import built, elf

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "known-issues-elsewhere.md"


def call_of(case: Case) -> Callable[..., Tensor]:
    """The case as a function of its tensors; bias and add are there."""
    return lambda x, w, b, add: conv_transpose3d(x, w, b, add=add, **case.arguments())


def run_case(form: str, case: Case, t: Tensors) -> Tensor:
    return run(form, t.input, t.weight, t.bias, add=t.add, **case.arguments())


# --- the page and the tests agree ---


def page_rows() -> list[tuple[int, list[str]]]:
    """(number, names of tests) of each row of the page's table."""
    found = []
    for line in PAGE.read_text().splitlines():
        match = re.match(r"\|\s*(\d+)\s*\|", line)
        if match:
            found.append((int(match[1]), re.findall(r"`(test_\w+)`", line)))
    return found


def test_every_row_of_the_page_has_its_tests() -> None:
    defined: set[str] = set()
    for path in (ROOT / "tests" / "python").glob("test_*.py"):
        defined |= {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}
    rows = page_rows()
    assert [number for number, _ in rows] == list(range(1, 35))
    for number, tests in rows:
        assert tests, f"row {number} names no test"
        assert set(tests) <= defined, f"row {number} names tests that do not exist"
        assert all(name.startswith(f"test_report_{number:02}_") for name in tests), f"row {number}"
    named = {name for _, tests in rows for name in tests}
    numbered = {name for name in defined if re.match(r"test_report_\d\d_", name)}
    assert named == numbered, "tests that no row names"


# --- layouts and shapes ---


@differentiable_forms
@pytest.mark.parametrize("layouts", ["x", "w", "xw", ""])
def test_report_01_gradient_strides_in_every_form(layouts: str, form: str) -> None:
    """A channels-last chain: each gradient's strides in the compiled backward are those of eager."""
    case = Case(
        input_channels_last="x" in layouts, weight_channels_last="w" in layouts, activation="x_hardswish"
    )
    leaves = [t.requires_grad_() for t in case.make().present()]
    plain = torch.autograd.grad(call_of(case)(*leaves).square().sum(), leaves)
    x, w, b, add = leaves
    fast = torch.autograd.grad(run(form, x, w, b, add=add, **case.arguments()).square().sum(), leaves)
    for a, b_ in zip(plain, fast, strict=True):
        torch.testing.assert_close(a, b_, rtol=1e-6, atol=1e-6)
        assert a.stride() == b_.stride()


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_report_02_only_the_weight_is_channels_last(dtype: torch.dtype, form: str) -> None:
    """PyTorch's CUDA rule on every device, real and fake: channels last, except in double."""
    case = Case(weight_channels_last=True, dtype=dtype)
    t = case.make()
    out = run_case(form, case, t)
    assert_accurate(case, t, out)
    last = dtype != torch.float64
    assert out.is_contiguous(memory_format=torch.channels_last_3d) == last
    assert out.is_contiguous() != last
    with FakeTensorMode() as mode:
        fake = case.call(Tensors(*(mode.from_tensor(x) for x in t.present())))
    assert fake.stride() == out.stride()


@forms
@pytest.mark.parametrize(
    ("size", "padding", "expected"),
    [((1, 3, 3), (1, 0, 0), (0, 5, 5)), ((1, 1, 1), (1, 1, 1), (0, 0, 0)), ((2, 1, 2), (0, 1, 0), (3, 0, 3))],
    ids=str,
)
def test_report_06_a_spatial_size_that_comes_out_zero(
    size: tuple[int, int, int], padding: tuple[int, int, int], expected: tuple[int, int, int], form: str
) -> None:
    kernel = tuple(2 if p else 3 if s == 3 else 2 for p, s in zip(padding, size, strict=True))
    x, w, b = torch.randn(2, 4, *size), torch.randn(4, 6, *kernel), torch.randn(6)
    out = run(form, x, w, b, padding=padding, add=torch.randn(6, 1, 1, 1), activation="gelu")
    assert out.shape == F.conv_transpose3d(x, w, b, padding=padding).shape == (2, 6, *expected)


@forms
@pytest.mark.parametrize("batch", [0, 1])
def test_report_07_an_empty_batch_in_every_form(batch: int, form: str) -> None:
    case = Case(batch=batch, activation="x_hardswish")
    t = case.make()
    out = run_case(form, case, t)
    assert out.shape == case.output_shape() and out.stride() == case.call(t).stride()
    assert_accurate(case, t, out)


# --- sizes near the limits of integers: nothing is run ---

VIDEO = {"stride": 2, "padding": 2, "output_padding": 1, "activation": "relu"}


def meta(*shape: int, dtype: torch.dtype = torch.float16, channels_last: bool = False) -> Tensor:
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)


@pytest.mark.parametrize("channels_last", [False, True])
def test_report_08_offsets_beyond_32_bits(channels_last: bool) -> None:
    """k5 s2 p2 op1 on a large video: strides and counts that 32 bits do not hold."""
    x, w = meta(1, 64, 60, 540, 960, channels_last=channels_last), meta(64, 32, 5, 5, 5)
    e = explain(x, w, **VIDEO)  # type: ignore[arg-type]
    assert e.output_shape == (1, 32, 120, 1080, 1920)
    numel = 32 * 120 * 1080 * 1920
    assert numel > 2**31
    out = conv_transpose3d(x, w, **VIDEO)  # type: ignore[arg-type]
    assert out.shape == e.output_shape and out.stride() == e.output_stride
    assert max(out.stride()) == numel  # of the batch
    assert e.bytes == 2 * (x.numel() + w.numel() + numel)
    # 125 taps over 8 residue classes; the last output along a dimension lacks none of its taps' pairs.
    assert e.flops == 2 * 64 * 32 * (5 * 60) * (5 * 540) * (5 * 960)


def test_report_09_sizes_beyond_2_to_31_are_described_right() -> None:
    """Output, or input, or both; and what no 64 bits hold is refused before memory is touched."""
    for batch, cin, cout in ((2**15, 8, 64), (2**20, 64, 1), (2**20, 64, 64)):
        x, w = meta(batch, cin, 8, 8, 8), meta(cin, cout, 2, 2, 2)
        e = explain(x, w, stride=2)
        assert e.output_shape == (batch, cout, 16, 16, 16)
        assert e.bytes == 2 * (x.numel() + w.numel() + batch * cout * 16**3)
        assert conv_transpose3d(x, w, stride=2).shape == e.output_shape
    with pytest.raises(RuntimeError, match="overflow 64-bit integers: the output would have shape"):
        conv_transpose3d(meta(2**20, 1, 2**10, 1, 1), meta(1, 2**20, 1, 1, 1), stride=(2**14, 1, 1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_report_10_no_hidden_copies_near_2_to_31(channels_last: bool, dtype: torch.dtype) -> None:
    """The workspace holds at most the prepared weights and x, just below the limit and just past it."""
    built("libconvt3d.so")
    for batch in (1023, 1024, 1025):  # of 2^21 outputs each
        x = meta(batch, 32, 16, 16, 16, dtype=dtype, channels_last=channels_last)
        w = meta(32, 64, 3, 3, 3, dtype=dtype)
        e = explain(x, w, None, 2, 1, 1)
        assert e.path in ("sm80", "sm90")
        assert e.workspace_bytes <= 4 * (x.nbytes + w.nbytes) < 2 * 2**21 * batch * dtype.itemsize


# --- arguments ---


@forms
def test_report_11_output_padding_is_per_dimension(form: str) -> None:
    case = Case(stride=(2, 1, 1), dilation=(1, 1, 2), output_padding=(1, 0, 1), padding=(1, 1, 1))
    t = case.make()
    assert_accurate(case, t, run_case(form, case, t))
    for bad in ((2, 0, 0), (0, 1, 0), (0, 0, 2)):
        messages = []
        for function in (F.conv_transpose3d, lambda *a, **k: run(form, *a, **k)):
            with pytest.raises(RuntimeError, match=r"output.padding must be smaller than") as error:
                function(t.input, t.weight, t.bias, stride=(2, 1, 1), dilation=(1, 1, 2), output_padding=bad)
            messages.append(str(error.value))
        assert all("stride or dilation" in message for message in messages)


@forms
@pytest.mark.parametrize("op", [-1, (0, -1, 0), (1, 1, -2)], ids=str)
def test_report_12_negative_output_padding(op: Any, form: str) -> None:
    x, w = torch.randn(1, 2, 3, 3, 3), torch.randn(2, 2, 3, 3, 3)
    with pytest.raises(RuntimeError, match="output_padding must be at least 0"):
        run(form, x, w, None, 2, 1, op)


@forms
@pytest.mark.parametrize(
    "arguments",
    [{"dilation": 1879048192}, {"stride": (1, 2**62, 1)}, {"padding": 2**62}, {"dilation": 2**63 - 1}],
    ids=str,
)
def test_report_15_overflow_is_an_error_in_every_form(arguments: dict[str, Any], form: str) -> None:
    x, w = torch.randn(1, 2, 4, 4, 4), torch.randn(2, 2, 3, 3, 3)
    with pytest.raises(RuntimeError, match=r"overflow 64-bit|less than 2\^31"):
        run(form, x, w, **arguments)


@forms
@pytest.mark.parametrize("odd", ["weight", "bias", "add"])
def test_report_28_mixed_types(odd: str, form: str) -> None:
    """Never computed in one of the two types: the same refusal as PyTorch's for a half bias."""
    t = Case(dtype=torch.float32).make()
    changed = replace(t, **{odd: getattr(t, odd).half()})
    with pytest.raises(RuntimeError, match=rf"input is torch.float32 and {odd} is torch.float16"):
        run(form, changed.input, changed.weight, changed.bias, 2, 1, 1, add=changed.add)


# --- values ---


@forms
@pytest.mark.parametrize("activation", ["hardswish", "x_hardswish"])
def test_report_17_hardswish_of_large_fp16_values(activation: str, form: str) -> None:
    """x * min(x + 3, 6) in fp16 overflows from x = 10923 on; the result itself is in range up to 65504."""
    values = [-60000.0, -3.0, 3.0, 10944.0, 60000.0, 65504.0]
    if activation == "x_hardswish":
        values = [-60000.0, -3.0, 3.0, 200.0, 255.9]
    x = torch.tensor(values, dtype=torch.float16).view(1, 1, 1, 1, -1)
    out = run(form, x, torch.ones(1, 1, 1, 1, 1, dtype=torch.float16), activation=activation)
    t = x.double()
    expected = F.hardswish(t) * (t if activation == "x_hardswish" else 1)
    assert torch.equal(out, expected.half())
    assert out.isfinite().all()


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_report_18_bitwise_repeatable_on_a_cpu(dtype: torch.dtype, form: str) -> None:
    case = Case(cin=16, cout=16, activation="gelu", dtype=dtype)
    t = case.make()
    function = in_form(form, call_of(case), *t.present()) if form != "operator" else None
    results = [run_case(form, case, t) if function is None else function(*t.present()) for _ in range(4)]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert torch.equal(results[0], case.call(t))


@differentiable_forms
def test_report_19_double_backward_k3_s2(form: str) -> None:
    """Where torch.compile has no double backward of its own it says so; it never gives another value."""
    case = Case(dtype=torch.float64, activation="silu", cin=2, cout=2, size=(2, 2, 2))
    leaves = [t.requires_grad_() for t in case.make().present()]

    def penalty(out: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    x, w, b, add = leaves
    plain = F.silu(F.conv_transpose3d(x, w, b, 2, 1, 1) + add)
    expected = penalty(plain)
    out = run(form, x, w, b, add=add, **case.arguments())
    if form in ("compiled", "dynamic"):
        with pytest.raises(RuntimeError, match="double backward"):
            penalty(out)
        return
    for a, b_ in zip(penalty(out), expected, strict=True):
        torch.testing.assert_close(a, b_)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_report_21_vmap_without_a_bias(in_dims: tuple[Any, Any], batched: bool) -> None:
    x, w = torch.randn(3, 2, 3, 3, 3, dtype=torch.float64), torch.randn(2, 4, 3, 2, 3, dtype=torch.float64)
    if not batched:
        x = x[0]
    stacked = [
        t if dim is None else torch.stack([t, t.cos(), 2 * t], dim)
        for t, dim in zip((x, w), in_dims, strict=True)
    ]
    options = {"stride": 2, "activation": "tanh", "add": torch.ones(1, dtype=torch.float64)}
    got = torch.func.vmap(lambda x, w: conv_transpose3d(x, w, None, **options), in_dims)(*stacked)  # type: ignore[arg-type]
    for i in range(3):
        parts = (t if dim is None else t.select(dim, i) for t, dim in zip(stacked, in_dims, strict=True))
        torch.testing.assert_close(got[i], (F.conv_transpose3d(*parts, None, 2) + 1).tanh())


def test_report_22_devices() -> None:
    """The fake operator answers for the tensors' device, and refuses two, without a GPU."""
    with FakeTensorMode():
        x, w = torch.empty(1, 2, 3, 3, 3, device="cuda:1"), torch.empty(2, 3, 2, 2, 2, device="cuda:1")
        assert conv_transpose3d(x, w).device == torch.device("cuda:1")
        for name, tensors in (
            ("weight", (x, torch.empty_like(w, device="cuda:0"), None)),
            ("bias", (x, w, torch.empty(3, device="cpu"))),
        ):
            with pytest.raises(RuntimeError, match=f"on one device, but input is on cuda:1 and {name} is on"):
                conv_transpose3d(*tensors)


def test_report_23_the_binding_asks_for_the_current_stream() -> None:
    """And for no synchronisation. What runs on it is tested on a GPU."""
    symbols = {name for name, defined in elf.Elf(built("libconvt3d_torch.so")).symbols() if not defined}
    assert "aoti_torch_get_current_cuda_stream" in symbols
    sources = "".join(p.read_text() for p in (ROOT / "cutlass_kernels" / "src").rglob("*.c*"))
    sources += (ROOT / "python" / "csrc" / "binding.cpp").read_text()
    assert not re.search(
        r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy\(|cudaMalloc\(|cudaFree\(", sources
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("channels", [1, 3, 45, 63])
def test_report_24_channels_off_the_access_width_on_a_cpu(channels: int, dtype: torch.dtype) -> None:
    """Right here, and no reason to leave the kernels on a GPU."""
    case = Case(batch=1, cin=channels, cout=channels + 1, size=(2, 3, 2), dtype=dtype)
    t = case.make()
    assert_accurate(case, t, case.call(t))
    built("libconvt3d.so")
    assert case.explain(case.make("meta")).path in ("sm80", "sm90")


@forms
def test_report_25_any_strides_of_add_and_operands(form: str) -> None:
    """Residuals that are no packed tensor of the output's layout."""
    case = Case(activation="hardswish")
    t = case.make()
    assert t.add is not None
    expected = case.call(t)
    wide = torch.full((2, 9, *t.add.shape[2:]), torch.nan)
    sliced = wide[:, 2:8].copy_(t.add)
    stepped = torch.full((*t.add.shape[:4], 2 * t.add.shape[4]), torch.nan)[..., 1::2].copy_(t.add)
    flipped = t.add.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    for add in (sliced, stepped, flipped, t.add.contiguous(memory_format=torch.channels_last_3d)):
        out = run_case(form, case, replace(t, add=add))
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert out.stride() == expected.stride()


@forms
@pytest.mark.parametrize(
    "case",
    [
        Case(name="7x7", batch=1, cin=2, cout=2, size=(2, 7, 7)),
        Case(
            name="no-tap", size=(2, 3, 2), kernel=(1, 2, 1), stride=(3, 3, 3), padding=(0, 0, 0),
            output_padding=(2, 2, 2), cin=2, cout=2,
        ),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_report_26_the_planes_of_output_padding(case: Case, form: str) -> None:
    """They hold bias, add and every tap that reaches them: not zeros, and nothing beside that."""
    case = replace(case, dtype=torch.float64, activation="none")
    t = case.make()
    assert t.bias is not None and t.add is not None
    out = run_case(form, case, t)
    expected = gather(t.input, t.weight, case) + t.bias.view(-1, 1, 1, 1) + t.add
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    last = out[..., -1] - t.add[..., -1]
    if case.name == "7x7":
        assert (last - t.bias.view(-1, 1, 1)).abs().max() > 0.1  # a tap reaches it
    else:
        torch.testing.assert_close(last, t.bias.view(-1, 1, 1).expand_as(last))


@forms
def test_report_31_no_silent_tf32(form: str) -> None:
    """precision="ieee" is fp32 even where PyTorch's own switch allows less; on a CPU that is bf16."""
    case = Case(cin=32, cout=8, precision="ieee", add="none")
    t = case.make()
    conv = torch.backends.mkldnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "bf16"
    try:
        out = run_case(form, case, t)
    finally:
        conv.fp32_precision = before
    assert_accurate(case, t, out)


class _Up(nn.Module):
    """A step of nnU-Net's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.up = FusedConvTranspose3d(8, 4, 2, 2)
        self.conv = nn.Sequential(nn.Conv3d(8, 4, 3, padding=1), nn.LeakyReLU())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        up = self.up(x)
        self.seen = up.is_contiguous(memory_format=torch.channels_last_3d)
        return self.conv(torch.cat((up, skip), 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("channels_last", [False, True])
def test_report_32_no_forced_layout(channels_last: bool) -> None:
    """Neighbours get the format they gave, so that none of them copies back; parameters keep theirs."""
    fmt = torch.channels_last_3d if channels_last else torch.contiguous_format
    net = _Up().to(memory_format=fmt)  # type: ignore[call-overload]
    strides = [p.stride() for p in net.parameters()]
    x = torch.randn(2, 8, 2, 3, 3).contiguous(memory_format=fmt).requires_grad_()
    skip = torch.randn(2, 4, 4, 6, 6).contiguous(memory_format=fmt)
    out = net(x, skip)
    assert net.seen == channels_last
    assert out.is_contiguous(memory_format=fmt)
    out.square().sum().backward()
    assert [p.stride() for p in net.parameters()] == strides
    assert x.grad is not None and x.grad.is_contiguous(memory_format=fmt)
    weight = net.up.weight.grad
    assert weight is not None and weight.is_contiguous(memory_format=fmt)


@forms
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_report_34_nothing_is_reused(activation: str, form: str) -> None:
    """Two calls with changed inputs or weights, in place or in the same memory; no input is written."""
    case = Case(activation=activation, batch=1, size=(2, 2, 2))
    t = case.make()
    tensors = t.present()
    if form == "operator":
        call = lambda *ts: run(form, *ts[:3], add=ts[3], **case.arguments())  # noqa: E731
    else:
        call = in_form(form, call_of(case), *tensors)
    first = call(*tensors)
    kept = first.clone()
    assert_accurate(case, t, first)
    for tensor, fresh in zip(tensors, case.make(seed=1).present(), strict=True):
        tensor.data.copy_(fresh)
        copies = [other.clone() for other in tensors]
        assert_accurate(case, t, call(*tensors))
        assert all(torch.equal(a, b) for a, b in zip(copies, tensors, strict=True))
    assert torch.equal(first, kept), "a later call wrote into an earlier result"
