# SPDX-License-Identifier: Apache-2.0
"""Calls of conv_transpose3d_cat from the cases of conv_transpose3d."""

from __future__ import annotations

import torch
from torch import Tensor

from cases import Case, Tensors
from convt3d import conv_transpose3d_cat


def make_skip(case: Case, channels: int = 3, channels_last: bool = False, device: str = "cpu") -> Tensor:
    n, _, *size = case.output_shape()
    values = torch.randn(n, channels, *size, generator=torch.Generator().manual_seed(5)).to(case.dtype)
    values = values.to(device)
    return values.contiguous(memory_format=torch.channels_last_3d) if channels_last else values


def call(case: Case, t: Tensors, skip: Tensor, skip_first: bool = False) -> Tensor:
    return conv_transpose3d_cat(
        t.input, t.weight, t.bias, add=t.add, skip=skip, skip_first=skip_first, **case.arguments()
    )
