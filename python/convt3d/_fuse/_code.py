# SPDX-License-Identifier: Apache-2.0
"""Which forward a frame of the stack runs, told by where it is written.

A module or its class would say it better, but plans are copied and pickled with the convolutions that hold
them, and a frame's arguments cannot be asked for without keeping them alive.
"""

from __future__ import annotations

import inspect
import os
import types
from typing import Any

from torch import nn

CodePlace = tuple[str, int]  # name of the file, first line


def place_of(code: types.CodeType) -> CodePlace:
    name = os.path.basename(code.co_filename)
    # torch.fx numbers the files that it pretends to have written: <eval_with_key>.7
    return name.partition(">")[0] if name.startswith("<") else name, code.co_firstlineno


def place_of_forward(module: nn.Module) -> CodePlace:
    """Of the module's forward, under its decorators; of none that is written in Python, no place."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return ("", 0) if code is None else place_of(code)


def is_forward(code: types.CodeType) -> bool:
    """Whether it looks like that of a module. An autograd.Function's has a context in front."""
    return code.co_name == "forward" and code.co_argcount > 0 and code.co_varnames[0] != "ctx"


def in_compiled_code(frame: Any) -> bool:
    """Whether the stack comes by something that torch.compile has made."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILED):
            return True
        frame = frame.f_back
    return False


_COMPILED = os.path.join("torch", "_dynamo", "eval_frame.py")
