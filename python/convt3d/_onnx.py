# SPDX-License-Identifier: Apache-2.0
"""A call in PyTorch's own operators alone, as ONNX has no other: what ``torch.onnx.export`` gets to see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._activations import ACTIVATIONS


def call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    add: Tensor | None,
    add_order: str,
    activation: str,
    negative_slope: float,
    precision: str,
    skip: Tensor | None = None,
    skip_first: bool = False,
) -> Tensor:
    """Arguments are the operators'. What runs the graph chooses the precision and rounds every step."""
    out = torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
    if add is not None and add_order == "before":
        out = out + add.to(out.dtype)  # autocast has made another type of the convolution's
    out = ACTIVATIONS[activation].forward(out, negative_slope)
    if add is not None and add_order == "after":
        out = out + add.to(out.dtype)
    if skip is None:
        return out
    parts = (out, skip.to(out.dtype))
    return torch.cat(parts[::-1] if skip_first else parts, out.dim() - 4)
