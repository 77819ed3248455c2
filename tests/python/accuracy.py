# SPDX-License-Identifier: Apache-2.0
"""How a result is judged against float64, on every path:

    |y - y64| <= 1/2 ulp(y64) + L * c * 2^-22 * (sum |x||w| + |bias| + |add|)

``y64`` is the float64 result, in tf32 mode that of the operands rounded to TF32 (nearest, ties to even);
``ulp`` is the output type's; ``L`` bounds the activation's slope around the pre-activation; ``c`` is one
constant for each mode, fixed from measurement and never raised afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Case, Tensors
from convt3d._activations import ACTIVATIONS
from convt3d._precision import resolve_precision, round_to_tf32

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

# Mode -> (largest share of the bound that a result used, which case).
worst_shares: dict[str, tuple[float, str]] = {}


def mode_of(case: Case, tf32: bool, path: str) -> str:
    if case.dtype == torch.float64:
        return "float64"
    if path == "aten + tail":
        return "aten tf32" if tf32 and case.dtype == torch.float32 else "aten"
    if case.dtype != torch.float32:
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


def exact(case: Case, tensors: Tensors, tf32: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The float64 result, pre-activation, and sum |x||w| + |bias| + |add|; on the tensors' device."""
    x, w = tensors.input, tensors.weight
    if tf32 and case.dtype == torch.float32:
        x, w = round_to_tf32(x), round_to_tf32(w)
    x, w = x.double(), w.double()
    bias = None if tensors.bias is None else tensors.bias.double()
    t = F.conv_transpose3d(x, w, bias, **case.conv_arguments())
    magnitude = F.conv_transpose3d(
        x.abs(), w.abs(), None if bias is None else bias.abs(), **case.conv_arguments()
    )
    if tensors.add is not None:
        magnitude = magnitude + tensors.add.double().abs()
        if case.add_order == "before":
            t = t + tensors.add.double()
    y = ACTIVATIONS[case.activation].forward(t, case.negative_slope)
    if tensors.add is not None and case.add_order == "after":
        y = y + tensors.add.double()
    return y, t, magnitude


def slope(case: Case, t: Tensor, nearby: Tensor) -> Tensor:
    """L: a bound on |act'| within ``nearby`` of ``t``, at least 1 where an add follows the activation."""
    if case.activation == "x_hardswish":
        reach = t.abs() + nearby
        largest = torch.maximum(2 * reach, torch.where(reach < 3, reach * reach / 2 + reach, 7.5))
    else:
        largest = torch.full_like(t, _SLOPE[case.activation])
    return largest.clamp_min(1.0) if case.add_order == "after" else largest


def allowed_error(case: Case, y: Tensor, t: Tensor, magnitude: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """The bound's two terms, for float64 ``y``, ``t`` and ``magnitude`` of :func:`exact`."""
    if case.activation == "sigmoid":
        magnitude = magnitude + 1  # 1 / (1 + exp(-t)): the ones are summed too, and may be all there is
    unit = C[mode] * 2.0**-22 * magnitude
    return ulp(y, case.dtype) / 2, slope(case, t, unit) * unit


@dataclass(frozen=True)
class Judgement:
    """``share`` of the bound that the worst output uses, and what is wrong, if anything."""

    mode: str
    share: float
    failure: str


def judge(case: Case, tensors: Tensors, result: Tensor, mode: str) -> Judgement:
    y, t, magnitude = exact(case, tensors, tf32=mode == "tf32")
    if result.shape != y.shape or result.dtype != case.dtype:
        return Judgement(mode, inf, f"{case}: got {tuple(result.shape)} {result.dtype}")
    half_ulp, allowed = allowed_error(case, y, t, magnitude, mode)
    error = (result.double() - y).abs()
    share = ((error - half_ulp) / allowed.clamp_min(1e-300)).max().item() if y.numel() else 0.0
    excess = error - (half_ulp + allowed)
    bad = ~(excess <= 0)
    if not bad.any():
        return Judgement(mode, share, "")
    worst = int(torch.where(bad, excess.nan_to_num(nan=inf), -1.0).argmax())
    index = torch.unravel_index(torch.tensor(worst), y.shape)
    return Judgement(
        mode,
        share,
        f"{case}: {int(bad.sum())} of {y.numel()} outputs beyond the bound (mode {mode}); worst at "
        f"{tuple(int(i) for i in index)}: got {result.flatten()[worst].item()!r}, float64 "
        f"{y.flatten()[worst].item()!r}, error {error.flatten()[worst].item():.3e}, allowed "
        f"{(half_ulp + allowed).flatten()[worst].item():.3e}",
    )


def assert_accurate(case: Case, tensors: Tensors, result: Tensor) -> None:
    """Asserts the bound for every output by itself, in the mode that the call has here and now."""
    path = case.explain(tensors).path
    tf32 = resolve_precision(case.precision or "default", tensors.input.device.type) == "tf32"
    verdict = judge(case, tensors, result, mode_of(case, tf32, path))
    if verdict.failure:
        raise AssertionError(f"path {path}: {verdict.failure}")
    if verdict.share > worst_shares.get(verdict.mode, (0.0, ""))[0]:
        worst_shares[verdict.mode] = (verdict.share, case.name)
