# SPDX-License-Identifier: Apache-2.0
"""Which forwards the stack runs, told by file name and first line.

The module or its class would be more exact, as two classes may share both. But plans are copied and pickled
with the convolutions that hold them, and reading a frame's ``f_locals`` would keep its tensors alive.
"""

from __future__ import annotations

import inspect
import os
import types
import zlib
from collections.abc import Iterable
from typing import Any

from torch import nn

CodePlace = tuple[str, int]  # base name and first line; of code without a file "<" and a checksum
NOWHERE: CodePlace = ("", 0)
_COMPILED = os.path.join("torch", "_dynamo", "eval_frame.py")


def place_of(code: types.CodeType) -> CodePlace:
    if _is_generated(code):
        return "<", zlib.crc32(code.co_code + repr(code.co_names).encode())
    return os.path.basename(code.co_filename), code.co_firstlineno


def _is_generated(code: types.CodeType) -> bool:
    """Code without a file: torch.fx writes a GraphModule's anew for each copy, as <eval_with_key>.7."""
    return code.co_filename.startswith("<")


def place_of_forward(module: nn.Module) -> CodePlace:
    """Of the module's forward, under its decorators; NOWHERE if it has no Python code of its own."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return NOWHERE if code is None else place_of(code)


def last_of(frame: Any, way: Iterable[CodePlace]) -> Any:
    """The frame of the last place of ``way``, if the stack from ``frame`` outwards comes by all; else None.

    Others may lie in between: a forward that calls that of its base class, decorators, checkpoints.
    """
    found = None
    for name, line in way:
        while frame is not None:
            code = frame.f_code
            if (code.co_firstlineno == line or _is_generated(code)) and place_of(code) == (name, line):
                break
            frame = frame.f_back
        if frame is None:
            return None
        found, frame = frame, frame.f_back
    return found


def first_argument(frame: Any) -> Any:
    """Of a running function."""
    arguments = frame.f_locals
    first = arguments.get(frame.f_code.co_varnames[0])
    if type(arguments) is dict:  # before Python 3.13 the frame keeps what it was asked for
        arguments.clear()
    return first


def in_compiled_code(frame: Any) -> bool:
    """Whether the stack comes by something that torch.compile has made."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith(_COMPILED):
            return True
        frame = frame.f_back
    return False


# A slice of an nn.Sequential is one, too.
SEQUENTIAL = place_of_forward(nn.Sequential())
