# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d check | bench | explain``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convt3d import conv_transpose3d
from convt3d.cli import bench, call, check, main
from convt3d.cli.call import CallSpec, add_call_arguments, spec_of
from convt3d.cli.timing import CpuTimer, interleaved

SMALL = ["--shape", "1", "3", "--channels", "4", "6", "--plain", "--device", "cpu"]


def parse(*arguments: str) -> CallSpec:
    parser = argparse.ArgumentParser()
    add_call_arguments(parser)
    return spec_of(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "padding", "output_padding"),
    [
        (["--kernel", "3"], (1, 1, 1), (1, 1, 1)),
        (["--kernel", "2"], (0, 0, 0), (0, 0, 0)),
        (["--kernel", "4"], (1, 1, 1), (0, 0, 0)),
        (["--kernel", "3,3,1", "--stride", "2x2x1"], (1, 1, 0), (1, 1, 0)),
        (["--kernel", "1", "--stride", "2"], (0, 0, 0), (1, 1, 1)),
        (["--kernel", "3", "--output-padding", "0"], (1, 1, 1), (0, 0, 0)),
        (["--kernel", "5", "--padding", "0"], (0, 0, 0), (0, 0, 0)),
    ],
)
def test_padding_that_gives_stride_times_the_size(
    arguments: list[str], padding: tuple[int, ...], output_padding: tuple[int, ...]
) -> None:
    spec = parse(*arguments)
    assert (spec.padding, spec.output_padding) == (padding, output_padding)
    t = spec.draw("meta")
    assert spec.ours(t).shape[2:] == spec.out_size
    if not {"--output-padding", "--padding"} & set(arguments):
        assert spec.out_size == tuple(s * n for s, n in zip(spec.stride, spec.size, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "2"],
        ["--shape", "2", "3", "4"],
        ["--channels", "4"],
        ["--kernel", "0"],
        ["--kernel", "three"],
        ["--stride", "2", "2"],
        ["--padding", "-1"],
        ["--groups", "3"],
        ["--skip", "-1"],
        ["--skip", str(2**63)],
        ["--shape", "2", str(2**70)],
        ["--kernel", str(2**63)],
    ],
)
def test_wrong_calls_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["explain", *arguments])
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_without_a_command_all_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"    {command} " in shown for command in ("info", "demo", "check", "bench", "explain"))


