# SPDX-License-Identifier: Apache-2.0
"""The table of activations: name, the kernels' code, and ATen's forward and backward.

A new activation is one entry here, one functor in ``activation.hpp``, its derivative in
``activation_gradient.hpp`` and one name in ``convt3d.h``.
Backward formulas go through ATen's own ``*_backward`` operators, so derivatives at the kinks are the
installed torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation ``y = act(t)``.

    Attributes:
        name: as users write it.
        code: ``convt3d_activation`` in ``convt3d.h``.
        forward: ``(t, negative_slope) -> y``, differentiable.
        forward_: the same, in place on ``t`` where ATen can; returns the result.
        backward: ``(grad_y, t, negative_slope) -> grad_t``, differentiable.
        complex_ok: whether ATen has it for complex types.
        integer_ok: whether ATen maps an integer type to itself.
    """

    name: str
    code: int
    forward: Callable[[Tensor, float], Tensor]
    forward_: Callable[[Tensor, float], Tensor]
    backward: Callable[[Tensor, Tensor, float], Tensor]
    complex_ok: bool = False
    integer_ok: bool = False


def _identity(t: Tensor, _slope: float) -> Tensor:
    return t


def _gate(t: Tensor) -> Tensor | None:
    """6 * hardswish(t) / t where ATen's hardswish is not exact enough, else None.

    ATen's CUDA kernel multiplies by float32's 1/6 in float64 too, 5e-8 off; its CPU kernel divides. The
    derivative is ATen's: 0 from -3 down, 1 from 3 up. Neither torch.where with numbers nor copy_: a fake CUDA
    tensor of a torch without CUDA knows neither.
    """
    if t.dtype != torch.float64 or not t.is_cuda:
        return None
    return (t + 3).masked_fill(t <= -3, 0.0).masked_fill(t >= 3, 6.0)


def _hardswish(t: Tensor, _slope: float) -> Tensor:
    gate = _gate(t)
    return F.hardswish(t) if gate is None else t * gate / 6


def _hardswish_(t: Tensor, _slope: float) -> Tensor:
    gate = _gate(t)
    return aten.hardswish_(t) if gate is None else t.mul_(gate).div_(6)


def _x_hardswish(t: Tensor, slope: float) -> Tensor:
    return t * _hardswish(t, slope)


def _x_hardswish_(t: Tensor, slope: float) -> Tensor:
    return t.mul_(_hardswish(t, slope))


def _x_hardswish_backward(grad: Tensor, t: Tensor, slope: float) -> Tensor:
    # d(t * h(t)) = h(t) + t * h'(t)
    return torch.addcmul(aten.hardswish_backward(grad * t, t), grad, _hardswish(t, slope))


def _silu_backward(grad: Tensor, t: Tensor, _slope: float) -> Tensor:
    if not torch.is_grad_enabled():
        return aten.silu_backward(grad, t)  # type: ignore[no-any-return]
    sigmoid = torch.sigmoid(t)  # ATen's one-kernel form has no derivative of its own
    return grad * sigmoid * (1 + t * (1 - sigmoid))


_TABLE = (
    Activation("none", 0, _identity, _identity, lambda g, t, s: g, complex_ok=True, integer_ok=True),
    Activation(
        "relu",
        1,
        lambda t, s: torch.relu(t),
        lambda t, s: t.relu_(),
        lambda g, t, s: aten.threshold_backward(g, t, 0),
        integer_ok=True,
    ),
    Activation(
        "leaky_relu",
        2,
        lambda t, s: F.leaky_relu(t, s),
        lambda t, s: F.leaky_relu_(t, s),
        lambda g, t, s: aten.leaky_relu_backward(g, t, s, False),
    ),
    Activation(
        "elu",
        3,
        lambda t, s: F.elu(t),
        lambda t, s: F.elu_(t),
        lambda g, t, s: aten.elu_backward(g, 1.0, 1.0, 1.0, False, t),
    ),
    Activation(
        "gelu",
        4,
        lambda t, s: F.gelu(t),
        lambda t, s: aten.gelu_(t),
        lambda g, t, s: aten.gelu_backward(g, t),
    ),
    Activation(
        "gelu_tanh",
        5,
        lambda t, s: F.gelu(t, approximate="tanh"),
        lambda t, s: aten.gelu_(t, approximate="tanh"),
        lambda g, t, s: aten.gelu_backward(g, t, approximate="tanh"),
    ),
    Activation(
        "silu",
        6,
        lambda t, s: F.silu(t),
        lambda t, s: aten.silu_(t),
        _silu_backward,
        complex_ok=True,
    ),
    Activation(
        "sigmoid",
        7,
        lambda t, s: torch.sigmoid(t),
        lambda t, s: t.sigmoid_(),
        lambda g, t, s: aten.sigmoid_backward(g, torch.sigmoid(t)),
        complex_ok=True,
    ),
    Activation(
        "tanh",
        8,
        lambda t, s: torch.tanh(t),
        lambda t, s: t.tanh_(),
        lambda g, t, s: aten.tanh_backward(g, torch.tanh(t)),
        complex_ok=True,
    ),
    Activation(
        "hardswish",
        9,
        _hardswish,
        _hardswish_,
        lambda g, t, s: aten.hardswish_backward(g, t),
    ),
    Activation("x_hardswish", 10, _x_hardswish, _x_hardswish_, _x_hardswish_backward),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _TABLE}
