# SPDX-License-Identifier: Apache-2.0
"""Judges results against float64 by the bound of convt3d/_accuracy.py, which says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Case, Tensors
from convt3d import _accuracy as bound
from convt3d._accuracy import C, ulp
from convt3d._activations import ACTIVATIONS
from convt3d._precision import resolve_precision, round_to_tf32

__all__ = ["C", "Judgement", "allowed_error", "assert_accurate", "exact", "judge", "mode_of", "ulp"]

# Mode -> (largest share of the bound that a result used, which case).
worst_shares: dict[str, tuple[float, str]] = {}


def mode_of(case: Case, tf32: bool, path: str) -> str:
    return bound.mode_of(case.dtype, tf32, path)


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


def allowed_error(case: Case, y: Tensor, t: Tensor, magnitude: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """The bound's two terms, for float64 ``y``, ``t`` and ``magnitude`` of :func:`exact`."""
    add_after = case.add_order == "after"
    return bound.allowed_error(case.activation, add_after, case.dtype, y, t, magnitude, mode)


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
