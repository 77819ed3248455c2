# SPDX-License-Identifier: Apache-2.0
"""A transposed convolution into its place in a concatenation: ``cat([conv_transpose3d(x), skip], 1)``.

The kernels take any strides of y, so the result is allocated once, the convolution writes its channels of it,
and the skip is copied beside them, all by one call of the binding where both can be had in 16-byte accesses.
Nothing else is new: the convolution's part is the operator of _ops.py in every respect (validation,
precision, gradients, decompositions).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import _aten, _composite, _native, _ops
from ._autocast import after_autocast
from ._functional import IntOrTriple, nothing_in_between, operator, operator_arguments
from ._memory_format import as_memory_format, cat_is_channels_last, surely
from ._ops import core_op
from ._problem import Problem

_library: Any = torch.library.Library("convt3d", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"conv_transpose3d_cat_core({_ops._ARGUMENTS}, Tensor skip, bool skip_first) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
cat_core_op = torch.ops.convt3d.conv_transpose3d_cat_core.default
cat_op = _composite.define(_library, "conv_transpose3d_cat", cat_core_op)

_Args = tuple[Any, ...]


def conv_transpose3d_cat(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    skip: Tensor,
    skip_first: bool = False,
    add: Tensor | None = None,
    add_order: str = "before",
    activation: str = "none",
    negative_slope: float = 0.01,
    precision: str | None = None,
) -> Tensor:
    """``cat([conv_transpose3d(input, ...), skip], 1)`` as one operation: an upsampling U-Net step.

    The transposed convolution writes into its channels of the result, so its output is written once and not
    read again; ``skip`` is copied into the others.

    Args:
        input ... dilation, add ... precision: of :func:`convt3d.conv_transpose3d`.
        skip: (N, C2, oD, oH, oW), the convolution's output shape but for C2; without N as ``input`` is.
        skip_first: ``cat([skip, conv_transpose3d(input, ...)], 1)`` instead.

    Returns:
        (N, Cout + C2, oD, oH, oW), or without N, in the inputs' dtype. Its memory format is
        :func:`torch.cat`'s: channels_last_3d where both parts have it, contiguous otherwise.
        Under autocast it has the autocast type, whatever the types of ``skip`` and ``add``.

    Raises:
        TypeError, RuntimeError, ValueError: as PyTorch for the same mistake; the message names the argument.
    """
    tensors = (input, weight, bias, add, skip)
    plain = skip is not None and type(skip_first) is bool
    if plain and not torch.compiler.is_compiling() and nothing_in_between(tensors):
        input, weight, bias, add, skip = tensors = after_autocast(tensors)
        # None: whatever the reason, the long way below knows the right error or fallback.
        out = _native.quick(
            tensors[:4],
            (stride, padding, output_padding, dilation),
            groups,
            add_order,
            activation,
            negative_slope,
            precision,
            skip,
            skip_first,
        )
        if out is not None:
            return out
    if has_torch_function(tensors):
        return handle_torch_function(
            conv_transpose3d_cat,
            tensors,
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            skip=skip,
            skip_first=skip_first,
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
    if not isinstance(skip, Tensor):
        raise TypeError(f"convt3d: skip must be a Tensor, got {type(skip).__name__}")
    if not isinstance(skip_first, bool):
        raise TypeError(
            f"convt3d: skip_first must be a bool, got {skip_first!r} ({type(skip_first).__name__})"
        )
    return operator(cat_op, cat_core_op)(*arguments, skip, skip_first)  # type: ignore[no-any-return]


def _empty(shape: tuple[int, ...], channels_last: bool, skip: Tensor, device: Any = None) -> Tensor:
    """The uninitialised result for 5-D parts; ``shape`` and ``channels_last`` are the convolution's."""
    memory_format = as_memory_format(cat_is_channels_last(shape, channels_last, skip))
    return torch.empty(
        (shape[0], shape[1] + skip.shape[1], *shape[2:]),
        dtype=skip.dtype,
        device=device or skip.device,
        memory_format=memory_format,
    )


