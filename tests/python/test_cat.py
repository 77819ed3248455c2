# SPDX-License-Identifier: Apache-2.0
"""conv_transpose3d_cat: a transposed convolution written into its channels of a concatenation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from accuracy import judge, mode_of
from cases import NAMED, Case, Tensors, random_cases
from cat_calls import call, make_skip
from convt3d import _cat, _kernel_query, _native, conv_transpose3d, conv_transpose3d_cat, explain

OP = torch.ops.convt3d.conv_transpose3d_cat.default
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """torch.empty gives nan: an element that nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def schema_arguments(case: Case, t: Tensors, skip: Tensor, skip_first: bool) -> tuple[Any, ...]:
    spatial = [list(v) for v in (case.stride, case.padding, case.output_padding)]
    return (
        *(t.input, t.weight, t.bias, *spatial, case.groups, list(case.dilation), t.add),
        *(case.add_order, case.activation, case.negative_slope, case.precision or "default"),
        *(skip, skip_first),
    )


def check(case: Case, skip_channels: int, skip_channels_last: bool, skip_first: bool, mode: str) -> Tensor:
    """One call on a CPU: both parts, the format that torch.cat has, and inputs that are left alone."""
    t = case.make()
    skip = make_skip(case, skip_channels, skip_channels_last)
    copies = [x.clone() for x in (*t.present(), skip)]
    result = call(case, t, skip, skip_first)
    parts = [result[:, skip_channels:], result[:, :skip_channels]]
    if not skip_first:
        parts = [result[:, : case.cout], result[:, case.cout :]]
    verdict = judge(case, t, parts[0], mode)
    assert not verdict.failure, verdict.failure
    assert torch.equal(parts[1], skip)
    up = case.call(t)
    assert result.stride() == torch.cat([skip, up] if skip_first else [up, skip], 1).stride()
    for before, after in zip(copies, (*t.present(), skip), strict=True):
        assert torch.equal(before, after)
    return result


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_values(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for last in (False, True):
            here = replace(case, dtype=dtype, input_channels_last=last)
            mode = mode_of(here, False, "cpu")
            check(here, 3, last, False, mode)
            check(here, 1, not last, True, mode)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_random_calls() -> None:
    rng = random.Random(11)
    for case in random_cases(10, 40, (*DTYPES, torch.float64)):
        mode = mode_of(case, case.precision == "tf32", "cpu")
        check(case, rng.choice((0, 1, 2, 5, 8)), rng.random() < 0.5, rng.random() < 0.5, mode)


@pytest.mark.parametrize("skip_first", [False, True])
def test_without_a_batch(skip_first: bool) -> None:
    for channels_last in (False, True):
        case = Case(activation="gelu", input_channels_last=channels_last)
        t, skip = case.make(), make_skip(case)
        one = Tensors(t.input[1], t.weight, t.bias, None if t.add is None else t.add[1])
        result = call(case, one, skip[1], skip_first)
        up = case.call(one)
        expected = torch.cat([skip[1], up] if skip_first else [up, skip[1]])
        assert torch.equal(result, expected) and result.stride() == expected.stride()


@pytest.mark.parametrize("batch", [0, 2])
def test_empty_parts(batch: int) -> None:
    case = Case(batch=batch)
    assert call(case, case.make(), make_skip(case, 0)).shape == case.output_shape()
    assert call(case, case.make(), make_skip(case, 3)).shape[1] == case.cout + 3
    nothing = Case(size=(1, 3, 3), kernel=(2, 2, 2), padding=(1, 1, 1), output_padding=(0, 0, 0))
    assert nothing.output_shape()[2] == 0
    assert call(nothing, nothing.make(), make_skip(nothing)).shape[1:3] == (9, 0)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (3, 1, 1, 1, 1), (2, 1, 2, 1, 1), (2, 4, 1, 1, 1)])
@pytest.mark.parametrize("channels_last", [(a, b) for a in (0, 1) for b in (0, 1)], ids=str)
def test_format_where_strides_are_ambiguous(shape: tuple[int, ...], channels_last: tuple[int, int]) -> None:
    formats = [(torch.contiguous_format, torch.channels_last_3d)[last] for last in channels_last]
    x = torch.randn(shape).contiguous(memory_format=formats[0])
    w = torch.randn(shape[1], shape[1], 1, 1, 1)
    skip = torch.randn(shape).contiguous(memory_format=formats[1])
    expected = torch.cat([conv_transpose3d(x, w), skip], 1)
    result = conv_transpose3d_cat(x, w, skip=skip)
    assert torch.equal(result, expected) and result.stride() == expected.stride()


