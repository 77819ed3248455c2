# SPDX-License-Identifier: Apache-2.0
"""The forms in which PyTorch runs one call: as it is, through the registered operator, compiled, exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convt3d import conv_transpose3d
from convt3d._problem import triple

FORMS = ("eager", "operator", "compiled", "dynamic", "exported")
forms = pytest.mark.parametrize("form", FORMS)
differentiable_forms = pytest.mark.parametrize("form", FORMS[:-1])


def operator(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    add: Tensor | None = None,
    add_order: str = "before",
    activation: str = "none",
    negative_slope: float = 0.01,
    precision: str | None = None,
) -> Tensor:
    """``torch.ops.convt3d.conv_transpose3d`` with the Python function's arguments."""
    return torch.ops.convt3d.conv_transpose3d(  # type: ignore[no-any-return]
        input,
        weight,
        bias,
        triple(stride, "stride"),
        triple(padding, "padding"),
        triple(output_padding, "output_padding"),
        groups,
        triple(dilation, "dilation"),
        add,
        add_order,
        activation,
        negative_slope,
        precision or "default",
    )


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def in_form(form: str, function: Callable[..., Tensor], *tensors: Tensor) -> Callable[..., Tensor]:
    """``function`` of tensors alone (the second is the weight), in ``form``; exported for these tensors."""
    if form == "eager":
        return function
    torch._dynamo.reset()
    if form == "exported":
        return torch.export.export(_Call(function), tensors, strict=False).module()
    if form == "dynamic":
        # Not dynamic=True, which makes symbols of the geometry too and compiles for minutes.
        for tensor in tensors:
            if tensor.dim() == 5 and tensor is not tensors[1]:
                torch._dynamo.maybe_mark_dynamic(tensor, [0, 2, 3, 4])
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def run(
    form: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *arguments: Any,
    add: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """:func:`convt3d.conv_transpose3d` of these arguments in ``form``."""
    if form == "operator":
        return operator(input, weight, bias, *arguments, add=add, **options)
    names = [name for name, t in (("bias", bias), ("add", add)) if t is not None]

    def call(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        named = dict(zip(names, rest, strict=True))
        return conv_transpose3d(x, w, named.get("bias"), *arguments, add=named.get("add"), **options)

    tensors = [t for t in (input, weight, bias, add) if t is not None]
    return in_form(form, call, *tensors)(*tensors)
