# SPDX-License-Identifier: Apache-2.0
"""A transposed convolution that has been called but not run, waiting for the operation that follows.

``PendingTensor`` is what a fused module returns where the plan says that a batch norm, an add or an
activation follows. Those are taken into the call; any other use computes the tensor first. So the network's
own code decides what is fused, in every call anew, and values never depend on the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from ._ambience import Ambience
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
_C: Any = torch._C


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


@dataclass(slots=True)
class Waiting:
    """What a pending tensor stands for; a step in place changes it."""

    call: Call
    form: Form  # asking the tensor itself takes a detour through __torch_function__
    remaining: tuple[str, ...]  # planned steps
    value: Tensor | None = None  # once computed
    gate_of: Call | None = None  # for the hardswish(t) of t * hardswish(t): t's call


class PendingTensor(torch.Tensor):
    """The result of a :class:`Call` that has not run: shape, type and device are known, values on demand.

    It belongs to no graph: nothing waits where gradients are recorded. Once computed it turns into the plain
    tensor that it stood for, the object itself, so that whoever has it has one tensor and not two. Only while
    something in C++ holds it, such as the arguments of an ``autograd.Function`` that is running, it has to
    stay what it is, and shares its values' memory.
    """

    _waiting: Waiting

    @staticmethod
    def create(call: Call, remaining: tuple[str, ...], form: Form) -> PendingTensor:
        pending: PendingTensor = torch.Tensor._make_wrapper_subclass(
            PendingTensor, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
        )
        pending._waiting = Waiting(call, form, remaining)
        return pending

    def resolve(self) -> Tensor:
        """The tensor itself; computed once. This object where it may turn into that."""
        waiting = self._waiting
        if waiting.value is None:
            waiting.value = waiting.call.run()
        return self if self._turn_into(waiting.value) else waiting.value

    def _turn_into(self, value: Tensor) -> bool:
        """Whether this object is a plain tensor from now on: ``value``, or what autograd has made of it."""
        if _is_compiling():  # Dynamo looks at this code
            return False
        with _C.DisableTorchFunctionSubclass():
            if not (_is_held_once(self) and _is_held_once(value)):
                return False
            if self.requires_grad:  # code past the Python layer has given it a place in a graph
                value = _Through.apply(self, value)  # type: ignore[no-untyped-call]
            _C._swap_tensor_impl(self, value)  # of torch.utils.swap_tensors, without its detours
        self.__class__ = torch.Tensor  # type: ignore[assignment]
        del self._waiting
        return True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        step = classify(func, args, kwargs)
        if step is not None:
            taken = _take(step)
            if taken is not None:
                return taken
        held: dict[int, tuple[PendingTensor, Tensor, int]] = {}

        def plain(item: Any) -> Any:
            if not isinstance(item, PendingTensor):
                return item
            value = item.resolve()
            if value is not item:
                held[id(value)] = item, value, _version(value)
            return value

        plain_args, plain_kwargs = tree_map(plain, (tuple(args), dict(kwargs)))
        if held and torch.is_grad_enabled():
            # Autograd has to see the tensor that C++ holds.
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        out = func(*plain_args, **plain_kwargs)
        for pending, value, version in held.values():
            if _version(value) != version:
                increment_version(pending)
        return held[id(out)][0] if id(out) in held else out  # in place: the tensor that was given

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Reached only by code that skips the Python layer (an autograd.Function, a scripted function, a C++
        # extension), behind autograd.
        given: dict[int, PendingTensor] = {}

        def plain(item: Any) -> Any:
            if not isinstance(item, PendingTensor):
                return item
            waiting = item._waiting
            if waiting.value is None:
                waiting.value = waiting.call.run()
            given[id(waiting.value)] = item
            return waiting.value

        args, kwargs = tree_map(plain, (tuple(args), dict(kwargs or {})))
        out = func(*args, **kwargs)
        for value in _written(func, args, kwargs):
            if id(value) in given and not value.is_inference():
                increment_version(value)  # behind autograd nobody counts
        return given.get(id(out), out)  # in place: the tensor that was given


class _Through(torch.autograd.Function):
    """A plain tensor in the place of a pending one: its values' memory, its gradients."""

    @staticmethod
    def forward(ctx: Any, pending: Tensor, value: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, None]:
        return grad_outputs[0], None


