# SPDX-License-Identifier: Apache-2.0
"""What a node of a graph changes in place.

A change that goes unseen gives wrong results, one that is seen where there is none costs a fusion: what is
not known counts as changing all it is given.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

_OPERATORS = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "idiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift", "iconcat", "setitem", "delitem",
)  # fmt: skip
# What these hand out may be written to where nothing is recorded.
_EXPORTS = frozenset({"numpy", "__array__", "__dlpack__", "to_dlpack", "storage", "untyped_storage"})
_INPLACE = (
    frozenset(_OPERATORS)
    | {f"__{name}__" for name in _OPERATORS}
    | {"__set__", "setattr", "delattr"}
    | _EXPORTS
)
# Functions from here change what their names and arguments say, and nothing else.
_KNOWN = frozenset({"torch", "operator", "_operator", "math", "builtins", "einops", "convt3d"})
_JOINING = frozenset({"set_", "set_data", "__set__", "setattr"})
_NO_TENSORS = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool, nn.Module)


def changed_operands(node: fx.Node, module: nn.Module | None) -> list[fx.Node]:
    """The nodes whose tensors ``node`` changes.

    Args:
        module: what a ``call_module`` calls.
    """
    found: dict[fx.Node, None] = {}

    def collect(value: Any) -> None:
        fx.map_arg(value, lambda n: found.setdefault(n))

    if module is not None:
        # Its own buffers are no nodes.
        if any(getattr(m, "inplace", False) for m in module.modules() if m is not module):
            return node.all_input_nodes  # it was not looked into, so any of them
        if getattr(module, "inplace", False):
            collect(_first(node))
    elif node.op in ("call_function", "call_method"):
        name = function_name(node)
        if not _is_known(node) or "inplace" in name:
            tensors = [n for n in node.all_input_nodes if not isinstance(_example(n), _NO_TENSORS)]
            return list(dict.fromkeys(tensors))
        if name in _INPLACE or (name.endswith("_") and not name.endswith("__")):
            collect(_first(node))
        collect(node.kwargs.get("out"))
        for arguments, written in _bindings(node):
            collect([arguments.get(name) for name in ("out", *written)])
            collect(_by_what_is_asked(arguments))
    return list(found)


def joined_operands(node: fx.Node) -> list[fx.Node]:
    """Those that share memory from then on, though none is made from another (``a.set_(b)``)."""
    called = node.op in ("call_function", "call_method")
    return node.all_input_nodes if called and function_name(node).partition(".")[0] in _JOINING else []


def function_name(node: fx.Node) -> str:
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def _first(node: fx.Node) -> Any:
    first = node.args[0] if node.args else None
    inputs = node.all_input_nodes
    return first if isinstance(first, (fx.Node, list, tuple)) or not inputs else inputs[0]


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _by_what_is_asked(arguments: Mapping[str, Any]) -> list[Any]:
    """What functions change depending on their arguments, which no schema says."""
    changed = []
    if arguments.get("inplace", False) not in (False, None):
        changed.append(next(iter(arguments.values())))
    # Statistics of a norm, unless it says that it only reads them.
    training = [arguments[name] for name in ("training", "train", "use_input_stats") if name in arguments]
    if not any(flag is False for flag in training):
        changed += [arguments.get("running_mean"), arguments.get("running_var")]
    if arguments.get("max_norm") is not None:  # of an embedding
        changed.append(arguments.get("weight"))
    return changed


def _is_known(node: fx.Node) -> bool:
    """Whether name and arguments say what is changed. Not of operators with code of the user inside."""
    target: Any = node.target
    if isinstance(target, str):
        return hasattr(torch.Tensor, target)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if isinstance(target, types.FunctionType):
        return all(map(_is_from_known, _written_in(target)))
    if isinstance(target, (types.BuiltinFunctionType, type)):
        return _is_from_known(target.__module__)
    if isinstance(target, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return target.__objclass__ in torch.Tensor.__mro__
    if isinstance(target, types.MethodWrapperType):  # x.shape, recorded
        return getattr(target.__self__, "__objclass__", None) in torch.Tensor.__mro__
    return False


def _written_in(function: Any) -> Iterator[Any]:
    """The modules that wrote ``function`` and what it wraps.

    A decorator's own module is only in the globals, what it decorates only in ``__module__``, which
    functools.wraps copies, and along ``__wrapped__``.
    """
    seen = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, types.FunctionType):
            yield function.__globals__.get("__name__")
        yield getattr(function, "__module__", None)
        function = getattr(function, "__wrapped__", None)


def _is_from_known(module: Any) -> bool:
    return str(module).partition(".")[0] in _KNOWN and not str(module).startswith("torch.distributed")


def _bindings(node: fx.Node) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The arguments by name, once for each signature that the call may have; the names of those written."""
    target: Any = node.target
    if isinstance(target, types.FunctionType):
        try:
            bound = inspect.signature(target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            return
        bound.apply_defaults()
        yield dict(bound.arguments), ()
        return
    for positional, defaults, written in _schemas(target):
        given = {**defaults, **dict(zip(positional, node.args, strict=False)), **node.kwargs}
        if "input" in node.kwargs and "self" in positional:
            given["self"] = node.kwargs["input"]  # as torch's functions call it
        yield given, written


_Schema = tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]


@functools.cache
def _schemas(target: Any) -> tuple[_Schema, ...]:
    """Of an operator: names of the positional arguments, defaults, names of the arguments that are written.

    Methods and functions in C have those of the operator of their name.
    """
    if isinstance(target, torch._ops.OpOverload):
        overloads = [target]
    else:
        packet = target
        if not isinstance(target, torch._ops.OpOverloadPacket):
            name = target if isinstance(target, str) else getattr(target, "__name__", "")
            packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            return ()
        overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    found = []
    for overload in overloads:
        arguments = overload._schema.arguments
        found.append(
            (
                tuple(a.name for a in arguments if not a.kwarg_only),
                {a.name: a.default_value for a in arguments if a.has_default_value()},
                tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
            )
        )
    return tuple(found)
