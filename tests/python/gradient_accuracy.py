# SPDX-License-Identifier: Apache-2.0
"""How gradients are judged against float64, on every path: the forward's bound, carried through.

The pre-activation is known to ``u = c * 2^-22 * (sum |x||w| + |bias| + |add|)``, see accuracy.py, and in a
16-bit type to half an ulp besides. With ``g`` the gradient of the output:

    |grad_pre - g act'(t)| <= 1/2 ulp + |g| * (change of act' within u of t + 2^-21 * max(1, |act'|))

The last term is for the fp32 function itself, ours; ATen's are given 2^-19 (its gelu_tanh' is 1.0e-6 off at
-5, measured). At a kink act' jumps, so a pre-activation nearer than ``u`` allows either side. The other
gradients are sums of grad_pre, possibly times input or weight: they may be off by the sum of their terms'
bounds, and by ``c * 2^-22`` of the sum of their terms' magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accuracy import C, exact, ulp
from cases import Case, Tensors
from convt3d._activations import ACTIVATIONS
from convt3d._precision import round_to_tf32

_FUNCTION = {"cuda": 2.0**-21, "cpu": 2.0**-19}


def _slope(case: Case, t: Tensor) -> Tensor:
    return ACTIVATIONS[case.activation].backward(torch.ones_like(t), t, case.negative_slope)


def _grad_pre(case: Case, tensors: Tensors, grad: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Float64 grad_pre, and how far it may be off before it is rounded."""
    _, t, magnitude = exact(case, tensors, tf32="tf32" in mode)
    if case.activation == "none":
        return grad.double(), torch.zeros_like(t)
    near = C[mode] * 2.0**-22 * magnitude
    if case.dtype != torch.float32:
        near = near + ulp(t, case.dtype) / 2
    slope = _slope(case, t)
    change = torch.stack([(_slope(case, t + s * near) - slope).abs() for s in (-1, -0.5, 0.5, 1)]).amax(0)
    function = _FUNCTION[grad.device.type] * slope.abs().clamp_min(1.0)
    allowed = grad.double().abs() * (1.01 * change + function)
    return grad.double() * slope, allowed


def assert_gradients(
    case: Case, tensors: Tensors, grad: Tensor, got: Sequence[Tensor | None], mode: str, conv_mode: str
) -> None:
    """Asserts the bound for every element of the gradients of input, weight, bias and add, where not None.

    Args:
        mode: of the forward pass, a key of accuracy.C.
        conv_mode: of the two convolutions of the backward pass, which ATen does.
    """
    grad_pre, off = _grad_pre(case, tensors, grad, mode)
    # 16-bit kernels round grad_pre before the convolutions read it.
    rounded_off = off + (ulp(grad_pre, case.dtype) / 2 if case.dtype != torch.float32 else 0.0)
    factor = C[conv_mode] * 2.0**-22
    x, w = tensors.input.double(), tensors.weight.double()
    if conv_mode == "tf32":
        x, w = round_to_tf32(tensors.input).double(), round_to_tf32(tensors.weight).double()

    def convolve(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = F.conv_transpose3d(x, w, None, **case.conv_arguments())
        grad_x, grad_w = torch.autograd.grad(out, (x, w), g)
        return grad_x, grad_w

    values = convolve(grad_pre, x, w)
    magnitudes = convolve(grad_pre.abs(), x.abs(), w.abs())
    offs = convolve(rounded_off, x.abs(), w.abs())
    wanted: list[tuple[str, Tensor, Tensor]] = [
        (name, value, factor * magnitude + 1.01 * from_pre)
        for name, value, magnitude, from_pre in zip(
            ("input", "weight"), values, magnitudes, offs, strict=True
        )
    ]
    sums = (0, 2, 3, 4)
    wanted.append(("bias", grad_pre.sum(sums), factor * grad_pre.abs().sum(sums) + off.sum(sums)))
    if tensors.add is not None:
        before = case.add_order == "before"
        value, allowed = (grad_pre, rounded_off) if before else (grad.double(), torch.zeros_like(grad_pre))
        shape = tensors.add.shape
        allowed = allowed.sum_to_size(shape) + factor * value.abs().sum_to_size(shape) * (shape != grad.shape)
        wanted.append(("add", value.sum_to_size(shape), allowed))
    for (name, value, allowed), mine in zip(wanted, got, strict=False):
        if mine is None:
            continue
        assert mine.shape == value.shape and mine.dtype == case.dtype, f"{case}: gradient of {name}"
        error = (mine.double() - value).abs()
        bad = ~(error <= allowed + ulp(value, case.dtype) / 2)
        assert not bad.any(), (
            f"{case}: gradient of {name}: {int(bad.sum())} of {bad.numel()} beyond the bound; largest error "
            f"{error[bad].max().item():.3e}, where {allowed[bad].max().item():.3e} is allowed"
        )
