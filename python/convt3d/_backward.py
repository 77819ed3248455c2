# SPDX-License-Identifier: Apache-2.0
"""Gradients of the operator.

With ``t = conv_transpose3d(x, w) + bias + add`` and ``y = act(t)``: ``grad_t = act'(t) * grad_y``;
``grad_add`` is ``grad_t`` summed over broadcast dimensions; ``grad_x``, ``grad_w``, ``grad_bias`` are the
gradients of the convolution at ``grad_t``. ``t`` is recomputed from the inputs rather than stored: it is as
large as the output, and the operator that recomputes it is bound by reading inputs it has to read anyway.
On CUDA one kernel then turns ``t`` into ``grad_t`` in its own memory, and sums it for ``grad_bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._aten import keeps_precision, preactivation, product
from ._grad_pre import ALL_BUT_CHANNELS, GradPre, grad_pre, to_channels_last, to_contiguous
from ._memory_format import surely, with_exact_strides
from ._precision import conv_fp32_switch, resolve_precision, round_to_tf32
from ._problem import Problem

aten = torch.ops.aten

Mask = tuple[bool, bool, bool, bool]
"""Which gradients are wanted: input, weight, bias, add."""


def needs_preactivation(problem: Problem) -> bool:
    return problem.activation.name != "none"


def backward(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    mask: Sequence[bool],
    recompute: Callable[[], Tensor],
) -> list[Tensor]:
    """The wanted gradients, in order, computed without autograd.

    Args:
        grad_output: shape of the output.
        mask: which of input, weight, bias, add (in that order) get a gradient.
        recompute: gives the pre-activation, shape of the output.

    Returns:
        One tensor per True in ``mask``, shaped and typed like its tensor. Gradients of input and weight have
        the output's memory format.
    """
    dtype = problem.dtype
    if problem.batch == 0 or 0 in problem.out_size:
        return empty_gradients(problem, input, weight, bias, add, mask, zero=True)
    grad_y = grad_output if problem.batched else grad_output.unsqueeze(0)
    per_channel = mask[3] and add is not None and problem.add_before and _is_per_channel(problem, add)
    t: Tensor | None = None
    if needs_preactivation(problem):
        t = recompute() if problem.batched else recompute().unsqueeze(0)
    pre = grad_pre(
        problem,
        grad_y,
        t,
        own=mask[3] and problem.add_before and not per_channel,
        convolved=mask[0] or mask[1],
        sums=mask[2] or per_channel,
    )
    del t
    grads: list[Tensor] = []
    x = input if problem.batched else input.unsqueeze(0)
    grad_x, grad_w = _conv_gradients(problem, pre, x, weight, mask[:2])
    if grad_x is not None:
        grad_x = with_exact_strides(grad_x.to(dtype), problem.channels_last)
        grads.append(grad_x if problem.batched else grad_x.squeeze(0))
    if grad_w is not None:
        grads.append(with_exact_strides(grad_w.to(dtype), problem.channels_last))
    if mask[2]:
        assert pre.sums is not None
        grads.append(pre.sums.to(dtype))
    if per_channel:
        assert pre.sums is not None and add is not None
        grads.append(pre.sums.to(dtype, copy=True).view(add.shape))
    elif mask[3]:
        through = pre.own if problem.add_before else grad_y
        assert add is not None and through is not None
        grad_add = _reduce_to_add(problem, through, add).to(dtype)
        grads.append(grad_add.clone() if _passes_unchanged(problem, add) else grad_add)
    return grads


def _is_per_channel(problem: Problem, add: Tensor) -> bool:
    """Whether ``add`` is one value for each channel, so that its gradient is the bias's."""
    channels = add.dim() - 4
    return (
        channels >= 0
        and surely(add.shape[channels] == problem.out_channels)
        and all(surely(extent == 1) for dim, extent in enumerate(add.shape) if dim != channels)
        and not _has_the_outputs_shape(problem, add)
    )


def _passes_unchanged(problem: Problem, add: Tensor) -> bool:
    """Whether the gradient of ``add`` is the output's itself, which an operator may return only as a copy."""
    through_activation = needs_preactivation(problem) and problem.add_before
    return not through_activation and _has_the_outputs_shape(problem, add)


def _has_the_outputs_shape(problem: Problem, add: Tensor) -> bool:
    shape = problem.output_shape
    return add.dim() == len(shape) and all(surely(a == b) for a, b in zip(add.shape, shape, strict=True))


def _reduce_to_add(problem: Problem, grad: Tensor, add: Tensor) -> Tensor:
    """``grad`` (5-D) summed over what ``add`` broadcasts, with `empty_gradients`' strides."""
    if _has_the_outputs_shape(problem, add):
        grad = with_exact_strides(grad, problem.channels_last)
        return grad if problem.batched else grad.squeeze(0)
    return grad.sum_to_size(add.shape).contiguous()


