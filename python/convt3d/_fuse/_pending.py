# SPDX-License-Identifier: Apache-2.0
"""A transposed convolution that has been called but not run, waiting for the operation that follows.

``PendingTensor`` is what a fused module returns where the plan says that a batch norm, an add or an
activation follows. Those are taken into the call; any other use computes the tensor first. So the network's
own code decides what is fused, in every call anew, and values never depend on the plan.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_map

from ._ambience import Ambience, saved_plainly
from ._batch_norm import fold
from ._call import Call, versions_of
from ._steps import (
    ADD,
    BATCH_NORM,
    CAT,
    DROPOUT,
    METADATA,
    MUL,
    X_HARDSWISH,
    Step,
    cat_dim,
    classify,
    is_eval_dropout,
)

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_detach = torch.Tensor.detach
_WATCHING = (torch.Tensor.register_hook, torch.Tensor.retain_grad)
_checkpoint = torch.utils.checkpoint.__name__


class Form(NamedTuple):
    """Shape, strides, type and device of a result to come."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls, shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, device: torch.device
    ) -> Form:
        """Of a new tensor of ``shape``, (N, C, D, H, W) or (C, D, H, W)."""
        channels, depth, height, width = shape[-4:]
        if channels_last:
            strides: tuple[int, ...] = (1, height * width * channels, width * channels, channels)
        else:
            strides = (depth * height * width, height * width, width, 1)
        if len(shape) == 5:
            strides = (channels * depth * height * width, *strides)
        return cls(shape, strides, dtype, device)


