# SPDX-License-Identifier: Apache-2.0
"""Makes the package importable for a test program run from a checkout where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end, so that an installed package comes first.
sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))
