# SPDX-License-Identifier: Apache-2.0
"""The reference network, in plain PyTorch: KernelBench level 2, problem 26."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardswish


class Model(nn.Module):
    """A 3D transposed convolution, an added tensor, and ``t * hardswish(t)``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding: of ``nn.ConvTranspose3d``.
        bias_shape: of the parameter ``bias``, which the forward pass does not use.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        output_padding: Any,
        bias_shape: Sequence[int],
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
        )
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: Tensor, add_input: Tensor) -> Tensor:
        """``add_input`` has the convolution's output shape."""
        t = self.conv_transpose(x) + add_input
        return t * hardswish(t)  # type: ignore[no-any-return]


# The workload's sizes.
BATCH = 128
IN_CHANNELS = 32
OUT_CHANNELS = 64
SIZE = (16, 16, 16)
KERNEL_SIZE = 3
STRIDE = 2
PADDING = 1
OUTPUT_PADDING = 1
BIAS_SHAPE = (OUT_CHANNELS, 1, 1, 1, 1)


def get_inputs(batch: int = BATCH, uniform: bool = True) -> list[Tensor]:
    """Fresh CPU inputs ``[x, add_input]`` from the default generator, float32.

    Args:
        batch: 128 in the workload.
        uniform: uniform in [0, 1) as the workload has it, or normal.
    """
    draw = torch.rand if uniform else torch.randn
    depth, height, width = SIZE
    return [
        draw(batch, IN_CHANNELS, depth, height, width),
        draw(batch, OUT_CHANNELS, depth * STRIDE, height * STRIDE, width * STRIDE),
    ]


def get_init_inputs() -> list[Any]:
    """Constructor arguments of the workload."""
    return [IN_CHANNELS, OUT_CHANNELS, KERNEL_SIZE, STRIDE, PADDING, OUTPUT_PADDING, BIAS_SHAPE]
