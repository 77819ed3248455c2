# SPDX-License-Identifier: Apache-2.0
"""Makes the source tree importable: the package where it is not installed, and the tests' accuracy bound."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def add() -> None:
    """Appends, so that an installed package comes first. Does nothing the second time."""
    for folder in (ROOT / "python", ROOT / "tests" / "python"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


add()
