# SPDX-License-Identifier: Apache-2.0
"""The pointwise half of a backward pass: the gradient of the pre-activation, in the layouts that are wanted.

On CUDA one kernel of ours reads grad_output and the pre-activation ``t`` once, writes their product
``grad_output * act'(t)`` over ``t`` and sums it for each channel. Where cuDNN would bring that into
channels-last order, once for each of the two convolutions, the kernel writes it in that order too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from . import _native
from ._precision import resolve_precision
from ._problem import Problem

ALL_BUT_CHANNELS = (0, 2, 3, 4)

# cuDNN's convolutions of these types run on tensor cores, over NDHWC tensors.
_TENSOR_CORE_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

# Of one output: below, two more launches and their host time cost more than cuDNN's own conversions.
_LEAST_BYTES = 2**24


@dataclass
class GradPre:
    """Attributes:
    own: 5-D, in the output's layout (or grad_output's); None where it was not wanted and not computed.
    ndhwc: the same values, channels_last_3d; None where nothing gains from it.
    sums: each channel's sum, (C,), in the type sums are computed in; None where not wanted.
    """

    own: Tensor | None
    ndhwc: Tensor | None = None
    sums: Tensor | None = None

    def for_convolutions(self) -> Tensor:
        grad = self.own if self.ndhwc is None else self.ndhwc
        assert grad is not None
        return grad


def grad_pre(
    problem: Problem, grad_y: Tensor, t: Tensor | None, own: bool, convolved: bool, sums: bool
) -> GradPre:
    """``grad_y * act'(t)``.

    Args:
        grad_y: 5-D.
        t: the pre-activation, 5-D, which may be overwritten; None where the activation is "none".
        own: whether the result is wanted in the output's layout.
        convolved: whether convolutions will read it.
        sums: whether each channel's sum is wanted.
    """
    act = problem.activation
    if problem.device.type == "cuda":
        arguments = (grad_y, t, act.name, problem.negative_slope, sums)
        if convolved and _convolves_channels_last(problem):
            ndhwc = torch.empty(
                problem.output_shape_5d,
                dtype=problem.dtype,
                device=problem.device,
                memory_format=torch.channels_last_3d,
            )
            summed = _native.activation_backward_(*arguments, ndhwc, own)
            if summed is not None:
                written = t if own else None
                return GradPre(grad_y if t is None else written, ndhwc, summed if sums else None)
            del ndhwc
        if t is None and not sums:
            return GradPre(grad_y)
        summed = _native.activation_backward_(*arguments)
        if summed is not None:
            return GradPre(grad_y if t is None else t, None, summed if sums else None)
    grad = grad_y
    if t is not None:
        opmath = problem.opmath_dtype
        grad = act.backward(grad_y.to(opmath), t.to(opmath), problem.negative_slope)
    return GradPre(grad, None, grad.sum(ALL_BUT_CHANNELS) if sums else None)


def _convolves_channels_last(problem: Problem) -> bool:
    """Whether cuDNN would convert contiguous operands, and takes channels-last ones as they are."""
    if problem.channels_last or problem.dtype not in _TENSOR_CORE_TYPES or problem.groups != 1:
        return False
    vector = 16 // problem.dtype.itemsize
    return (
        torch.backends.cudnn.enabled
        and problem.in_channels % vector == 0
        and problem.out_channels % vector == 0
        and prod(problem.output_shape_5d) * problem.dtype.itemsize >= _LEAST_BYTES
        and (problem.is_sixteen_bit or resolve_precision(problem.precision, "cuda") == "tf32")
    )


def to_channels_last(tensor: Tensor) -> Tensor:
    """A 5-D CUDA tensor in channels_last_3d; the kernel above is faster at it than ATen's copy."""
    if tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor
    out = torch.empty_like(tensor, memory_format=torch.channels_last_3d)
    if _native.activation_backward_(tensor, None, "none", 0.0, False, out) is None:
        out.copy_(tensor)
    return out


def to_contiguous(tensor: Tensor) -> Tensor:
    """A 5-D CUDA tensor in NCDHW order."""
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor.contiguous()
    # A sample is a matrix of positions by channels; turned over, it is the other layout.
    n, c, *size = tensor.shape
    p = prod(size)
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    rows = tensor.as_strided((n, p, c, 1, 1), (p * c, c, 1, 1, 1))
    columns = out.as_strided((n, p, c, 1, 1), (p * c, 1, p, p * c, p * c))
    if _native.activation_backward_(rows, None, "none", 0.0, False, columns) is None:
        out.copy_(tensor)
    return out