def parts(out: Tensor, channels: int, skip_first: bool) -> tuple[Tensor, Tensor]:
    """The views of the result (or of its gradient) that are the convolution's, and the skip's."""
    dim = out.dim() - 4
    others = out.shape[dim] - channels
    if skip_first:
        return out.narrow(dim, others, channels), out.narrow(dim, 0, others)
    return out.narrow(dim, 0, channels), out.narrow(dim, channels, others)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copies between tensors of one shape and dtype; in wide elements where both are dense in one order.

    A copy into a slice goes element by element in torch, so fp16 elements would move two bytes at a time.
    """
    if source.is_cuda and source.dim() == 5 and source.numel() > 0:
        for order in (_NCDHW, _NDHWC):
            wide = _as_rows(source, order), _as_rows(target, order)
            if wide[0] is not None and wide[1] is not None:
                wide[1].copy_(wide[0])
                return
    target.copy_(source)


# Dimensions, outermost first, and how many of them are joined from one row to the next.
_NCDHW = ((0, 1, 2, 3, 4), 1)
_NDHWC = ((0, 2, 3, 4, 1), 4)


def _as_rows(tensor: Tensor, order: tuple[tuple[int, ...], int]) -> Tensor | None:
    """A 5-D tensor as a 2-D one of 16-byte elements, or None where it is not rows of such."""
    dims, outer = order
    per_wide = 16 // tensor.element_size()
    shape = [tensor.shape[dim] for dim in dims]
    strides = [tensor.stride(dim) for dim in dims]
    row = 1
    for size, stride in zip(reversed(shape[outer:]), reversed(strides[outer:]), strict=True):
        if size != 1 and stride != row:
            return None
        row *= size
    pitch = strides[outer - 1]
    count = 1
    for size, stride in zip(reversed(shape[:outer]), reversed(strides[:outer]), strict=True):
        if size != 1 and stride != pitch * count:
            return None
        count *= size
    if row % per_wide or pitch % per_wide or tensor.data_ptr() % 16 or tensor.storage_offset() % per_wide:
        return None
    return tensor.as_strided((count, row), (pitch, 1)).view(torch.complex128)


def described(args: _Args) -> tuple[Problem, _Args, Tensor, bool]:
    """The convolution, its arguments, the skip, and whether that comes first; all checked.

    Raises:
        TypeError, RuntimeError, ValueError, NotImplementedError: what is wrong with the call.
    """
    *own, skip, skip_first = args
    problem = Problem.create(*own)
    if skip.layout != torch.strided:
        raise RuntimeError(f"convt3d: skip must be a dense (strided) tensor, got layout {skip.layout}")
    if skip.dtype != problem.dtype:
        raise RuntimeError(
            f"convt3d: input and skip must have one dtype, but input is {problem.dtype} and skip is "
            f"{skip.dtype}"
        )
    if skip.device != problem.device:
        raise RuntimeError(
            f"convt3d: input and skip must be on one device, but input is on {problem.device} and skip is on "
            f"{skip.device}"
        )
    shape = problem.output_shape
    channels = len(shape) - 4
    if skip.dim() != len(shape) or any(
        dim != channels and surely(got != wanted)
        for dim, (got, wanted) in enumerate(zip(skip.shape, shape, strict=False))
    ):
        wanted = ", ".join("any" if dim == channels else str(extent) for dim, extent in enumerate(shape))
        raise RuntimeError(
            f"convt3d: skip must have the output's shape but for the channels, ({wanted}), "
            f"got shape {tuple(skip.shape)}"
        )
    return problem, tuple(own), skip, skip_first


def empty_result(problem: Problem, skip: Tensor, device: Any = None) -> Tensor:
    """The uninitialised result: what the fake operator returns, and what the real ones must look like."""
    if problem.batched:
        return _empty(problem.output_shape_5d, problem.channels_last, skip, device)
    # Without a batch neither part looks like channels_last to torch.cat.
    shape = problem.output_shape
    return torch.empty(
        (shape[0] + skip.shape[0], *shape[1:]), dtype=problem.dtype, device=device or problem.device
    )


def _fake(*args: Any) -> Tensor:
    problem, _, skip, _ = described(args)
    return empty_result(problem, skip)


def _forward(*args: Any) -> Tensor:
    *given, skip, skip_first = args
    if skip.is_cuda:
        result = _native.quick_operator(tuple(given), skip, skip_first)
        if result is not None:
            return result
    problem, own, skip, skip_first = described(args)
    out = empty_result(problem, skip)
    up, beside = parts(out, problem.out_channels, skip_first)
    if up.numel() > 0 and not _written(problem, own, up):
        # ATen's convolutions give tensors of their own: this copy is the one that torch.cat would make.
        _copy(core_op(*own), up)
    _copy(skip, beside)
    return out


def _written(problem: Problem, own: _Args, up: Tensor) -> bool:
    """Whether the kernels have written the convolution's result to ``up``."""
    if problem.device.type != "cuda":
        return False
    if not problem.batched:
        up, own = up.unsqueeze(0), (own[0].unsqueeze(0), *own[1:])
    return _native.forward_into(up, own)


class _CatFunction(torch.autograd.Function):
    """The convolution's own gradients at its part of the result's. ``input`` is 5-D."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        problem, own, _, skip_first = described(args)
        with torch._C._AutoDispatchBelowAutograd():
            out = cat_core_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        _ops._ConvTranspose3dFunction.remember(ctx, problem, own)
        ctx.skip_first = skip_first
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (grad_output,) = grad_outputs
        up = beside = None
        if grad_output is not None:
            up, beside = parts(grad_output, ctx.problem.out_channels, ctx.skip_first)
        wants_skip = ctx.needs_input_grad[1 + len(ctx.args)]
        return (*_ops._ConvTranspose3dFunction.backward(ctx, up), beside if wants_skip else None, None)


def _autograd(keyset: Any, *args: Any) -> Tensor:
    _ops.meet_dtensor()
    skip = args[-2]
    wanted = _ops._wants_grad(*_ops._tensors(args), skip)
    if _ops._needs_decomposition() or (wanted and args[0].is_complex()):
        return _decomposed(*args)
    if wanted and args[0].dim() == 5:
        return _CatFunction.apply(keyset, *args)  # type: ignore[no-any-return, no-untyped-call]
    if wanted:
        _, own, skip, skip_first = described(args)
        up = core_op(*own)
        return torch.cat([skip, up] if skip_first else [up, skip])
    with torch._C._AutoDispatchBelowAutograd():
        return cat_core_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)  # type: ignore[no-any-return]


def _decomposed(*args: Any) -> Tensor:
    """In differentiable ATen operators only."""
    problem, own, skip, skip_first = described(args)
    up = _aten.decomposed(problem, *_ops._tensors(own))
    return torch.cat([skip, up] if skip_first else [up, skip], -4)


for _key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
    _library.impl("conv_transpose3d_cat_core", _forward, _key)
_library.impl("conv_transpose3d_cat_core", _autograd, "Autograd", with_keyset=True)
_library.impl("conv_transpose3d_cat_core", _decomposed, "FuncTorchBatched")
torch.library.register_fake("convt3d::conv_transpose3d_cat_core", _fake, lib=_library)