# --- errors ------------------------------------------------------------------------------------------------

BASE = Case(activation="relu", add="none")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda s: s[:1],
            RuntimeError,
            r"skip must have the output's shape but for the channels, \(2, any, 6",
        ),
        (lambda s: s[..., :-1], RuntimeError, "skip must have the output's shape"),
        (lambda s: s[0], RuntimeError, "skip must have the output's shape"),
        (lambda s: s.double(), RuntimeError, "input is torch.float32 and skip is torch.float64"),
        (lambda s: s.to("meta"), RuntimeError, "input is on cpu and skip is on meta"),
        (lambda s: s.to_sparse(), RuntimeError, "skip must be a dense"),
        (lambda s: None, TypeError, "skip must be a Tensor, got NoneType"),
        (lambda s: [s], TypeError, "skip must be a Tensor, got list"),
    ],
)
def test_wrong_skips(change: Callable[[Tensor], Any], error: type[Exception], text: str) -> None:
    t, skip = BASE.make(), make_skip(BASE)
    with pytest.raises(error, match=text):
        call(BASE, t, change(skip))


def test_wrong_arguments_of_the_convolution() -> None:
    t, skip = BASE.make(), make_skip(BASE)
    with pytest.raises(TypeError, match="skip_first must be a bool, got 1"):
        call(BASE, t, skip, 1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="stride must be at least 1"):
        conv_transpose3d_cat(t.input, t.weight, stride=0, skip=skip)
    with pytest.raises(ValueError, match="activation must be one of"):
        conv_transpose3d_cat(t.input, t.weight, activation="mish", skip=skip)
    with pytest.raises(TypeError, match="skip"):
        conv_transpose3d_cat(t.input, t.weight)  # type: ignore[call-arg]


# --- as torch sees it --------------------------------------------------------------------------------------

SEEN = [
    Case(activation="x_hardswish"),
    Case(activation="gelu", input_channels_last=True, add="channel", add_order="after"),
    Case(activation="none", dtype=torch.bfloat16, bias=False, add="none"),
    Case(activation="silu", dtype=torch.float64, weight_channels_last=True, groups=2),
    Case(activation="relu", batch=0),
]


@pytest.mark.parametrize("case", SEEN, ids=lambda case: f"{case.activation}-{case.dtype}")
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("skip_first", [False, True])
def test_opcheck(case: Case, grad: bool, skip_first: bool) -> None:
    t, skip = case.make(), make_skip(case, channels_last=case.input_channels_last)
    for tensor in (*t.present(), skip):
        tensor.requires_grad_(grad)
    torch.library.opcheck(OP, schema_arguments(case, t, skip, skip_first))


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize("activation", ["none", "tanh"])
@pytest.mark.parametrize("batched", [True, False])
def test_gradients(skip_first: bool, activation: str, batched: bool) -> None:
    case = Case(
        batch=1, cin=2, cout=2, size=(1, 2, 2), activation=activation, add="channel", dtype=torch.float64
    )
    t, skip = case.make(), make_skip(case, 1)
    leaves = [x.requires_grad_() for x in (t.input, t.weight, t.bias, t.add, skip) if x is not None]

    def function(x: Tensor, w: Tensor, b: Tensor, add: Tensor, s: Tensor) -> Tensor:
        if not batched:
            x, s = x[0], s[0]
        return call(case, Tensors(x, w, b, add), s, skip_first)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("which", range(5))
def test_one_gradient_at_a_time(which: int) -> None:
    t, skip = SEEN[0].make(), make_skip(SEEN[0])
    leaves = [t.input, t.weight, t.bias, t.add, skip]
    leaf = leaves[which]
    assert leaf is not None
    leaf.requires_grad_()
    result = call(SEEN[0], t, skip)
    cotangent = torch.randn(result.shape)
    (grad,) = torch.autograd.grad(result, leaf, cotangent)
    (expected,) = torch.autograd.grad(torch.cat([SEEN[0].call(t), skip], 1), leaf, cotangent)
    torch.testing.assert_close(grad, expected)


def test_result_and_gradient_of_the_skip_are_nobody_elses() -> None:
    t, skip = SEEN[0].make(), make_skip(SEEN[0]).requires_grad_()
    result = call(SEEN[0], t, skip)
    result.add_(1)  # of a training step, in place
    result.sum().backward()
    assert skip.grad is not None and torch.equal(skip.grad, torch.ones_like(skip))


