# SPDX-License-Identifier: Apache-2.0
"""The results of PyTorch that the C++ tests compare with are those of the torch installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_torch_results.py"


def test_recorded_results_are_todays() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
