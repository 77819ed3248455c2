# SPDX-License-Identifier: Apache-2.0
"""The module that takes an ``nn.ConvTranspose3d``'s place: the same object under another class.

Changing the class keeps everything else: parameters, hooks, training flag, whoever else refers to the module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _globals
from torch.nn.utils import parametrize

from .._functional import observed
from .._memory_format import is_channels_last
from .._problem import Triple, output_extent, triple
from ..modules import FusedConvTranspose3d
from ._ambience import Ambience, is_capturing
from ._call import Call, versions_of
from ._code import SEQUENTIAL, CodePlace, first_argument, last_of
from ._hooks import Watched
from ._pending import PLAIN_TYPES, Form, PendingTensor
from ._steps import BATCH_NORM, DROPOUT

# Looked up once.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._is_tracing

WORTH_WAITING = 64 << 20
"""Bytes of a result, times the steps planned behind it (but dropout), from which on it waits for them.

To take a step in saves a GPU two passes over the result. Waiting costs the host 15 microseconds in a loop,
but 100 to 200 in a network, whose other code pushes ours out of the caches: as long as two passes over 200 to
400 MB. This favours the GPU, the usual bottleneck.
"""


class InPlaceConvTranspose3d(FusedConvTranspose3d):
    """A :class:`FusedConvTranspose3d` with the signature of ``nn.ConvTranspose3d``, made by :func:`fuse`.

    Where the plan says that batch norm, an add, an activation or a concatenation follows, in inference and of
    a large result, it returns a tensor that takes these in when they are called.
    """

    # Class attributes: an object that changes its class does not pass through __init__.
    add_order = "before"
    activation = "none"
    negative_slope = 0.01
    precision = None
    convt3d_plan: tuple[str, ...] = ()
    convt3d_ways: tuple[
        tuple[CodePlace, ...], ...
    ] = ()  # from each call of it to the end of its plan (Plan.way)
    convt3d_watched = Watched()  # the modules that the result passes
    convt3d_last: tuple[str, ...] | None = None  # what the last call has taken in

    def forward(  # type: ignore[override]
        self, input: Tensor, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """``conv_transpose3d(input) + bias``; arguments of ``nn.ConvTranspose3d``."""
        if self.convt3d_plan and not _is_compiling():
            waiting = self._wait(input, output_size) if self._may_wait(input) else None
            if waiting is not None:
                return waiting
            self.__dict__["convt3d_last"] = ()  # nn.Module's own way is longer
        return super().forward(input, None, output_size)

    def _may_wait(self, input: Tensor) -> bool:
        """Whether that gains, only planned operations see the result, and no hook, mode or transform does."""
        return not (
            # A graph would show, in more ways than can be followed, that a tensor came later than it was
            # called; and in training the convolution's own kernels are what saves time.
            _is_grad_enabled()
            or type(input) not in PLAIN_TYPES
            or _is_tracing()  # or it would record the arithmetic
            or not self._gains(input)  # early: where all is small, this is the whole answer
            or input.device.type not in ("cpu", "cuda")
            # In training batch norm needs the tensor.
            or (self.training and self.convt3d_plan[0] == BATCH_NORM)
            or self._forward_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or self.convt3d_watched
            or _globals._global_forward_hooks
            or _globals._global_forward_pre_hooks
            or _globals._global_backward_hooks
            or _globals._global_backward_pre_hooks
            or observed()
        )

    def _gains(self, input: Tensor) -> bool:
        """Whether much is saved, or the host's time does not matter as a CUDA graph is captured.

        By the strides alone: this runs in every call, and is only about speed.
        """
        depth, height, width = _three(self.stride, "stride")
        volume = input.numel() // (self.in_channels or 1) * self.out_channels * depth * height * width
        plan = self.convt3d_plan
        if volume * input.element_size() * (len(plan) - plan.count(DROPOUT)) >= WORTH_WAITING:
            return True
        return is_capturing(input.device)

    def _wait(self, input: Tensor, output_size: Sequence[int] | None) -> Tensor | None:
        """The pending result, or None where the call would be refused: then the operator says why."""
        weight, bias = self._weight_and_bias()
        if type(weight) not in PLAIN_TYPES or not (bias is None or type(bias) in PLAIN_TYPES):
            return None
        if self.padding_mode != "zeros":
            return None
        if not self._plan_ends_inside():
            return None
        ambience = Ambience.current(input.device)
        dtype = input.dtype
        if ambience.autocast_dtype is not None:
            if not dtype.is_floating_point or torch.float64 in (dtype, weight.dtype):
                return None
            dtype = ambience.autocast_dtype
        elif dtype != weight.dtype or not (dtype.is_floating_point or dtype.is_complex):
            return None
        if (
            input.dim() not in (4, 5)
            or input.device != weight.device
            or input.layout != torch.strided
            or input.numel() == 0
        ):
            return None
        # As tuples: they are a key, and a module lets anyone write its attributes.
        stride = _three(self.stride, "stride")
        padding = _three(self.padding, "padding")
        dilation = _three(self.dilation, "dilation")
        output_padding: Any = self.output_padding
        if output_size is not None:
            output_padding = self._output_padding(
                input,
                output_size,  # type: ignore[arg-type]
                stride,  # type: ignore[arg-type]
                padding,  # type: ignore[arg-type]
                self.kernel_size,  # type: ignore[arg-type]
                3,
                dilation,  # type: ignore[arg-type]
            )
        output_padding = _three(output_padding, "output_padding")
        form = _form(
            input.shape,
            input.stride(),
            weight.shape,
            weight.stride(),
            input.dtype,
            dtype,
            input.device,
            self.groups,
            (stride, padding, output_padding, dilation),
        )
        if form is None:
            return None
        call = Call(
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            self.groups,
            dilation,
            self.precision,
            ambience,
            versions_of(input, weight, bias),
            self.__dict__,
        )
        return PendingTensor.create(call, self.convt3d_plan, form)

    def _plan_ends_inside(self) -> bool:
        """Whether the forward that the plan ends in is running.

        Otherwise a part of the model was called by itself: whoever did that gets a tensor, and a CUDA graph
        that captures it gets the convolution.
        """
        for way in self.convt3d_ways:
            frame = last_of(sys._getframe(1), way)
            if frame is None:
                continue
            if way[-1] != SEQUENTIAL or self.convt3d_watched.go_on_in(first_argument(frame)):
                return True
        return False


@functools.lru_cache(maxsize=1024)
def _form(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    weight_shape: tuple[int, ...],
    weight_strides: tuple[int, ...],
    input_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    groups: int,
    geometry: tuple[Triple, Triple, Triple, Triple],
) -> Form | None:
    """The form of the result, or None where PyTorch refuses the geometry.

    Kept, since a network asks for the same in every pass. Channels and kernel are the weight's: pruning puts
    another one into a module and need not tell its attributes.

    Args:
        shape, strides: of the input, with or without a batch.
        dtype: of the result; under autocast not the input's.
        geometry: stride, padding, output_padding, dilation.
    """
    if len(weight_shape) != 5 or weight_shape[0] != shape[-4] or groups < 1 or weight_shape[0] % groups:
        return None
    kernel, out_channels = weight_shape[2:], weight_shape[1] * groups
    stride, _, output_padding, dilation = geometry
    size = tuple(output_extent(*dimension) for dimension in zip(shape[-3:], kernel, *geometry, strict=True))
    fits = all(op < s or op < d for op, s, d in zip(output_padding, stride, dilation, strict=True))
    if not fits or min(size) <= 0:
        return None
    batched = len(shape) == 5
    if not batched:
        shape, strides = (1, *shape), (shape[0] * strides[0], *strides)
    channels_last = is_channels_last(input_dtype, shape, strides, weight_shape, weight_strides)
    result = (shape[0], out_channels, *size) if batched else (out_channels, *size)
    return Form.of(result, channels_last, dtype, device)


def _three(value: Any, name: str) -> Triple:
    """``value`` as the operator reads it; at once where it is what ``nn.ConvTranspose3d`` has made of it.

    Raises:
        TypeError, RuntimeError, ValueError: those of the operator.
    """
    return value if type(value) is tuple and len(value) == 3 else triple(value, name)


def why_not(module: nn.ConvTranspose3d) -> str | None:
    """Why ``module`` keeps its class, or None."""
    cls = _without_parametrizations(module)
    if issubclass(cls, FusedConvTranspose3d):
        return "is a FusedConvTranspose3d already"
    if issubclass(cls, nn.modules.lazy.LazyModuleMixin):
        return "is lazy and has no shape yet: run the model once first"
    if cls is not nn.ConvTranspose3d:
        return f"is a subclass, {cls.__name__}, which may compute something else"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    return None


def swap(module: nn.Module, cls: type[nn.Module]) -> None:
    """Makes ``module`` an instance of ``cls``, under its parametrizations if it has any."""
    if parametrize.is_parametrized(module):
        # torch puts the parametrized properties into a class of the module's own; make it anew over `cls`.
        own = type(module)
        names = {key: value for key, value in own.__dict__.items() if key not in ("__dict__", "__weakref__")}
        cls = type(f"Parametrized{cls.__name__}", (cls,), names)
    module.__class__ = cls


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, InPlaceConvTranspose3d)


def _without_parametrizations(module: nn.Module) -> type:
    cls = type(module)
    return cls.__bases__[0] if parametrize.is_parametrized(module) else cls
