# SPDX-License-Identifier: Apache-2.0
"""Is the result right? A wrong row has no time. Judged by the tests' own bound, on samples of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

import _paths  # noqa: F401 (finds the tests' accuracy bound)
import accuracy
from cases import Case, Tensors
from workloads import Row

# float64 is slow on the tensor cores' scale: samples are checked until about this many FLOPs are spent.
_CHECKED_FLOPS = 2e10
_MOST_SAMPLES = 4


@dataclass(frozen=True)
class Checked:
    """Attributes:
    max_abs_error: against float64, in tf32 mode that of the rounded operands.
    bound_share: the largest part of the accuracy bound that an output used.
    samples: of the batch, that were compared; every output was looked at for nan and infinity.
    message: what is wrong; empty where nothing is.
    """

    max_abs_error: float
    bound_share: float
    samples: int
    message: str


def check(row: Row, inputs: dict[str, Tensor], call: Callable[..., Tensor], path: str) -> Checked:
    """Runs the call once on memory full of nan, and compares samples spread over the batch.

    Args:
        path: that the call takes, as ``convt3d.explain`` names it: cuDNN's algorithms have another bound.
    """
    poison(inputs["add"])
    result = call(inputs["input"], inputs["weight"], inputs.get("bias"), inputs["add"])
    expected = (inputs["add"].shape, row.dtype)
    if (result.shape, result.dtype) != expected:
        return Checked(nan, nan, 0, f"expected {expected}, got {(result.shape, result.dtype)}")
    unwritten = result.numel() - int(torch.isfinite(result).sum())
    if unwritten:
        return Checked(nan, nan, 0, f"{unwritten} outputs are nan or infinite")
    case = _case(row)
    modes = [accuracy.mode_of(case, row.mode == "tf32", path)]
    if modes == ["aten tf32"]:
        modes.append("aten")  # there TF32 is only allowed: cuDNN may take plain fp32
    largest, share, message = 0.0, 0.0, ""
    samples = _samples(row)
    for index in samples:
        part = slice(index, index + 1)
        tensors = Tensors(inputs["input"][part], inputs["weight"], inputs.get("bias"), inputs["add"][part])
        for mode in modes:
            judgement = accuracy.judge(case, tensors, result[part], mode)
            if not judgement.failure:
                break
        message = message or (f"sample {index}: {judgement.failure}" if judgement.failure else "")
        share = max(share, judgement.share)
        y64, _, _ = accuracy.exact(case, tensors, tf32=mode.endswith("tf32"))
        largest = max(largest, float((result[part].double() - y64).abs().max()))
    return Checked(largest, share, len(samples), message)


def poison(like: Tensor) -> None:
    """Leaves nan in what the allocator hands out next: the output's size, and small and large workspaces."""
    blocks = [torch.full_like(like, float("nan"))]
    blocks += [
        torch.full((2**bits,), float("nan"), dtype=like.dtype, device=like.device)
        for bits in (10, 16, 20, 24)
    ]
    del blocks


def _samples(row: Row) -> list[int]:
    """Spread over the batch, the last one always among them."""
    batch = row.workload.batch
    affordable = int(_CHECKED_FLOPS / (row.work()[1] / batch))
    count = max(1, min(_MOST_SAMPLES, batch, affordable))
    return [batch - 1 - i * batch // count for i in range(count)]


def _case(row: Row) -> Case:
    w = row.workload
    return Case(
        batch=1,
        cin=w.cin,
        cout=w.cout,
        size=w.size,
        kernel=w.kernel,
        stride=w.stride,
        padding=w.padding,
        output_padding=w.output_padding,
        dtype=row.dtype,
        bias=w.bias,
        activation=w.activation,
        negative_slope=w.negative_slope,
        name=row.name,
    )
