# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.convt3d.product``: a convolution that keeps an explicit fp32 precision in every derivative.

ATen's differentiable convolutions read PyTorch's global switch whenever they run, and their derivatives run
later, when nobody holds the switch any more. The transposed convolution is linear in input and weight, so its
derivatives, to any order, are three products that turn into each other:

    output   a = input,       b = weight       the transposed convolution
    input    a = grad_output, b = weight       its gradient of the input, a plain convolution
    weight   a = input,       b = grad_output  its gradient of the weight

Each is this one operator, with its precision as an argument. It serves what has to be decomposed (functorch
transforms, forward-mode AD, double backward) in float32 with "ieee" or "tf32".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import autograd_function as functorch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ._memory_format import as_memory_format, output_is_channels_last, with_exact_strides
from ._precision import conv_fp32_switch, round_to_tf32

aten = torch.ops.aten

_library: Any = torch.library.Library("convt3d", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "product(Tensor a, Tensor b, str kind, SymInt[] size, SymInt[] stride, SymInt[] padding, "
    "SymInt[] output_padding, SymInt groups, SymInt[] dilation, str precision) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
product_op = torch.ops.convt3d.product.default

# By kind: the products that are the derivatives by a and by b, with their operands; "g" is the cotangent.
_DERIVATIVES = {
    "output": (("input", "g", "b"), ("weight", "a", "g")),
    "input": (("output", "g", "b"), ("weight", "g", "a")),
    "weight": (("input", "b", "g"), ("output", "a", "g")),
}


def _shape(a: Tensor, b: Tensor, kind: str, size: Sequence[int], groups: int) -> tuple[int, ...]:
    if kind == "output":
        return (a.shape[0], b.shape[1] * groups, *size)
    if kind == "input":
        return (a.shape[0], b.shape[0], *size)
    if kind == "weight":
        return (a.shape[1], b.shape[1] // groups, *size)
    raise ValueError(f"convt3d: kind must be output, input or weight, got {kind!r}")


def _fake(a: Tensor, b: Tensor, kind: str, size: Sequence[int], *rest: Any) -> Tensor:
    memory_format = as_memory_format(output_is_channels_last(a, b))
    return torch.empty(
        _shape(a, b, kind, size, rest[3]), dtype=a.dtype, device=a.device, memory_format=memory_format
    )


def _real(*args: Any) -> Tensor:
    # Part of a backward pass, which may be compiled and run under an autocast that is not its own.
    with torch._C._DisableAutocast():
        return _compute(*args)


def _compute(
    a: Tensor,
    b: Tensor,
    kind: str,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    precision: str,
) -> Tensor:
    channels_last = output_is_channels_last(a, b)
    shape = _shape(a, b, kind, size, groups)
    if a.numel() == 0 or b.numel() == 0 or 0 in shape:
        empty = torch.zeros(shape, dtype=a.dtype, device=a.device)
        return with_exact_strides(empty, channels_last)
    device = a.device.type
    if precision == "tf32" and device != "cuda":
        a, b = round_to_tf32(a), round_to_tf32(b)
    if kind == "weight":
        # Only the shape of the third tensor is read.
        like = torch.empty(shape, dtype=a.dtype, device=a.device)
        with conv_fp32_switch(precision, device):
            out = aten.convolution_backward.default(
                b,
                a,
                like,
                None,
                stride,
                padding,
                dilation,
                True,
                output_padding,
                groups,
                (False, True, False),
            )[1]
        return with_exact_strides(out, channels_last)
    transposed = kind == "output"
    geometry = (stride, padding, dilation, transposed, output_padding if transposed else (0, 0, 0), groups)
    if device == "cuda":
        out = aten._convolution.default(
            a,
            b,
            None,
            *geometry,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.enabled,
            precision == "tf32",
        )
    else:
        with conv_fp32_switch(precision, device):
            out = aten.convolution.default(a, b, None, *geometry)
    # output_padding >= stride (allowed under a larger dilation) makes a plain convolution yield more planes.
    if tuple(out.shape) != shape:
        out = out[:, :, : size[0], : size[1], : size[2]].contiguous()
    return with_exact_strides(out, channels_last)


class _ProductFunction(_SingleLevelFunction):
    """One level of autograd, torch.func's included: what is below it is reached by the redispatch."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, grad_mode: tuple[bool, bool], a: Tensor, b: Tensor, *rest: Any
    ) -> Tensor:
        ctx.grad_mode, ctx.rest = grad_mode, rest
        with _below(grad_mode):
            out = product_op.redispatch(keyset & torch._C._after_autograd_keyset, a, b, *rest)
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        kind, _, *geometry = ctx.rest
        operands = {"a": a, "b": b, "g": grads[0]}
        results: list[Tensor | None] = [None, None]
        for i, wanted in enumerate(ctx.needs_input_grad[2:4]):
            if wanted:
                other, left, right = _DERIVATIVES[kind][i]
                size = (a, b)[i].shape[2:]
                results[i] = product_op(operands[left], operands[right], other, size, *geometry)
        return (None, None, *results, *(None for _ in ctx.rest))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        a, b = ctx.saved_tensors
        _, _, tangent_a, tangent_b, *_ = tangents
        with ExitStack() as stack:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                stack.enter_context(_below(ctx.grad_mode))
            left = None if tangent_a is None else product_op(tangent_a, b, *ctx.rest)
            right = None if tangent_b is None else product_op(a, tangent_b, *ctx.rest)
            if left is None or right is None:
                return right if left is None else left
            return left + right


@contextmanager
def _below(grad_mode: tuple[bool, bool]) -> Iterator[None]:
    """Runs a block below this level of autograd.

    A Function's own code runs with one or both grad modes off. That is meant for its own level: the levels of
    torch.func below, if there are some, take part as they would have without the Function.
    """
    with (
        torch.set_grad_enabled(grad_mode[0]),
        forward_ad._set_fwd_grad_enabled(grad_mode[1]),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def _autograd(keyset: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    grad_mode = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
    with functorch.enable_single_level_autograd_function():  # type: ignore[attr-defined]
        return _ProductFunction.apply(keyset, grad_mode, a, b, *rest)  # type: ignore[attr-defined, no-any-return]


def _vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """A mapped image alone becomes batch; otherwise the mapped dimension becomes groups."""
    kind, size, stride, padding, output_padding, groups, dilation, precision = rest
    dim_a, dim_b = in_dims[0], in_dims[1]
    n = info.batch_size
    b_is_weight = kind != "weight"
    if b_is_weight and dim_b is None:
        out = product_op(a.movedim(dim_a, 0).flatten(0, 1), b, *rest)
        return out.unflatten(0, (n, -1)), 0
    a = a.unsqueeze(1).expand(-1, n, *a.shape[1:]) if dim_a is None else a.movedim(dim_a, 0).movedim(0, 1)
    a = a.flatten(1, 2)
    if b_is_weight:
        b = b.movedim(dim_b, 0).flatten(0, 1)
    else:
        b = b.unsqueeze(1).expand(-1, n, *b.shape[1:]) if dim_b is None else b.movedim(dim_b, 0).movedim(0, 1)
        b = b.flatten(1, 2)
    out = product_op(a, b, kind, size, stride, padding, output_padding, groups * n, dilation, precision)
    return (out.unflatten(1, (n, -1)), 1) if b_is_weight else (out.unflatten(0, (n, -1)), 0)


for _key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
    _library.impl("product", _real, _key)
_library.impl("product", _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("convt3d::product", _fake, lib=_library)
torch.library.register_vmap("convt3d::product", _vmap, lib=_library)
