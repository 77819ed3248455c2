# SPDX-License-Identifier: Apache-2.0
"""How a result is judged against float64, on every path; the tests, ``check`` and ``explain`` share it.

    |y - y64| <= 1/2 ulp(y64) + L * c * 2^-22 * (sum |x||w| + |bias| + |add|)

``y64`` is the float64 result, in tf32 mode that of the operands rounded to TF32 (nearest, ties to even);
``ulp`` is the output type's; ``L`` bounds the activation's slope around the pre-activation; ``c`` is one
constant for each mode, fixed from measurement and never raised afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

# c of the bound, by mode; docs/numerics.md has the measurements behind it.
#
# The tensor cores truncate each sum, so tf32's constant is set by long ones: 3.8 with 4096 products. ieee
# sums blocks of 16 products apart and needs 2.4; 16-bit results are dominated by their own rounding.
# The aten modes are calls that run on cuDNN, whose algorithms (Winograd's, say) are not ours to bound more
# tightly. Its TF32 rounds operands as the chosen algorithm likes: two operands off by up to 2^-10 each,
# against the unrounded reference. float64 is judged by float64: the same sums in another order, for which
# 2^-50 (four of its ulps) is left.
C = {"ieee": 4.0, "tf32": 8.0, "16-bit": 4.0, "float64": 2.0**-28, "aten": 16.0, "aten tf32": 2.0**13}

# Largest |act'|. x_hardswish's grows with t and is computed.
_SLOPE = {
    "none": 1.0,
    "relu": 1.0,
    "leaky_relu": 1.0,
    "elu": 1.0,
    "gelu": 1.13,
    "gelu_tanh": 1.13,
    "silu": 1.1,
    "sigmoid": 0.25,
    "tanh": 1.0,
    "hardswish": 1.5,
}


def mode_of(dtype: torch.dtype, tf32: bool, path: str) -> str:
    """The mode that a call is judged in.

    Args:
        tf32: whether PyTorch's switch or the call asks for TF32.
        path: of :func:`convt3d.explain`.
    """
    if dtype == torch.float64:
        return "float64"
    if path == "aten + tail":
        return "aten tf32" if tf32 and dtype == torch.float32 else "aten"
    if dtype != torch.float32:
        return "16-bit"
    return "tf32" if tf32 else "ieee"


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of ``dtype`` at float64 ``value``; that of its subnormals near zero."""
    info = torch.finfo(dtype)
    mantissa_bits = round(-torch.log2(torch.tensor(info.eps, dtype=torch.float64)).item())
    _, exponent = torch.frexp(value.abs())
    smallest = torch.tensor(info.tiny, dtype=torch.float64) * info.eps
    spacing = torch.ldexp(torch.ones_like(value), (exponent - 1 - mantissa_bits).to(torch.int32))
    return torch.where(value == 0, torch.zeros_like(value), spacing).clamp_min(smallest.item())


def slope(activation: str, add_after: bool, t: Tensor, nearby: Tensor) -> Tensor:
    """L: a bound on |act'| within ``nearby`` of ``t``, at least 1 where an add follows the activation."""
    if activation == "x_hardswish":
        reach = t.abs() + nearby
        largest = torch.maximum(2 * reach, torch.where(reach < 3, reach * reach / 2 + reach, 7.5))
    else:
        largest = torch.full_like(t, _SLOPE[activation])
    return largest.clamp_min(1.0) if add_after else largest


def allowed_error(
    activation: str, add_after: bool, dtype: torch.dtype, y: Tensor, t: Tensor, magnitude: Tensor, mode: str
) -> tuple[Tensor, Tensor]:
    """The bound's two terms.

    Args:
        dtype: of the result.
        y, t, magnitude: float64: the result, the pre-activation, and sum |x||w| + |bias| + |add|.
        mode: of :func:`mode_of`.
    """
    if activation == "sigmoid":
        magnitude = magnitude + 1  # 1 / (1 + exp(-t)): the ones are summed too, and may be all there is
    unit = C[mode] * 2.0**-22 * magnitude
    return ulp(y, dtype) / 2, slope(activation, add_after, t, unit) * unit
