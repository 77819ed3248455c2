# SPDX-License-Identifier: Apache-2.0
"""A pass of Inductor's that leaves in place the one that was registered before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ._version import __version__


class ChainedPass(CustomGraphPass):
    """What was ``before`` it runs first, then :meth:`change`, unless there are no ``device_types``."""

    sources: tuple[str, ...] = ()
    """Files of the package, as globs, on which the result depends."""

    def __init__(self, before: Any, device_types: Collection[str]) -> None:
        self.before = before
        self.device_types = tuple(device_types)

    def change(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        raise NotImplementedError

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in _passes(self.before):
            earlier(graph)
        if self.device_types:
            self.change(graph)

    def uuid(self) -> Any | None:
        """Of this pass and those before it; None (no caching) where one of them has none."""
        earlier = []
        for item in _passes(self.before):
            found = item.uuid() if isinstance(item, CustomGraphPass) else None
            if found is None:
                return None
            earlier.append(found)
        return (__version__, type(self).__name__, _hash(self.sources), self.device_types, *earlier)


def _passes(before: Any) -> Sequence[Callable[[fx.Graph], None]]:
    if before is None:
        return ()
    return tuple(before) if isinstance(before, (list, tuple)) else (before,)


def _hash(sources: Sequence[str]) -> str:
    here = Path(__file__).resolve().parent
    files = [Path(__file__), *sorted(file for pattern in sources for file in here.glob(pattern))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