def _is_held_once(tensor: Any) -> bool:
    """Whether nothing but its Python object holds the tensor; that object may have many names."""
    return bool(tensor._use_count() == 1)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of the operator ``func`` changes in place."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return found


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
    waiting = pending._waiting
    call, planned = waiting.call, waiting.remaining[0]
    if step.name == planned == DROPOUT:
        return _advance(pending, call, inplace=True) if is_eval_dropout(step) else None
    if step.name == planned == BATCH_NORM:
        assert step.arguments is not None
        if call.input.dim() != 5:  # without a batch, torch's batch norm is one over the depth
            return None
        folded = fold(call.weight, call.bias, call.groups, step.arguments, waiting.form.dtype)
        if folded is None:
            return None
        return _advance(pending, call.but(weight=folded[0], bias=folded[1]), step.inplace)
    if step.name == "hardswish" and planned == X_HARDSWISH and not step.inplace:
        gate = PendingTensor.create(call.but(activation="hardswish"), (), waiting.form)
        gate._waiting.gate_of = call
        return gate
    if step.is_activation and step.name == planned:
        call = call.but(activation=step.name, negative_slope=step.negative_slope)
        return _advance(pending, call, step.inplace)
    return None


def _take_mul(step: Step) -> Tensor | None:
    first, second = step.operands
    for t, gate in ((first, second), (second, first)):
        if not isinstance(gate, PendingTensor) or gate._waiting.gate_of is None:
            continue
        pending = _open(t)
        if (
            pending is not None
            and gate._waiting.value is None
            and pending._waiting.call is gate._waiting.gate_of
            and (not step.inplace or t is first)
        ):
            return _advance(pending, pending._waiting.call.but(activation=X_HARDSWISH), step.inplace)
    return None


def _take_add(base: Any, other: Any, step: Step) -> Tensor | None:
    pending = _open(base)
    if pending is None:
        return None
    waiting = pending._waiting
    if waiting.remaining[0] != ADD or waiting.call.add is not None:
        return None
    if isinstance(other, PendingTensor):
        other = other.resolve()
    # Another type would promote (under autocast: an fp16 result plus an fp32 skip is fp32), another shape
    # could enlarge the result.
    if (
        type(other) not in PLAIN_TYPES
        or other.dtype != waiting.form.dtype
        or other.device != waiting.form.device
        or not _broadcasts_to(other.shape, waiting.form.shape)
    ):
        return None
    call = waiting.call
    order = "before" if call.activation == "none" else "after"
    call = call.but(add=other, add_order=order, versions=call.versions + versions_of(other))
    return _advance(pending, call, step.inplace)


def _take_cat(step: Step) -> Tensor | None:
    for skip_first in (False, True):
        second, first = step.operands if skip_first else step.operands[::-1]
        pending = _open(first)
        if pending is None or pending._waiting.remaining[0] != CAT or first is second:
            continue
        form = pending._waiting.form
        shape = form.shape
        channels = len(shape) - 4
        skip = _resolved(second)
        sizes = tuple(skip.shape) if isinstance(skip, Tensor) else ()  # slices of a torch.Size are slow
        if (
            cat_dim(step) in (channels, -4)
            and type(skip) in PLAIN_TYPES
            and skip.layout == torch.strided
            and skip.dtype == form.dtype  # another one would promote
            and skip.device == form.device
            and len(sizes) == len(shape)
            and sizes[:channels] == shape[:channels]
            and sizes[channels + 1 :] == shape[channels + 1 :]
        ):
            call = pending._waiting.call
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
    waiting = operand._waiting
    if waiting.value is not None or not waiting.remaining:
        return None
    ambience = waiting.call.ambience
    return operand if ambience == Ambience.current(ambience.device) else None


def _advance(pending: PendingTensor, call: Call, inplace: bool) -> Tensor:
    waiting = pending._waiting
    remaining = waiting.remaining[1:]
    if not remaining:
        # The chain ends here: from here on there are ordinary tensors only.
        value = call.run_here()
        if not inplace:
            return value
        waiting.value = value
        return pending.resolve()
    if not inplace:
        return PendingTensor.create(call, remaining, waiting.form)
    waiting.call, waiting.remaining = call, remaining
    return pending
