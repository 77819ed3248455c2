# SPDX-License-Identifier: Apache-2.0
"""Hooks on the modules that the result of a planned convolution passes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether code outside the module sees what goes in or comes out: a hook, a compiler, another forward."""
    attributes = module.__dict__
    if "forward" in attributes or attributes.get("_compiled_call_impl") is not None:
        return True
    return any(getattr(module, name, None) for name in HOOKS)


_Pair = tuple["weakref.ref[nn.Module]", "weakref.ref[nn.Module]"]


class Watched:
    """Modules whose hooks have to see what they saw before; true while one of them has any.

    Held weakly, as most of them hold the convolution. A copy of the model watches its own modules, a copy of
    a part of it those within the part.
    """

    __slots__ = ("_around", "_dicts", "_pairs")

    def __init__(
        self,
        pairs: Iterable[_Pair] = (),
        dicts: Sequence[Mapping[int, Any]] = (),
        around: Sequence[Mapping[int, Any]] = (),
    ) -> None:
        """Each module comes with the smallest one that holds both it and the convolution."""
        self._pairs = tuple(pairs)
        # Of an unpickled model: hooks of the modules, and of those around that they are parts of.
        self._dicts = dicts
        self._around = around

    @classmethod
    def of(cls, model: nn.Module, conv: nn.Module, modules: Iterable[nn.Module]) -> Watched:
        """Those of ``modules`` that ``conv``'s result passes in ``model``."""
        names: dict[nn.Module, list[list[str]]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name.split(".") if name else [])

        def around(module: nn.Module) -> nn.Module:
            deepest = max((_common(a, b) for a in names[conv] for b in names[module]), key=len)
            return model.get_submodule(".".join(deepest))

        return cls((weakref.ref(module), weakref.ref(around(module))) for module in modules)

    def __bool__(self) -> bool:
        for reference, _ in self._pairs:
            module = reference()
            if module is not None and has_hooks(module):
                return True
        return any(self._dicts)

    def go_on_in(self, container: nn.Module) -> bool:
        """Whether the result enters another part of ``container``, or of what that is a replica of."""
        hooks = container._forward_hooks  # a replica has those of its model
        return any(hooks is known for known in self._hooks_around())

    def _hooks_around(self) -> list[Mapping[int, Any]]:
        return [a._forward_hooks for m, a in self._alive() if m is not a] + list(self._around)

    def _alive(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for pair in self._pairs:
            module, around = (reference() for reference in pair)
            if module is not None and around is not None:
                yield module, around

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        # What holds both is being copied already, or will not be. Code that copies attributes by itself may
        # not have noted the module, but has noted its parts.
        copied = [
            (copy.deepcopy(module, memo), around)
            for module, around in self._alive()
            if id(around) in memo or id(around._modules) in memo
        ]
        pairs = [
            (weakref.ref(module), weakref.ref(memo.get(id(around), module))) for module, around in copied
        ]
        return Watched(pairs, copy.deepcopy(self._dicts, memo), copy.deepcopy(self._around, memo))

    def __reduce__(self) -> Any:
        # A pickle of a part does not say that it is one, and modules would bring all the others.
        dicts = [m.__dict__[name] for m, _ in self._alive() for name in HOOKS if name in m.__dict__]
        return Watched, ((), (*dicts, *self._dicts), tuple(self._hooks_around()))


def _common(a: Sequence[str], b: Sequence[str]) -> list[str]:
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]