def empty_gradients(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    mask: Sequence[bool],
    zero: bool = False,
    device: str | None = None,
) -> list[Tensor]:
    """Tensors of the shapes, types and strides that :func:`backward` returns; zeros if asked.

    On the problem's device, or on another one.
    """
    fill = torch.zeros if zero else torch.empty
    options = {"dtype": problem.dtype, "device": device or problem.device}
    grads: list[Tensor] = []

    def like(shape: Sequence[int]) -> Tensor:
        grad = torch.empty(tuple(shape), **options, memory_format=problem.memory_format)  # type: ignore[call-overload]
        return grad.zero_() if zero else grad  # type: ignore[no-any-return]

    if mask[0]:
        grads.append(like(input.shape) if problem.batched else like((1, *input.shape)).squeeze(0))
    if mask[1]:
        grads.append(like(weight.shape))
    if mask[2]:
        grads.append(fill((problem.out_channels,), **options))  # type: ignore[call-overload]
    if mask[3]:
        assert add is not None
        if _has_the_outputs_shape(problem, add):
            grad = like(problem.output_shape_5d)
            grads.append(grad if problem.batched else grad.squeeze(0))
        else:
            grads.append(fill(tuple(add.shape), **options))  # type: ignore[call-overload]
    return grads


def _conv_gradients(
    problem: Problem, pre: GradPre, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight of conv_transpose3d(input, weight) at ``pre``; all 5-D.

    Takes ``pre.ndhwc`` away when it has done its part.
    """
    if not any(mask):
        return None, None
    on_cuda = problem.device.type == "cuda"
    precision = problem.precision
    grad_t = pre.for_convolutions()
    turned = pre.ndhwc is not None
    if turned:
        input, weight = to_channels_last(input), to_channels_last(weight)
    if problem.is_sixteen_bit and not on_cuda:
        grad_t, input, weight = grad_t.float(), input.float(), weight.float()
        precision = "ieee"
    elif problem.is_sixteen_bit:
        grad_t = grad_t.to(problem.dtype)
    elif precision == "tf32" and problem.dtype == torch.float32 and not on_cuda:
        grad_t, input, weight = round_to_tf32(grad_t), round_to_tf32(input), round_to_tf32(weight)
    grad_x: Tensor | None = None
    rest = (mask[0], mask[1], False)
    if mask[0] and on_cuda and precision != "default" and problem.dtype == torch.float32:
        # Told its precision as an argument, it needs no global switch.
        grad_x = _conv_with_precision(problem, grad_t, weight, precision)
        rest = (False, mask[1], False)
    grad_w: Tensor | None = None
    if any(rest):
        with conv_fp32_switch(precision, problem.device.type):
            x, grad_w, _ = conv_backward(problem, grad_t, input, weight, rest)
        grad_x = x if rest[0] else grad_x
    if grad_x is not None and turned:
        pre.ndhwc = None
        del grad_t, input  # as large as the output, and not needed any more
        grad_x = to_contiguous(grad_x)
    return grad_x, grad_w if mask[1] else None


def _conv_with_precision(problem: Problem, grad_t: Tensor, weight: Tensor, precision: str) -> Tensor:
    """The gradient of the input, which is a plain convolution of ``grad_t``."""
    grad: Tensor = aten._convolution.default(
        grad_t,
        weight,
        None,
        problem.stride,
        problem.padding,
        problem.dilation,
        False,
        (0, 0, 0),
        problem.groups,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        resolve_precision(precision, "cuda") == "tf32",
    )
    # output_padding >= stride (allowed under a larger dilation) makes the convolution yield planes beyond x.
    for dim in range(3):
        grad = grad.narrow(2 + dim, 0, problem.in_size[dim])
    return grad


def conv_backward(
    problem: Problem, grad_t: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::convolution_backward`` of the transposed convolution; differentiable."""
    return aten.convolution_backward.default(  # type: ignore[no-any-return]
        grad_t,
        input,
        weight,
        [problem.out_channels],
        problem.stride,
        problem.padding,
        problem.dilation,
        True,
        problem.output_padding,
        problem.groups,
        list(mask),
    )


def differentiable_backward(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    mask: Sequence[bool],
) -> list[Tensor]:
    """:func:`backward` in differentiable ATen operators, for ``create_graph=True`` to any order."""
    dtype = problem.dtype
    x = input if problem.batched else input.unsqueeze(0)
    grad_y = grad_output if problem.batched else grad_output.unsqueeze(0)
    opmath = problem.opmath_dtype
    grad_t = grad_y.to(opmath)
    if needs_preactivation(problem):
        t = preactivation(problem, x, weight, bias, add)
        grad_t = problem.activation.backward(grad_t, t, problem.negative_slope)
    grads: list[Tensor] = []
    if keeps_precision(problem):
        if mask[0]:
            grad_x = product(problem, "input", grad_t, weight, problem.in_size)
            grads.append(grad_x if problem.batched else grad_x.squeeze(0))
        if mask[1]:
            grads.append(product(problem, "weight", x, grad_t, problem.kernel))
    elif mask[0] or mask[1]:
        with conv_fp32_switch(problem.precision, problem.device.type):
            grad_x, grad_w, _ = conv_backward(
                problem, grad_t, x.to(opmath), weight.to(opmath), (mask[0], mask[1], False)
            )
        if mask[0]:
            grads.append((grad_x if problem.batched else grad_x.squeeze(0)).to(dtype))
        if mask[1]:
            grads.append(grad_w.to(dtype))
    if mask[2]:
        grads.append(grad_t.sum(ALL_BUT_CHANNELS).to(dtype))
    if mask[3]:
        assert add is not None
        through = grad_t if problem.add_before else grad_y
        grad_add = (through if problem.batched else through.squeeze(0)).sum_to_size(add.shape).to(dtype)
        grads.append(grad_add.clone() if _passes_unchanged(problem, add) else grad_add)
    return grads
