# SPDX-License-Identifier: Apache-2.0
"""The operator in ATen's terms: CPU, CUDA fallback, and a differentiable form for functorch.

Whatever the path: 16-bit types are computed in fp32, sums and epilogue, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._memory_format import with_exact_strides
from ._precision import conv_fp32_switch, resolve_precision, round_to_tf32
from ._problem import Problem
from ._product import product_op

aten = torch.ops.aten


def forward(
    problem: Problem, input: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None
) -> Tensor:
    """The operator through ATen's transposed convolution and an in-place tail, on any device.

    Returns:
        A new tensor of ``problem.output_shape`` with exactly the strides of ``problem.empty_output()``.
    """
    if problem.batch == 0 or 0 in problem.out_size:
        return problem.empty_output()
    if not problem.batched:
        input = input.unsqueeze(0)
    out = _convolve(problem, input, weight, bias)
    if add is not None and problem.add_before:
        out.add_(add)
    out = problem.activation.forward_(out, problem.negative_slope)
    if add is not None and not problem.add_before:
        out.add_(add)
    out = with_exact_strides(out.to(problem.dtype), problem.channels_last)
    return out if problem.batched else out.squeeze(0)


def _convolve(problem: Problem, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv_transpose3d(input, weight) + bias for 5-D tensors, in ``problem.opmath_dtype``; a new tensor."""
    on_cuda = problem.device.type == "cuda"
    precision = resolve_precision(problem.precision, problem.device.type)
    input, weight, bias = _widened(problem, input, weight, bias)
    if problem.is_sixteen_bit:
        # The operands are exact in TF32, so its products are exact and its sums fp32: all that is needed.
        precision = "tf32" if on_cuda else "ieee"
    elif precision == "tf32" and not on_cuda and problem.dtype == torch.float32:
        input, weight = round_to_tf32(input), round_to_tf32(weight)
    if on_cuda and not problem.dtype.is_complex:
        out: Tensor = aten._convolution.default(
            input,
            weight,
            bias,
            problem.stride,
            problem.padding,
            problem.dilation,
            True,
            problem.output_padding,
            problem.groups,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.enabled,
            precision == "tf32",
        )
        return out
    explicit = problem.is_sixteen_bit or problem.precision != "default"
    with conv_fp32_switch("ieee" if explicit else "default", problem.device.type):
        return conv_transpose(problem, input, weight, bias)


def _widened(
    problem: Problem, input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three in ``problem.opmath_dtype``."""
    dtype = problem.opmath_dtype
    if dtype == problem.dtype:
        return input, weight, bias
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def conv_transpose(problem: Problem, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``aten::conv_transpose3d`` for 5-D tensors: differentiable, complex too, known to functorch."""
    out: Tensor = aten.conv_transpose3d.input(
        input,
        weight,
        bias,
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
    )
    return out


def keeps_precision(problem: Problem) -> bool:
    """Whether the precision has to hold in derivatives, which run when nothing holds PyTorch's switch."""
    return problem.precision != "default" and problem.dtype == torch.float32


def product(problem: Problem, kind: str, a: Tensor, b: Tensor, size: Sequence[int]) -> Tensor:
    """``convt3d::product``, see there, of this problem's geometry and precision; ``size`` is the result's."""
    out: Tensor = product_op(
        a,
        b,
        kind,
        size,
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
        problem.precision,
    )
    return out


def preactivation(
    problem: Problem, input: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None
) -> Tensor:
    """What the activation sees, in ``problem.opmath_dtype`` and differentiable. ``input`` is 5-D."""
    input, weight, bias = _widened(problem, input, weight, bias)
    if keeps_precision(problem):
        t = product(problem, "output", input, weight, problem.out_size)
        if bias is not None:
            t = t + bias.view(-1, 1, 1, 1)
    else:
        with conv_fp32_switch(problem.precision, problem.device.type):
            t = conv_transpose(problem, input, weight, bias)
    return t + add if add is not None and problem.add_before else t


def decomposed(
    problem: Problem, input: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None
) -> Tensor:
    """The operator in differentiable ATen operators only: for functorch transforms and forward-mode AD."""
    t = preactivation(problem, input if problem.batched else input.unsqueeze(0), weight, bias, add)
    out = problem.activation.forward(t, problem.negative_slope)
    if add is not None and not problem.add_before:
        out = out + add
    out = out.to(problem.dtype)
    return out if problem.batched else out.squeeze(0)
