# SPDX-License-Identifier: Apache-2.0
"""The examples run, and end with what they promise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

RUNS = [
    (("quickstart.py",), ["function   max error", "up: conv + batch_norm + add + relu", "fuse       max"]),
    (("training_loop.py", "--steps", "4"), ["up: conv + batch_norm + add + relu", "state dict loads"]),
    (
        ("monai_network.py", "--network", "SegResNetDS", "--size", "16", "--repeats", "1"),
        ["3 of 3 transposed convolutions replaced, 3 with what follows", "difference"],
    ),
]


@pytest.mark.parametrize(("command", "promised"), RUNS, ids=[command[0] for command, _ in RUNS])
def test_example(command: tuple[str, ...], promised: list[str]) -> None:
    if command[0].startswith("monai") and importlib.util.find_spec("monai") is None:
        pytest.skip("MONAI is not installed (third_party/requirements/networks.txt)")
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / command[0]), *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for text in promised:
        assert text in done.stdout
    if command[0] == "training_loop.py":
        unfused, fused = (line.split()[1:] for line in done.stdout.splitlines() if "first" in line)
        for a, b in zip(unfused[1::2], fused[1::2], strict=True):
            assert abs(float(a) - float(b)) <= 2e-3
