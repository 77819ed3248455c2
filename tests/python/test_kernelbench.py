# SPDX-License-Identifier: Apache-2.0
"""The KernelBench example: its rules on a CPU, and that what it compiles compiles."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convt3d
from load_file import load_file

FOLDER = Path(__file__).parents[2] / "examples" / "kernelbench"


def load(name: str) -> Any:
    return load_file(FOLDER / f"{name}.py")


def test_the_packages_file_by_the_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert load("run").main(["--device", "cpu", "--batch", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert "package: 5 of 5 trials agree" in capsys.readouterr().out
    assert (tmp_path / "out.json").is_file()


def test_a_cpu_takes_a_smaller_batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load("run")
    batches: list[int] = []
    monkeypatch.setattr(run, "check", lambda ours, theirs, device, batch: batches.append(batch) or (0.0, 5))
    assert run.main(["--device", "cpu"]) == 0 and batches == [run.CPU_BATCH]
    assert "the problem's batch is 128" in capsys.readouterr().out


def test_a_wrong_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load("run")

    class Off(convt3d.ModelNew):
        def forward(self, x: Tensor, add_input: Tensor) -> Tensor:
            return super().forward(x, add_input) + 3e-4

    monkeypatch.setattr(run, "load", lambda path: Off)
    assert run.main(["--device", "cpu", "--batch", "1"]) == 1


def test_models_draw_alike() -> None:
    """Under one seed both have the reference's parameters: the harness compares outputs alone."""
    run = load("run")
    theirs = run.build(run.reference.Model, "cpu")
    ours: nn.Module = run.build(run.load(run.FILES["package"]), "cpu")
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)


def test_the_inline_sources_compile(tmp_path: Path) -> None:
    """With the compilers alone: a torch without CUDA cannot link the extension."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).is_file():
        pytest.skip("there is no nvcc")
    if importlib.util.find_spec("cutlass_library") is None and "CUTLASS_DIR" not in os.environ:
        pytest.skip("CUTLASS's headers are not installed")
    model = load("model_new_inline")
    includes = [f"-I{path}" for path in (*convt3d.include_paths(), model.cutlass_include())]
    (tmp_path / "cuda.cu").write_text(model.CUDA_SOURCE)
    flags = [flag for flag in model.CUDA_FLAGS if flag != "-O3"]
    command = [nvcc, "-c", "-O1", "-arch=sm_80", "-std=c++20", *flags, *includes, "cuda.cu", "-o", "cuda.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    symbols = subprocess.run(["nm", "-C", "cuda.o"], cwd=tmp_path, capture_output=True, text=True).stdout
    defined = [line for line in symbols.splitlines() if " T " in line]
    assert any("convt3d_inline_run" in line for line in defined)
    missing = [line for line in symbols.splitlines() if " U " in line and "convt3d" in line]
    assert missing == [], "the extension would not load"


def test_include_paths_of_a_checkout() -> None:
    (header,) = [p for p in convt3d.include_paths() if (Path(p) / "convt3d" / "convt3d.h").is_file()]
    assert header.endswith(("/include", "/_include"))


@pytest.mark.gpu
@pytest.mark.slow
def test_both_on_a_gpu() -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--trials", "5"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1] / "python"), *sys.path]),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("5 of 5 trials agree") == 2