def test_sizes_beyond_64_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Of what comes out of sizes that fit."""
    with pytest.raises(SystemExit) as error:
        main(["explain", "--shape", "2", str(2**62)])
    assert error.value.code == 2 and "does not fit 64 bits" in capsys.readouterr().err
    for command in (["explain"], ["bench", "--no-compile"]):
        assert main([*command, "--plain", "--shape", "4000000000", "4000000000"]) == 1
        assert "overflow" in capsys.readouterr().out


def test_work_of_a_call() -> None:
    spec = parse(
        "--shape", "2", "4", "5", "6", "--channels", "8", "6", "--add", "--skip", "3", "--dtype", "fp16"
    )
    t = spec.draw("meta")
    assert spec.byte_count() == 2 * (sum(x.numel() for x in t.values()) + spec.ours(t).numel())
    assert "cat with 3 channels" in spec.describe() and "add" in spec.describe()


@pytest.mark.parametrize(
    "options", [[], ["--add", "--add-order", "after", "--activation", "relu", "--skip", "2"]]
)
def test_ours_theirs_and_exact_agree(options: list[str]) -> None:
    spec = parse("--shape", "2", "3", "--channels", "4", "6", *options, "--dtype", "fp64")
    t = spec.draw("cpu")
    torch.testing.assert_close(spec.ours(t), spec.theirs(t))
    torch.testing.assert_close(spec.ours(t)[:, :6], spec.exact(t, False)[0])


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--shape", "2", "16", "--skip", "8", "--plain"]) == 0
    out = capsys.readouterr().out
    for piece in ("path", "bytes", "FLOPs", "precision", "(2, 40, 32, 32, 32)"):
        assert piece in out
    assert main(["explain", "--output-padding", "2", "--plain"]) == 1
    assert "output_padding must be smaller" in capsys.readouterr().out


@pytest.fixture
def two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [spec for spec in check.CALLS if "nnU-Net" in spec.name or "odd output" in spec.name]
    assert len(few) == 2
    monkeypatch.setattr(check, "CALLS", few)


@pytest.mark.usefixtures("two_calls")
@pytest.mark.parametrize("plain", [True, False])
def test_check(capsys: pytest.CaptureFixture[str], plain: bool) -> None:
    assert main(["check", "--device", "cpu", *(["--plain"] if plain else [])]) == 0
    out = capsys.readouterr().out
    assert "All 16 results are within the bound." in out
    assert out.count("good") == 16
    rows = [line for line in out.splitlines() if "good" in line]
    assert max(map(len, rows)) <= 80  # what a terminal or a pipe has: nothing is folded
    assert all("nnU-Net's step and skip" in row or "odd output rows" in row for row in rows)


@pytest.mark.usefixtures("two_calls")
def test_check_finds_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = conv_transpose3d(*args, **kwargs)
        result[0, 0, 0, 0, 0] += 2e-3
        return result

    monkeypatch.setattr(call, "conv_transpose3d", off)
    assert main(["check", "--device", "cpu", "--plain"]) == 1
    out = capsys.readouterr().out
    # Half a unit in the last place of bf16 may hide it.
    assert [out.count(f"\nWRONG: odd output rows, {mode}") for mode in ("fp32", "tf32")] == [2, 2]


def test_check_of_every_call_on_a_gpu_is_valid() -> None:
    for spec in check.CALLS:
        assert spec.ours(spec.draw("meta")).shape[2:] == spec.out_size


def test_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["bench", *SMALL, "--no-compile", "--add", "--activation", "gelu", "--output", str(tmp_path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for piece in ("4 -> 6, batch 1, 3x3x3", "PyTorch eager", "convt3d's speed against it", "nothing to gain"):
        assert piece in out
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["call"]["activation"] == "gelu" and record["path"] == "cpu"
    assert len(record["runs_ms"]["convt3d"]) == 5 and record["median_ms"]["PyTorch eager"] > 0
    assert ("No picture" in out) != (tmp_path / "bench.png").is_file()


@pytest.mark.parametrize(
    ("options", "batch", "size", "said"),
    [
        (["--device", "cpu"], 1, 16, True),
        (["--device", "cpu", "--shape", "2", "32"], 2, 32, False),
        (["--device", "cuda"], 2, 32, False),
    ],
)
def test_the_call_that_bench_takes_by_itself(
    options: list[str],
    batch: int,
    size: int,
    said: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A smaller one on a CPU, where it says so."""
    specs: list[call.CallSpec] = []
    monkeypatch.setattr(bench, "bench", lambda console, spec, *rest: specs.append(spec) or 0)
    assert main(["bench", *options]) == 0
    assert (specs[0].batch, specs[0].size) == (batch, (size,) * 3)
    assert ("smaller call" in capsys.readouterr().out) == said


@pytest.mark.parametrize("wrong", [["--padding", "99"], ["--output", __file__]], ids=["call", "folder"])
def test_bench_says_what_is_wrong_before_it_times(
    wrong: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", *SMALL, "--no-compile", "--output", str(tmp_path), *wrong]) == 1
    out = capsys.readouterr().out
    assert "Traceback" not in out and ("padding" in out or "exists" in out)


def test_bench_goes_on_without_a_compiler(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(function: Any, **options: Any) -> Any:
        def fails(*args: Any) -> None:
            raise RuntimeError("no compiler here\nmore")

        return fails

    monkeypatch.setattr(torch, "compile", compile)
    assert main(["bench", *SMALL, "--output", str(tmp_path)]) == 0
    assert "torch.compile was left out: RuntimeError: no compiler here" in capsys.readouterr().out


def test_bench_times_nothing_that_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "conv_transpose3d", lambda *a, **k: conv_transpose3d(*a, **k) + 1)
    assert main(["bench", *SMALL, "--no-compile", "--output", str(tmp_path)]) == 1
    assert "WRONG: differs from PyTorch by 1" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_gpu_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--device", "cuda", "--plain"]) == 1
    assert "no GPU" in capsys.readouterr().out


def test_runs_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    steps: list[int] = []
    times = interleaved(calls, CpuTimer(), 1, 3, 0.0, lambda: steps.append(0))
    assert [len(runs) for runs in times.values()] == [3, 3] and len(steps) == 8
    assert order[12:] == (["a"] * 3 + ["b"] * 3) * 3


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "--plain"]) == 0
    assert main(["bench", *SMALL[:-2], "--shape", "2", "16", "--skip", "6", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "torch.compile" in out and "time / byte floor" in out