def test_functorch() -> None:
    case = Case(batch=1, dtype=torch.float64, activation="silu", add="none")
    t, skip = case.make(), make_skip(case)
    xs = torch.stack([t.input, 2 * t.input])

    def ours(x: Tensor) -> Tensor:
        return call(case, Tensors(x, t.weight, t.bias, None), skip)

    def theirs(x: Tensor) -> Tensor:
        return torch.cat([case.call(Tensors(x, t.weight, t.bias, None)), skip], 1)

    assert torch.allclose(torch.vmap(ours)(xs), torch.stack([theirs(x) for x in xs]))
    pair = torch.func.jvp(ours, (t.input,), (torch.ones_like(t.input),))
    for a, b in zip(pair, torch.func.jvp(theirs, (t.input,), (torch.ones_like(t.input),)), strict=True):
        assert torch.allclose(a, b) and b.abs().max() > 0
    grads = torch.vmap(torch.func.grad(lambda x: ours(x).sum()))(xs)
    assert torch.allclose(grads, torch.vmap(torch.func.grad(lambda x: theirs(x).sum()))(xs))


def test_autocast() -> None:
    t, skip = BASE.make(), make_skip(BASE)
    with torch.autocast("cpu", torch.bfloat16):
        result = call(BASE, t, skip)
        expected = torch.cat([BASE.call(t), skip.bfloat16()], 1)
    assert result.dtype == torch.bfloat16 and torch.equal(result, expected)


class _Tagged(torch.Tensor):
    pass


def test_subclasses() -> None:
    t, skip = BASE.make(), make_skip(BASE)
    result = call(BASE, t, skip.as_subclass(_Tagged))
    assert type(result) is _Tagged
    assert torch.equal(result.as_subclass(Tensor), call(BASE, t, skip))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_compile(dynamic: bool, channels_last: bool) -> None:
    case = replace(BASE, input_channels_last=channels_last)
    t, skip = case.make(), make_skip(case, channels_last=channels_last)
    if dynamic:
        for tensor in (t.input, skip):
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled = torch.compile(
        lambda t, s: call(case, Tensors(*t), s) * 2, fullgraph=True, dynamic=False, backend="aot_eager"
    )
    result = compiled((t.input, t.weight, t.bias, None), skip)
    expected = call(case, t, skip) * 2
    assert torch.equal(result, expected) and result.stride() == expected.stride()


# --- into the slice, without a GPU -------------------------------------------------------------------------


