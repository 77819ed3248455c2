# SPDX-License-Identifier: Apache-2.0
"""Modules that stand in for ``nn.ConvTranspose3d`` and for the reference network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._autocast import forget as forget_casts
from ._functional import conv_transpose3d
from ._precision import schema_precision
from ._problem import check_choices, number


class FusedConvTranspose3d(nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` with the add and the activation that follow it, as one operation.

    Parameters, their initialisation and the ``state_dict`` are ``nn.ConvTranspose3d``'s. Only parameters and
    plain configuration are stored, so copies and pickles are exact.

    Args:
        in_channels ... dtype: of ``nn.ConvTranspose3d``, in its order.
        add_order, activation, negative_slope, precision: of :func:`convt3d.conv_transpose3d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        add_order: str = "before",
        activation: str = "none",
        negative_slope: float = 0.01,
        precision: str | None = None,
    ) -> None:
        check_choices(activation, add_order)
        number(negative_slope, "negative_slope")
        schema_precision(precision)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
            dilation=dilation,
            padding_mode=padding_mode,  # type: ignore[arg-type]
            device=device,
            dtype=dtype,
        )
        self.add_order = add_order
        self.activation = activation
        self.negative_slope = negative_slope
        self.precision = precision

    def forward(  # type: ignore[override]
        self, input: Tensor, add: Tensor | None = None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """``act(conv_transpose3d(input) + bias + add)``.

        Args:
            input: (N, Cin, D, H, W) or (Cin, D, H, W).
            add: the output's shape, or anything that broadcasts to it.
            output_size: (oD, oH, oW), also with N and C in front; picks the output padding, as in PyTorch.

        Raises:
            ValueError: an ``output_size`` that no output padding reaches, or another ``padding_mode`` than
                "zeros".
        """
        if self.padding_mode != "zeros":  # set behind the constructor, which refuses another one
            raise ValueError(f"convt3d: padding_mode must be 'zeros', got {self.padding_mode!r}")
        output_padding: Any = self.output_padding
        if output_size is not None:
            output_padding = self._output_padding(
                input,
                output_size,  # type: ignore[arg-type]
                self.stride,  # type: ignore[arg-type]
                self.padding,  # type: ignore[arg-type]
                self.kernel_size,  # type: ignore[arg-type]
                3,
                self.dilation,  # type: ignore[arg-type]
            )
        weight, bias = self._weight_and_bias()
        return conv_transpose3d(
            input,
            weight,
            bias,
            self.stride,
            self.padding,  # type: ignore[arg-type]
            output_padding,
            self.groups,
            self.dilation,
            add=add,
            add_order=self.add_order,
            activation=self.activation,
            negative_slope=self.negative_slope,
            precision=self.precision,
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        forget_casts()  # for torch.__future__.set_swap_module_params_on_conversion
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        forget_casts()
        super()._load_from_state_dict(*args, **kwargs)

    def _weight_and_bias(self) -> tuple[Any, Any]:
        """The two, without the detour through a module's ``__getattr__`` where they are plain parameters."""
        own = self._parameters
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]
        return self.weight, self.bias  # parametrized, pruned, or of a replica

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        if self.activation != "none":
            text += f", activation={self.activation!r}"
        if self.activation == "leaky_relu":
            text += f", negative_slope={self.negative_slope}"
        if self.add_order != "before":
            text += f", add_order={self.add_order!r}"
        if self.precision is not None:
            text += f", precision={self.precision!r}"
        return text


class ModelNew(nn.Module):
    """The reference network (:class:`convt3d.Model`) as one operation.

    Same constructor, submodule name, ``state_dict`` keys, and order of draws from the random generator, so
    that the two built under one seed agree.

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
        self.conv_transpose = FusedConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            activation="x_hardswish",
        )
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: Tensor, add_input: Tensor) -> Tensor:
        """``t * hardswish(t)`` with ``t = conv_transpose(x) + add_input``, which broadcasts to the output."""
        return self.conv_transpose(x, add_input)  # type: ignore[no-any-return]
