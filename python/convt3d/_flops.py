# SPDX-License-Identifier: Apache-2.0
"""What ``torch.utils.flop_counter`` counts for the operators: PyTorch's count for the same convolutions.

Two per multiply-add, every tap of every input: what falls beside the output counts too, bias and epilogue do
not. :func:`convt3d.explain` counts more exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import _cat, _packed, _product  # noqa: F401 (define their operators)


def _count(input: Sequence[int], weight: Sequence[int]) -> int:
    return 2 * prod(input) * prod(weight[1:])


@register_flop_formula(
    [
        torch.ops.convt3d.conv_transpose3d,
        torch.ops.convt3d.conv_transpose3d_core,
        torch.ops.convt3d.conv_transpose3d_cat,
        torch.ops.convt3d.conv_transpose3d_cat_core,
        torch.ops.convt3d.conv_transpose3d_packed,
    ]
)
def _forward(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return _count(input, weight)


@register_flop_formula(torch.ops.convt3d.conv_transpose3d_backward)
def _backward(
    grad_output: Sequence[int], input: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any
) -> int:
    """Behind an activation the pre-activation is computed again."""
    activation, mask = rest[8], rest[-1]
    convolutions = int(mask[0]) + int(mask[1]) + int(activation != "none")
    return convolutions * _count(input, weight)


@register_flop_formula(torch.ops.convt3d.product)
def _product_flops(
    a: Sequence[int], b: Sequence[int], kind: str, size: Sequence[int], *rest: Any, **_: Any
) -> int:
    groups = rest[3]
    if kind == "output":
        return _count(a, b)
    if kind == "input":
        return _count((a[0], b[0], *size), b)
    return _count(a, (a[1], b[1] // groups, *size))