class _Attach(torch.autograd.Function):
    """Gives a pending tensor its place in the graph, for code that reaches autograd past the Python layer."""

    @staticmethod
    def forward(ctx: Any, call: Call, form: Form, *tensors: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.superseded = False  # by a step in place, after which this place in the graph is not the tensor's
        return _Attach.plain(call, form)  # made here: an input handed back would be a view of itself

    @staticmethod
    def plain(call: Call, form: Form, *tensors: Tensor | None) -> PendingTensor:
        """The bare tensor, with no place in a graph."""
        made: PendingTensor = torch.Tensor._make_wrapper_subclass(
            PendingTensor, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
        )
        return made

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if ctx.superseded:
            raise RuntimeError(
                "convt3d: the result of a fused transposed convolution was changed in place, or got a hook, "
                "and was then given to an autograd.Function, a scripted function or an extension that the "
                "plan has not seen. Call convt3d.fuse() again, or convt3d.unfuse()"
            )
        return (None, None, *ctx.call.gradients(grad_outputs[0], ctx.needs_input_grad[2:]))


class PendingTensor(torch.Tensor):
    """The result of a :class:`Call` that has not run: shape, type and device are known, values on demand."""

    _call: Call
    _form: Form  # asking the tensor itself takes a detour through __torch_function__
    _remaining: tuple[str, ...]  # planned steps
    _value: Tensor | None = None  # once computed
    _data: Tensor | None = None  # the same behind autograd, once code past the Python layer has asked for it
    _seen = False  # whether the value may be part of a graph by now
    _origin: Any = None  # this tensor's place in the graph, as it was made
    _adopted: tuple[Any, Tensor] | None = None  # a later place, and the value that follows it
    _successor: PendingTensor | None = None  # what an in-place step has made of it
    _gate_of: PendingTensor | None = None  # for the hardswish(t) of t * hardswish(t): t

    @staticmethod
    def create(call: Call, remaining: tuple[str, ...], form: Form) -> PendingTensor:
        make: Any = _Attach.apply if call.wants_grad else _Attach.plain
        pending: PendingTensor = make(call, form, *call.tensors)
        pending._call = call
        pending._form = form
        pending._remaining = remaining
        if make is not _Attach.plain:
            pending._origin = pending._place()
        return pending

    def resolve(self) -> Tensor:
        """The tensor itself; computed once."""
        pending = self.latest()
        if pending._is_adopted():
            place = pending._place()
            if pending._adopted is None or pending._adopted[0] is not place:
                pending._adopted = place, pending._through_autograd()
            return pending._adopted[1]
        if pending._value is None:
            if pending._data is None:
                pending._value = pending._call.run()
            else:  # others may change it, or have it in a graph
                pending._value = pending._through_autograd() if pending._call.wants_grad else pending._data
        pending._seen = pending._seen or torch.is_grad_enabled()
        return pending._value

    def _is_adopted(self) -> bool:
        """Whether code past the Python layer has given this tensor another place in the graph.

        An autograd.Function, such as a checkpoint, that returns it as its own; what changes it in place.
        """
        if _is_compiling():  # Dynamo looks at this code, and cannot at places in a graph
            return False
        return torch.is_grad_enabled() and self._place() is not self._origin

    def _leave_origin(self) -> None:
        if self._origin is not None:
            self._origin.superseded = True

    def _place(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def _through_autograd(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.clone(self)  # so that gradients come by its place in the graph

    def _behind_autograd(self) -> Tensor:
        """The values alone: always the same memory, as what is changed in place must stay changed."""
        if self._value is not None:
            return self._value
        if self._data is None:
            self._data = self._call.run()
        return self._data

    def latest(self) -> PendingTensor:
        pending = self
        while pending._successor is not None:
            pending = pending._successor
        return pending

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        step = classify(func, args, kwargs)
        if step is not None:
            taken = _take(step)
            if taken is not None:
                return taken
        # A checkpoint that recomputes takes what was saved in it, and that may be a pending tensor, with
        # detach(). In forward it did not look into that: what the convolution saves does not count here.
        if func is _detach and sys._getframe(1).f_globals.get("__name__") == _checkpoint:
            with saved_plainly():
                args[0].resolve()
        first = args[0] if args else None
        if func in _WATCHING and isinstance(first, PendingTensor):
            first.latest()._leave_origin()  # gradients that arrive there would pass the value by
        args, kwargs = tree_map(_resolved, (tuple(args), dict(kwargs)))
        out = func(*args, **kwargs)
        if isinstance(first, PendingTensor) and out is args[0] and _is_of_a_function(sys._getframe(1)):
            # mark_dirty() wants it back. Not if a view has the value already, whose gradients would pass this
            # function by: then PyTorch refuses what it gets.
            return out if first._call.wants_grad and first.latest()._seen else first
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Reached only by code that skips the Python layer (an autograd.Function, a C++ extension). Autograd
        # is behind us here: what is computed now has no graph and must not be kept as the value.
        given: dict[int, PendingTensor] = {}

        def plain(item: Any) -> Any:
            if not isinstance(item, PendingTensor):
                return item
            pending = item.latest()
            data = pending._behind_autograd()
            given[id(data)] = item
            return data

        args, kwargs = tree_map(plain, (tuple(args), dict(kwargs or {})))
        out = func(*args, **kwargs)
        return given.get(id(out), out)  # in place: the tensor that was given


def owner_of_forward(frame: types.FrameType) -> Any:
    """Of a forward's frame, the first argument: a module, or an autograd.Function's context. Else None."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return None
    return frame.f_locals.get(code.co_varnames[0])


def _is_of_a_function(frame: types.FrameType) -> bool:
    """Whether the frame is the forward of an autograd.Function."""
    if torch.is_grad_enabled():
        return False
    owner = owner_of_forward(frame)
    return owner is not None and not isinstance(owner, torch.nn.Module)


def _resolved(item: Any) -> Any:
    return item.resolve() if isinstance(item, PendingTensor) else item


# --- taking a step in --------------------------------------------------------------------------------------


def _take(step: Step) -> Tensor | None:
    """The result of a call with a pending operand, if the plan has it next and it can be taken; else None."""
    if step.name == MUL:
        return _take_mul(step)
    if step.name == CAT:
        return _take_cat(step)
    if step.name == ADD:
        first, second = step.operands
        taken = _take_add(first, second, step)
        # An in-place add changes its first operand, which other names may refer to: nothing replaces that.
        return taken if taken is not None or step.inplace else _take_add(second, first, step)
    pending = _open(step.operands[0])
    if pending is None:
        return None
    call, planned = pending._call, pending._remaining[0]
    if step.name == planned == DROPOUT:
        return _advance(pending, call, inplace=True) if is_eval_dropout(step) else None
    if step.name == planned == BATCH_NORM:
        assert step.arguments is not None
        if call.input.dim() != 5:  # without a batch, torch's batch norm is one over the depth
            return None
        folded = fold(call.weight, call.bias, call.groups, step.arguments, pending._form.dtype)
        if folded is None:
            return None
        return _advance(pending, call.but(weight=folded[0], bias=folded[1]), step.inplace)
    if step.name == "hardswish" and planned == X_HARDSWISH and not step.inplace:
        gate = PendingTensor.create(call.but(activation="hardswish"), (), pending._form)
        gate._gate_of = pending
        return gate
    if step.is_activation and step.name == planned:
        call = call.but(activation=step.name, negative_slope=step.negative_slope)
        return _advance(pending, call, step.inplace)
    return None


def _take_mul(step: Step) -> Tensor | None:
    first, second = step.operands
    for t, gate in ((first, second), (second, first)):
        if isinstance(gate, PendingTensor) and gate._gate_of is not None and gate._value is None:
            pending = _open(t)
            if pending is gate._gate_of and (not step.inplace or t is first):
                assert pending is not None
                return _advance(pending, pending._call.but(activation=X_HARDSWISH), step.inplace)
    return None


def _take_add(base: Any, other: Any, step: Step) -> Tensor | None:
    pending = _open(base)
    if pending is None or pending._remaining[0] != ADD or pending._call.add is not None:
        return None
    if isinstance(other, PendingTensor):
        other = other.resolve()
    # Another type would promote (under autocast: an fp16 result plus an fp32 skip is fp32), another shape
    # could enlarge the result.
    if (
        type(other) not in PLAIN_TYPES
        or other.dtype != pending._form.dtype
        or other.device != pending._form.device
        or not _broadcasts_to(other.shape, pending._form.shape)
    ):
        return None
    call = pending._call
    order = "before" if call.activation == "none" else "after"
    call = call.but(add=other, add_order=order, versions=call.versions + versions_of(other))
    return _advance(pending, call, step.inplace)


def _take_cat(step: Step) -> Tensor | None:
    for skip_first in (False, True):
        second, first = step.operands if skip_first else step.operands[::-1]
        pending = _open(first)
        if pending is None or pending._remaining[0] != CAT or first is second:
            continue
        shape = pending._form.shape
        channels = len(shape) - 4
        skip = _resolved(second)
        sizes = tuple(skip.shape) if isinstance(skip, Tensor) else ()  # slices of a torch.Size are slow
        if (
            cat_dim(step) in (channels, -4)
            and type(skip) in PLAIN_TYPES
            and skip.layout == torch.strided
            and skip.dtype == pending._form.dtype  # another one would promote
            and skip.device == pending._form.device
            and len(sizes) == len(shape)
            and sizes[:channels] == shape[:channels]
            and sizes[channels + 1 :] == shape[channels + 1 :]
        ):
            call = pending._call
            return call.but(cat=(skip, skip_first), versions=call.versions + versions_of(skip)).run_here()
    return None


def _broadcasts_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    if shape == wanted:
        return True
    offset = len(wanted) - len(shape)
    return offset >= 0 and all(n in (1, wanted[offset + dim]) for dim, n in enumerate(shape))


def _open(operand: Any) -> PendingTensor | None:
    """The pending tensor that ``operand`` is, if it can still take something in."""
    if not isinstance(operand, PendingTensor):
        return None
    pending = operand.latest()
    looked_into = pending._value is not None or pending._data is not None
    if looked_into or not pending._remaining or pending._is_adopted():
        return None
    ambience = pending._call.ambience
    return pending if ambience == Ambience.current(ambience.device) else None


def _advance(pending: PendingTensor, call: Call, inplace: bool) -> Tensor:
    remaining = pending._remaining[1:]
    if not remaining:
        # The chain ends here: from here on there are ordinary tensors only.
        value = call.run_here()
        if inplace:
            pending._value = value
            pending._leave_origin()
        return value
    following = PendingTensor.create(call, remaining, pending._form)
    if inplace:
        pending._successor = following
        pending._leave_origin()
    return following
