# SPDX-License-Identifier: Apache-2.0
"""What a test needs of the machine beside Python and torch."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

_PYTHON_H = Path(sysconfig.get_path("include")) / "Python.h"

needs_python_headers = pytest.mark.skipif(
    not _PYTHON_H.is_file(), reason=f"inductor compiles against {_PYTHON_H}, which is not there (python3-dev)"
)
