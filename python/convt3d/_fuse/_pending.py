# SPDX-License-Identifier: Apache-2.0
"""A transposed convolution that has been called but not run, waiting for the operation that follows.

``PendingTensor`` is what a fused module returns where the plan says that a batch norm, an add, an activation
or a concatenation follows. Those are taken into the call; any other use computes the tensor first. So the
network's own code decides what is fused, in every call anew, and values never depend on the plan.
"""

from __future__ import annotations

import threading
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
    MEMORY,
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
_TURNING = threading.RLock()  # a finalizer that runs while it is held may use another pending tensor
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CHANGED_FORM = (
    "convt3d: {} changes the shape or the memory of a waiting result of a fused transposed convolution, "
    "which the plan did not foresee. Call convt3d.fuse() again, or convt3d.unfuse()"
)
_RESHAPING = frozenset({torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_})


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
    """What a pending tensor stands for. A step in place changes ``call`` and ``remaining``."""

    call: Call | None  # None once there is a value, which needs no inputs any more
    form: Form  # asking the tensor itself takes a detour through __torch_function__
    remaining: tuple[str, ...]  # planned steps
    value: Tensor | None = None  # once computed
    gate_of: Call | None = None  # for the hardswish(t) of t * hardswish(t): t's call


class PendingTensor(torch.Tensor):
    """The result of a :class:`Call` that has not run: shape, type and device are known, values on demand.

    It belongs to no graph: nothing waits where gradients are recorded. Once computed it turns into the plain
    tensor that it stood for, the object itself, so that whoever has it has one tensor and not two. Where
    something in C++ holds it, such as the arguments of an ``autograd.Function`` that is running, it has to
    stay a wrapper, for good: autograd treats it as any other tensor, and its values are found below that, in
    ``__torch_dispatch__``.
    """

    _waiting: Waiting

    @staticmethod
    def create(call: Call, remaining: tuple[str, ...], form: Form) -> PendingTensor:
        pending: PendingTensor = torch.Tensor._make_wrapper_subclass(
            PendingTensor, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
        )
        pending._waiting = Waiting(call, form, remaining)
        return pending

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Dynamo would trace what it takes to see whether a step can be taken.
        step = None if _is_compiling() else classify(func, args, kwargs)
        if step is not None:
            taken = _take(step)
            if taken is not None:
                return taken
        held = False
        # What others than ours make of wrappers is not known, and memory is the values'.
        by_values = func in MEMORY or not all(issubclass(t, PendingTensor) for t in types)

        def plain(item: Any) -> Any:
            nonlocal held
            if isinstance(item, PendingTensor) and not _turn(item):
                held = True
                return _value(item) if by_values else item
            return item

        changed = args[0] if func == _SET_DATA else None
        args, kwargs = tree_map(plain, (tuple(args), dict(kwargs)))
        if isinstance(changed, PendingTensor):
            raise RuntimeError(_CHANGED_FORM.format("y.data = x"))
        if not held or by_values:
            return func(*args, **kwargs)
        with _C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Behind autograd. Reached by code that skips the Python layer (an autograd.Function, a scripted
        # function, a C++ extension), and for a tensor that something in C++ holds.
        if torch.Tag.inplace_view in func.tags or func.overloadpacket in _RESHAPING:
            raise RuntimeError(_CHANGED_FORM.format(func))
        given: dict[int, PendingTensor] = {}

        def plain(item: Any) -> Any:
            if not isinstance(item, PendingTensor):
                return item
            value = _value(item)
            given[id(value)] = item
            return value

        args, kwargs = tree_map(plain, (tuple(args), dict(kwargs or {})))
        out = func(*args, **kwargs)
        written = [(value, given[id(value)]) for value in _written(func, args, kwargs) if id(value) in given]
        if any(value.shape != pending._waiting.form.shape for value, pending in written):
            raise RuntimeError(_CHANGED_FORM.format(func))  # `out=` resizes
        if func._schema.name.startswith("aten::_foreach_"):
            # These alone autograd does not count.
            increment_version([pending for _, pending in written if not pending.is_inference()])
        return given.get(id(out), out)  # in place: the tensor that was given


def _value(pending: Any) -> Tensor:
    """The values' memory; computed once."""
    waiting = _waiting_of(pending)
    if waiting is None:
        return pending  # type: ignore[no-any-return]
    call = waiting.call
    if call is not None:
        _keep(waiting, call.run())
    assert waiting.value is not None
    return waiting.value


def _keep(waiting: Waiting, value: Tensor) -> None:
    with _TURNING:
        if waiting.value is None:  # another thread may have come first
            waiting.value = value
        waiting.call = None


def _turn(item: Any) -> bool:
    """Whether ``item`` is a plain tensor from now on."""
    waiting = _waiting_of(item)
    if waiting is None:
        return True
    call = waiting.call
    if call is None:  # others have its values' memory
        return False
    if _is_compiling():  # Dynamo looks at this code, and knows no swap
        return False
    value = call.run()
    with _TURNING, _C.DisableTorchFunctionSubclass():
        if not isinstance(item, PendingTensor):
            return True
        if waiting.value is not None:
            return False
        # Held by its Python object alone, which may have many names.
        if item._use_count() == 1 and not item.requires_grad and type(value) is Tensor:  # type: ignore[attr-defined]
            try:
                _C._swap_tensor_impl(item, value)  # of torch.utils.swap_tensors, without its detours
            except RuntimeError:  # there are weak references in C++
                pass
            else:
                item.__class__ = torch.Tensor  # type: ignore[assignment]
                del item._waiting
                return True
        _keep(waiting, value)
    return False


def _waiting_of(item: Any) -> Waiting | None:
    """What ``item`` waits for; None: nothing, any more (another thread may have turned it)."""
    return item.__dict__.get("_waiting") if isinstance(item, PendingTensor) else None


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
    pending = step.operands[0]
    found = _open(pending)
    if found is None:
        return None
    waiting, call = found
    planned = waiting.remaining[0]
    if step.name == planned == DROPOUT:
        return _advance(pending, waiting, call, inplace=True) if is_eval_dropout(step) else None
    if step.name == planned == BATCH_NORM:
        assert step.arguments is not None
        if call.input.dim() != 5:  # without a batch, torch's batch norm is one over the depth
            return None
        folded = fold(call.weight, call.bias, call.groups, step.arguments, waiting.form.dtype)
        if folded is None:
            return None
        call = call.with_step(BATCH_NORM, weight=folded[0], bias=folded[1])
        return _advance(pending, waiting, call, step.inplace)
    if step.name == "hardswish" and planned == X_HARDSWISH and not step.inplace:
        gate = PendingTensor.create(call.with_step("hardswish", activation="hardswish"), (), waiting.form)
        gate._waiting.gate_of = call
        return gate
    if step.is_activation and step.name == planned:
        call = call.with_step(step.name, activation=step.name, negative_slope=step.negative_slope)
        return _advance(pending, waiting, call, step.inplace)
    return None


def _take_mul(step: Step) -> Tensor | None:
    first, second = step.operands
    for t, gate in ((first, second), (second, first)):
        asked = _waiting_of(gate)
        if asked is None or asked.gate_of is None or asked.value is not None:
            continue
        found = _open(t)
        if found is None or found[1] is not asked.gate_of or (step.inplace and t is not first):
            continue
        waiting, call = found
        call = call.with_step(X_HARDSWISH, activation=X_HARDSWISH)
        return _advance(t, waiting, call, step.inplace)
    return None


def _take_add(base: Any, other: Any, step: Step) -> Tensor | None:
    found = _open(base)
    if found is None or other is base:
        return None
    waiting, call = found
    if waiting.remaining[0] != ADD or call.add is not None:
        return None
    _turn(other)
    # Another type would promote (under autocast: an fp16 result plus an fp32 skip is fp32), another shape
    # could enlarge the result.
    if (
        type(other) not in PLAIN_TYPES
        or other.dtype != waiting.form.dtype
        or other.device != waiting.form.device
        or other.layout != torch.strided
        or not _broadcasts_to(other.shape, waiting.form.shape)
    ):
        return None
    order = "before" if call.activation == "none" else "after"
    call = call.with_step(ADD, add=other, add_order=order, versions=call.versions + versions_of(other))
    return _advance(base, waiting, call, step.inplace)


def _take_cat(step: Step) -> Tensor | None:
    for skip_first in (False, True):
        skip, base = step.operands if skip_first else step.operands[::-1]
        found = _open(base)
        if found is None or found[0].remaining[0] != CAT or base is skip:
            continue
        waiting, call = found
        form = waiting.form
        shape = form.shape
        channels = len(shape) - 4
        _turn(skip)
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
            versions = call.versions + versions_of(skip)
            return call.with_step(CAT, cat=(skip, skip_first), versions=versions).run_here()
    return None


def _broadcasts_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    if shape == wanted:
        return True
    offset = len(wanted) - len(shape)
    return offset >= 0 and all(n in (1, wanted[offset + dim]) for dim, n in enumerate(shape))


def _open(operand: Any) -> tuple[Waiting, Call] | None:
    """What the pending tensor ``operand`` waits for, and its call, if it can still take something in."""
    waiting = _waiting_of(operand)
    call = None if waiting is None else waiting.call
    if waiting is None or call is None or not waiting.remaining:
        return None
    return (waiting, call) if call.ambience == Ambience.current(call.ambience.device) else None


def _advance(pending: Any, waiting: Waiting, call: Call, inplace: bool) -> Tensor:
    remaining = waiting.remaining[1:]
    if inplace:
        before = waiting.call, waiting.remaining
        waiting.call, waiting.remaining = call, remaining
        try:
            if not remaining:
                _turn(pending)
        except BaseException:  # out of memory, for one: the step was not done, and may be tried again
            waiting.call, waiting.remaining = before
            raise
        return pending  # type: ignore[no-any-return]
    if remaining:
        return PendingTensor.create(call, remaining, waiting.form)
    return call.run_here()  # the chain ends here: from here on there are ordinary tensors only
