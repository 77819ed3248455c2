# SPDX-License-Identifier: Apache-2.0
"""Functions that reach tensors past PyTorch's Python layer, for the tests of fuse()."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Doubled(torch.autograd.Function):
    """In place, as memory-saving ones are."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


class Leaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(y > 0)
        return F.leaky_relu(y, 0.1, inplace=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (positive,) = ctx.saved_tensors
        return torch.where(positive, grads[0], 0.1 * grads[0])


def doubled_by_a_helper(y: Tensor) -> Tensor:
    y *= 2
    return y


class ByHelper(Doubled):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return doubled_by_a_helper(y)


class Scaled(torch.autograd.Function):
    """In place, with a gradient for the scale alone or for both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(y.clone(), scale)
        ctx.mark_dirty(y)
        return y.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * y).sum()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


@torch.jit.script
def scripted_scale_(y: Tensor) -> Tensor:
    y.mul_(2.0)
    return y


@torch.jit.script
def scripted_swish(y: Tensor) -> Tensor:
    return y * torch.sigmoid(y)