def test_one_call_of_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is given, on both ways into the operator, and that a refusal is not the end."""
    seen: list[tuple[Any, ...]] = []
    answer: list[Tensor | None] = [torch.empty(1)]

    def cat(*arguments: Any) -> Tensor | None:
        seen.append(arguments)
        return answer[0]

    monkeypatch.setattr(_native, "_native", _native.Native(forward=cat, quick=cat, quick_cat=cat))
    monkeypatch.setattr(_native, "_settings", {})
    monkeypatch.setattr(_native, "_settings_by_bits", {})
    monkeypatch.setattr(_native, "_tensor", list)  # a fake mode's tensors have no values
    monkeypatch.setattr(_cat, "cat_op", lambda *arguments: arguments)
    monkeypatch.setattr(_cat, "nothing_in_between", lambda tensors: True)  # fake tensors are
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with FakeTensorMode():
        x = torch.empty(2, 8, 4, 4, 4, device="cuda")
        w, skip = torch.empty(8, 16, 2, 2, 2, device="cuda"), torch.empty(2, 24, 8, 8, 8, device="cuda")
        own = (
            x,
            w,
            None,
            (2, 2, 2),
            (0, 1, 0),
            (0, 0, 0),
            1,
            (1, 1, 1),
            None,
            "after",
            "relu",
            0.5,
            "default",
        )
        for first in (False, True):
            result = conv_transpose3d_cat(
                x, w, None, 2, (0, 1, 0), skip=skip, skip_first=first, add_order="after", activation="relu",
                negative_slope=0.5,
            )  # fmt: skip
            assert result is answer[0] and _cat._forward(*own, skip, first) is answer[0]
        answer[0] = None
        arguments: Any = conv_transpose3d_cat(x, w, None, 2, skip=skip)
        assert arguments[-2] is skip and arguments[3] == (2, 2, 2)
    for index, call_ in enumerate(seen[:4]):
        assert call_[0] is skip and call_[1] == (index > 1) and call_[2] is x and call_[3] is w
        assert call_[4:6] == (None, None)
        # Triples, groups, relu, the add after it, TF32, and the slope's bits.
        assert call_[6] == [2, 2, 2, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0x3FE0000000000000]


@pytest.mark.parametrize("taken", [True, False])
def test_the_kernels_write_into_the_slice(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the binding is given where the skip is not for it."""
    seen: list[tuple[Any, ...]] = []

    def into(*arguments: Any) -> bool:
        seen.append(arguments)
        return taken

    def whole(*arguments: Any) -> None:
        seen.append(arguments)

    monkeypatch.setattr(_native, "_native", _native.Native(forward=whole, forward_into=into))
    copied: list[tuple[Tensor, Tensor]] = []  # a CPU's torch cannot do it for CUDA, not even with stand-ins
    monkeypatch.setattr(_cat, "_copy", lambda source, target: copied.append((target, source)))
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    spatial = ((2, 2, 2), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1))
    with FakeTensorMode():
        x = torch.empty(2, 8, 4, 4, 4, device="cuda")
        w, skip = torch.empty(8, 16, 2, 2, 2, device="cuda"), torch.empty(2, 24, 8, 8, 8, device="cuda")
        for first in (False, True):
            own = (x, w, None, *spatial, None, "before", "none", 0.01, "default")
            if taken:
                result = _cat._forward(*own, skip, first)
                assert result.shape == (2, 40, 8, 8, 8) and result.is_contiguous()
            else:
                up = torch.empty(2, 16, 8, 8, 8, device="cuda")
                assert not _cat._written(_cat.described((*own, skip, first))[0], own, up)
    outs = [arguments[0] for arguments in seen if len(arguments) == 15]
    assert outs and all(out.shape == (2, 16, 8, 8, 8) for out in outs)
    if taken:
        assert {out.storage_offset() for out in outs} == {0, 24 * 512}
        assert all(out.stride() == (40 * 512, 512, 64, 8, 1) for out in outs)
    assert [source is skip for _, source in copied] == ([True] * 2 if taken else [])
    assert all(arguments[1] is x and arguments[-5:] == (0, 0, 0.01, 1, 0) for arguments in seen if taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_wide_copies(dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit arrives, and nothing beside it; in wide elements where rows and addresses allow it."""
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    wide = 0
    for shape, before, behind in (
        ((2, 8, 3, 4, 5), 8, 16),
        ((2, 8, 2, 2, 2), 3, 0),
        ((1, 8, 1, 1, 1), 8, 0),
        ((3, 5, 1, 2, 3), 1, 2),
        ((2, 1, 4, 4, 4), 7, 0),
    ):
        n, c, *size = shape
        whole = torch.zeros(n, before + c + behind, *size, dtype=dtype).contiguous(
            memory_format=memory_format
        )
        bits = torch.randint(-(2**15), 2**15, (n, c, *size, dtype.itemsize // 2), dtype=torch.int16)
        source = bits.view(dtype).squeeze(-1).contiguous(memory_format=memory_format)
        target = whole[:, before : before + c]
        for order in (_cat._NCDHW, _cat._NDHWC):
            rows = _cat._as_rows(source, order), _cat._as_rows(target, order)
            if rows[0] is None or rows[1] is None:
                continue
            wide += 1
            target.zero_()
            rows[1].copy_(rows[0])
            assert torch.equal(target.contiguous().view(torch.int16), source.contiguous().view(torch.int16))
            outside = whole.clone()
            outside[:, before : before + c] = 0
            assert not outside.any()
    assert wide >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_explain(dtype: torch.dtype) -> None:
    """Of the slice, aligned or not."""
    if _kernel_query.library() is None:
        pytest.skip(_kernel_query.why_no_library())
    x = torch.empty(2, 64, 32, 32, 32, dtype=dtype, device="meta")
    w = torch.empty(64, 32, 3, 3, 3, dtype=dtype, device="meta")
    skip = torch.empty(2, 32, 64, 64, 64, dtype=dtype, device="meta")
    how: Any = {"stride": 2, "padding": 1, "output_padding": 1, "precision": "tf32"}
    for first in (False, True):
        e = explain(x, w, skip=skip, skip_first=first, **how)
        assert e.path == "sm90" and e.output_shape == (2, 64, 64, 64, 64)
        assert e.bytes == dtype.itemsize * (x.numel() + w.numel() + 3 * skip.numel())
    # In channels last a slice that starts at an odd channel is not aligned, which this kernel does not need.
    last = torch.channels_last_3d
    x, odd = x.to(memory_format=last), skip[:, :31].to(memory_format=last)
    assert explain(x, w, skip=odd, skip_first=True, **how).path == "sm90"
    with pytest.raises(RuntimeError, match="skip must have the output's shape"):
        explain(x, w, skip=skip[..., 1:], **how)
