# SPDX-License-Identifier: Apache-2.0
"""KernelBench level 2, problem 26, through the installed convt3d package.

A file as the harness takes it: it is executed, and ``ModelNew`` taken from it.
"""

import torch
import torch.nn as nn

import convt3d


class ModelNew(nn.Module):
    """A transposed convolution, an added tensor, and t * hardswish(t), fused."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, bias_shape):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
        )
        # Drawn as the reference model draws it, which does not use it either.
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x, add_input):
        conv = self.conv_transpose
        return convt3d.conv_transpose3d(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.output_padding,
            add=add_input,
            activation="x_hardswish",
        )
