# SPDX-License-Identifier: Apache-2.0
"""The functional interface, and its short way into the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from . import _native, _onnx
from ._autocast import after_autocast
from ._composite import forward_op
from ._ops import core_op, meet_dtensor
from ._precision import schema_precision
from ._problem import INT64_MAX, check_choices, number, single_int, triple

IntOrTriple = int | Sequence[int]

_PLAIN_OR_NONE = (torch.Tensor, torch.nn.Parameter, type(None))

# Looked up once: each name on the way costs as much as the call.
_is_compiling = torch.compiler.is_compiling
# A quarter of its time. Where the other says yes, too, as while a graph is exported, a mode is on.
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled  # without an argument CUDA's, in half the time
_is_in_onnx_export = torch.onnx.is_in_onnx_export
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_pre_dispatch_mode: Any = torch._ops.mode_stack_state_for_pre_dispatch().get  # type: ignore[no-untyped-call]
_TRACE = 0  # what make_fx and torch.export record by, among the modes in front of the dispatcher


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    add: Tensor | None = None,
    add_order: str = "before",
    activation: str = "none",
    negative_slope: float = 0.01,
    precision: str | None = None,
) -> Tensor:
    """``act(conv_transpose3d(input, weight) + bias + add)`` as one operation.

    The first eight arguments are those of :func:`torch.nn.functional.conv_transpose3d`, in its order.

    Args:
        input: (N, Cin, D, H, W), or (Cin, D, H, W) without a batch.
        weight: (Cin, Cout / groups, kD, kH, kW).
        bias: (Cout,).
        stride, padding, output_padding, dilation: an int, or three for (depth, height, width).
        groups: divides Cin.
        add: the output's shape, or anything that broadcasts to it.
        add_order: "before" adds before the activation, "after" behind it.
        activation: none, relu, leaky_relu, elu (alpha 1), gelu (erf), gelu_tanh, silu, sigmoid, tanh,
            hardswish, or x_hardswish (``t * hardswish(t)``).
        negative_slope: of leaky_relu.
        precision: of fp32 multiplications. "ieee" is fp32 accuracy; "tf32" rounds both operands to TF32; None
            follows ``torch.backends.cudnn.conv.fp32_precision`` at the moment the operator runs.

    Returns:
        (N, Cout, oD, oH, oW), or without N, in the inputs' dtype, with
        ``o = (i - 1) * stride - 2 * padding + dilation * (k - 1) + output_padding + 1``. Its memory format is
        channels_last_3d where input or weight suggests it and the type is not double, contiguous otherwise.
        Under autocast it has the autocast type, whatever the type of ``add``.

    All tensors have one dtype (float32, float16, bfloat16, float64; complex and int64 as far as PyTorch goes)
    and one device. 16-bit types are computed in fp32, sums and epilogue, and rounded once.

    Raises:
        TypeError, RuntimeError, ValueError: as PyTorch for the same mistake; the message names the argument.
    """
    tensors = (input, weight, bias, add)
    if not _is_traced_by_dynamo() and nothing_in_between(tensors):
        if _is_autocast_enabled():
            input, weight, bias, add = tensors = after_autocast(tensors)
        # None: whatever the reason, the long way below knows the right error or fallback.
        out = _native.quick(
            tensors,
            (stride, padding, output_padding, dilation),
            groups,
            add_order,
            activation,
            negative_slope,
            precision,
        )
        if out is not None:
            return out
    if has_torch_function(tensors):
        return handle_torch_function(
            conv_transpose3d,
            tensors,
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            add=add,
            add_order=add_order,
            activation=activation,
            negative_slope=negative_slope,
            precision=precision,
        )
    arguments = operator_arguments(
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        add,
        add_order,
        activation,
        negative_slope,
        precision,
    )
    return operator(forward_op, core_op)(*arguments)  # type: ignore[no-any-return]


def operator(composite: Any, core: Any) -> Any:
    """The operator of the two to call: the core saves a Python kernel wherever both mean the same."""
    if _is_compiling() or observed() or _is_any_autocast_enabled():
        return _onnx.call if _is_in_onnx_export() else composite
    meet_dtensor()  # in inference mode nothing of autograd, which does it too, comes between
    return core


def operator_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrTriple,
    padding: IntOrTriple,
    output_padding: IntOrTriple,
    groups: int,
    dilation: IntOrTriple,
    add: Tensor | None,
    add_order: str,
    activation: str,
    negative_slope: float,
    precision: str | None,
) -> tuple[Any, ...]:
    """What :func:`conv_transpose3d` is called with as the operator's arguments, in its schema's order.

    Raises:
        TypeError, RuntimeError, ValueError: an argument of a kind that the schema does not have.
    """
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias), ("add", add)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("input", "weight")):
            raise TypeError(f"convt3d: {name} must be a Tensor, got {type(tensor).__name__}")
    strides = triple(stride, "stride")
    paddings = triple(padding, "padding")
    output_paddings = triple(output_padding, "output_padding")
    dilations = triple(dilation, "dilation")
    if type(groups) is not int or not -INT64_MAX <= groups <= INT64_MAX:
        groups = single_int(groups, "groups")
    # Not left to the operator: while a graph is traced, torch wraps what operators raise in its own class.
    check_choices(activation, add_order)
    if type(negative_slope) is not float:
        negative_slope = number(negative_slope, "negative_slope")
    return (
        input,
        weight,
        bias,
        strides,
        paddings,
        output_paddings,
        groups,
        dilations,
        add,
        add_order,
        activation,
        negative_slope,
        schema_precision(precision),
    )


def nothing_in_between(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no feature of the dispatcher (autograd, subclass, mode, transform) but autocast has a say."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN_OR_NONE:
            return False
    if _is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    return not (
        _function_modes()
        # observed(), without the way there
        or _dispatch_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _is_tracing()
        or _pre_dispatch_mode(_TRACE) is not None
    )


def observed() -> bool:
    """Whether a dispatch mode, a transform, forward-mode AD or a trace sees every operator."""
    return (
        _dispatch_modes() > 0
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _is_tracing()
        or _pre_dispatch_mode(_TRACE) is not None
    )
