# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.convt3d.conv_transpose3d_packed``: the operators as a compiled graph calls them.

A registered operator pays for each Python kernel on its way and for each argument: with autograd's kernel,
its own and 13 arguments more than for the launch. Behind autograd, in the graph that Inductor gets
(_inductor_lowering.py), neither autograd nor autocast has a say any more, and all settings are known. So this
operator has one kernel, and its settings are one list of integers, in the binding's order.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from . import _cat, _native, _ops
from ._activations import ACTIVATIONS
from ._precision import PRECISION_CODES
from ._problem import ADD_ORDERS

_library: Any = torch.library.Library("convt3d", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "conv_transpose3d_packed(Tensor input, Tensor weight, Tensor? bias, Tensor? add, Tensor? skip, "
    "bool skip_first, int[] settings) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
packed_op = torch.ops.convt3d.conv_transpose3d_packed.default

_ACTIVATION_NAMES = {activation.code: name for name, activation in ACTIVATIONS.items()}
_PRECISION_NAMES = {
    **{code: name for name, code in PRECISION_CODES.items()},
    _native.DEFAULT_PRECISION: "default",
}

_Args = tuple[Any, ...]


def pack(args: _Args) -> _Args | None:
    """The packed operator's arguments for those of ``conv_transpose3d`` or ``conv_transpose3d_cat``.

    Args:
        args: all of them, by position; what stands for tensors is passed on.

    Returns:
        None where a setting is not a number yet (a size of a graph with dynamic shapes, say).
    """
    input, weight, bias, stride, padding, output_padding, groups, dilation, add, *rest = args
    add_order, activation, slope, precision, *cat = rest
    numbers = [*stride, *padding, *output_padding, *dilation, groups]
    if len(numbers) != 13 or any(type(n) is not int for n in numbers) or type(slope) not in (int, float):
        return None
    code = PRECISION_CODES.get(precision, _native.DEFAULT_PRECISION)
    numbers += _native.tail_settings(activation, add_order, code, slope)
    skip, skip_first = cat or (None, False)
    return input, weight, bias, add, skip, skip_first, numbers


def unpack(
    input: Any, weight: Any, bias: Any, add: Any, skip: Any, skip_first: bool, settings: list[int]
) -> _Args:
    """Undoes :func:`pack`: the arguments of ``conv_transpose3d``, with a skip of ``conv_transpose3d_cat``."""
    triples = [tuple(settings[at : at + 3]) for at in (0, 3, 6, 9)]
    stride, padding, output_padding, dilation = triples
    groups, activation, add_order, precision, bits = settings[12:]
    (slope,) = struct.unpack("d", struct.pack("q", bits))
    own = (
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        add,
        ADD_ORDERS[add_order],
        _ACTIVATION_NAMES[activation],
        slope,
        _PRECISION_NAMES[precision],
    )
    return own if skip is None else (*own, skip, skip_first)


def _fake(*args: Any) -> Tensor:
    unpacked = unpack(*args)
    return _ops._fake(*unpacked) if args[4] is None else _cat._fake(*unpacked)


def _forward(*args: Any) -> Tensor:
    if args[0].is_cuda:
        out = _native.quick_packed(*args)
        if out is not None:
            return out
    unpacked = unpack(*args)
    operator = _ops.core_op if args[4] is None else _cat.cat_core_op
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*unpacked)  # type: ignore[no-any-return]


for _key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
    _library.impl("conv_transpose3d_packed", _forward, _key)
torch.library.register_fake("convt3d::conv_transpose3d_packed", _fake, lib=_library)
