# SPDX-License-Identifier: Apache-2.0
"""Programs of scripts/ and examples/, which are no packages, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_file(path: Path) -> Any:
    """A module of its own for each call, under a name that shadows nothing."""
    spec = importlib.util.spec_from_file_location(f"convt3d_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
