# SPDX-License-Identifier: Apache-2.0
"""Batch norm at inference, folded into the transposed convolution's weight and bias.

``(conv(x, w) + b - mean) * s + beta = conv(x, w * s) + (b - mean) * s + beta`` with
``s = gamma / sqrt(var + eps)``. Computed in every call from the tensors as they are then, differentiable, and
never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def types_fit(types: set[torch.dtype], input: torch.dtype) -> bool:
    """Whether PyTorch's batch norm takes statistics and parameters of these types with that input's.

    It refuses what is not of the input's type, but for float32 beside 16-bit types.
    """
    return types == {input} or (input.itemsize == 2 and types == {torch.float32})


def fold(
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    arguments: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Weight and bias that do the work of ``F.batch_norm(**arguments)`` too, or None.

    Args:
        weight: (Cin, Cout / groups, kD, kH, kW).
        bias: (Cout,).
        arguments: of ``torch.nn.functional.batch_norm``, by name.
        dtype: the convolution's result's; None where the types have been looked at before.

    None stands for batch statistics, or for tensors that do not go with the weight or the result. The
    arithmetic is fp32 for 16-bit weights; the results have the weight's dtype.
    """
    mean, var = arguments.get("running_mean"), arguments.get("running_var")
    if arguments.get("training", False) or not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return None
    gamma, beta = arguments.get("weight"), arguments.get("bias")
    channels = weight.shape[1] * groups
    types = set()
    for tensor in (mean, var, gamma, beta):
        if tensor is None:
            continue
        if tensor.shape != (channels,) or tensor.device != weight.device:
            return None
        types.add(tensor.dtype)
    if dtype is not None and not types_fit(types, dtype):
        return None
    if torch.is_autocast_enabled(weight.device.type):
        with torch.autocast(weight.device.type, enabled=False):
            return _fold(weight, bias, groups, mean, var, gamma, beta, arguments.get("eps", 1e-5))
    return _fold(weight, bias, groups, mean, var, gamma, beta, arguments.get("eps", 1e-5))


def _fold(
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == dtype else tensor.to(dtype)

    scale = torch.rsqrt(cast(var) + eps)
    if gamma is not None:
        scale = scale * cast(gamma)
    shift = -cast(mean) if bias is None else cast(bias) - cast(mean)
    shift = shift * scale if beta is None else torch.addcmul(cast(beta), shift, scale)
    if groups == 1:
        folded = cast(weight) * scale.view(1, -1, 1, 1, 1)
    else:
        by_group = cast(weight).view(groups, -1, *weight.shape[1:])
        folded = (by_group * scale.view(groups, 1, -1, 1, 1, 1)).flatten(0, 1)
    return folded.to(weight.dtype), shift.to(weight.dtype)
