# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_run.py: its parts, their limits, and what it makes of their words. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from load_file import load_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_run() -> Any:
    return load_file(ROOT / "scripts" / "gpu_run.py")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_file_with_gpu_tests_is_in_one_shard(gpu_run: Any) -> None:
    found = [Path(file).stem for files in gpu_run.shards().values() for file in files]
    assert len(found) == len(set(found))
    for path in (ROOT / "tests" / "python").glob("test_*.py"):
        if "mark.gpu" in path.read_text() and path.name != Path(__file__).name:
            assert path.stem in found or path.stem == "test_differential", path.name


def test_parts_run_side_by_side_and_are_summed_up(gpu_run: Any, tmp_path: Path) -> None:
    devices = python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], 'passed 0')")
    parts = [
        gpu_run.Part("good", python("print('== 3 passed in 1 s ==')"), limit=60),
        gpu_run.Part("bad", python("print('1 failed, 2 passed'); raise SystemExit(1)"), limit=60),
        gpu_run.Part("hung", python("import time; print('1 passed', flush=True); time.sleep(600)"), limit=3),
        gpu_run.Part("seen", devices, 60, "0,1"),
    ]
    gpu_run.run_together(parts, tmp_path)
    lines = gpu_run.summary(parts, tmp_path).splitlines()[2:]
    assert lines[0].startswith("| good | 3 passed in 1 s |")
    assert lines[1].startswith("| bad | FAILED (status 1): 1 failed, 2 passed |")
    assert lines[2].startswith("| hung | stopped after 3 s: 1 passed |")
    assert lines[3].startswith("| seen | 0,1 passed 0 |")
    assert [part.status == 0 for part in parts] == [True, False, False, True]


def test_a_name_of_no_part_is_an_error(gpu_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_run.main(["--list", "--only", "pytest*,differential"]) == 0
    names = capsys.readouterr().out.split()
    assert "pytest-accuracy" in names and "differential" in names
    with pytest.raises(SystemExit):
        gpu_run.main(["--only", "nothing"])
    assert "no part is named nothing" in capsys.readouterr().err
