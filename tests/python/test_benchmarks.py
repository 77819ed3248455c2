# SPDX-License-Identifier: Apache-2.0
"""The benchmark command: its table, floors, files and pictures, and whole runs on a stand-in for the GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cat
import check
import convt3d
import measure
import networks
import plot
import report
import run
import training
import workloads
from floor import Ceilings, floor, multiply_rate
from gpu import Call, Gpu
from results import FAILED, WRONG, Results, RowResult, Timing, verdict
from workloads import ROWS, WORKLOADS, Row, Workload, select

CEILINGS = Ceilings(copy=4e12, fp16=600e12, bf16=700e12, tf32=300e12)
SHARD = {
    "date": "2000-01-01T00:00:00+00:00",
    "convt3d": "0",
    "commit": None,
    "torch": "0",
    "cuda": "0",
    "cudnn": 0,
    "cudnn_benchmark": False,
    "driver": "0",
    "ceilings": vars(CEILINGS),
}
TINY = Workload("tiny", 3, 4, 6, (3, 4, 2))


def row_named(name: str) -> Row:
    (row,) = select(name)
    return row


def made_up(row: Row, ours: float, **theirs: float) -> RowResult:
    """A result whose times are given, in milliseconds."""
    byte_count, flops = row.work()
    least = floor(byte_count, flops, row.mode, CEILINGS)
    result = RowResult(row.name, 0, path="sm90", bytes=byte_count, flops=flops, max_abs_error=1e-6)
    result.floor_ms, result.floor_bound = least.seconds * 1e3, least.bound
    for name, value in {"convt3d": ours, **theirs}.items():
        result.times[name] = Timing([value * f for f in (1.0, 0.99, 1.02, 1.0, 1.0)], 20)
    return result


def stored(*rows: RowResult) -> Results:
    return Results("A GPU", "auto", [SHARD], {row.name: row for row in rows})


# --- the table ---------------------------------------------------------------------------------------------


def test_rows_are_every_workload_in_every_mode_and_layout() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) == 8 * len(WORKLOADS)
    assert names[0] == "reference/tf32/ncdhw"
    for row in ROWS:
        w = row.workload
        x, weight = (torch.empty(w.shapes()[name], device="meta") for name in ("input", "weight"))
        out = torch.nn.functional.conv_transpose3d(x, weight, None, *w.convolution())
        assert out.shape == w.shapes()["add"]


def test_the_work_of_the_reference() -> None:
    assert row_named("reference/tf32/ndhwc").work() == (2_214_813_952, 57_982_058_496)
    assert row_named("reference/bf16/ncdhw").work() == (2_214_813_952 // 2, 57_982_058_496)


def test_selection() -> None:
    assert len(select(None)) == len(ROWS)
    assert [row.name for row in select("reference")] == [row.name for row in ROWS[:8]]
    assert [row.name for row in select("odd-*/fp16/ncdhw, reference/fp16/*")] == [
        "reference/fp16/ncdhw",
        "reference/fp16/ndhwc",
        "odd-128-64-d32/fp16/ncdhw",
    ]
    for bad in ("nothing", "reference,nothing/*", " , "):
        with pytest.raises(ValueError, match="--list"):
            select(bad)


def test_rows_behind_another_activation(tiny: list[Row], tmp_path: Path) -> None:
    assert run.main(["--list", "--activation", "gelu", "--rows", "reference"]) == 0
    with pytest.raises(SystemExit):
        run.main(["--list", "--activation", "softmax"])
    rows = [row.with_activation("gelu") for row in tiny[:1]]
    assert rows[0].name == "tiny-gelu/ieee/ncdhw" and rows[0].work() == tiny[0].work()
    inputs = measure.draw(rows[0], "cpu")
    x, weight, bias, add = (inputs.get(name) for name in ("input", "weight", "bias", "add"))
    assert x is not None and weight is not None and add is not None
    t = torch.nn.functional.conv_transpose3d(x, weight, bias, *rows[0].workload.convolution()) + add
    for contestant in (measure.ours(rows[0]), measure.eager(rows[0])):
        torch.testing.assert_close(contestant(x, weight, bias, add), torch.nn.functional.gelu(t))
    assert run.run(StandIn(), [*tiny[:1], *rows], arguments(tmp_path)) == 0
    assert list(Results.load(tmp_path / "benchmark.json").rows) == [tiny[0].name, rows[0].name]


# --- floors and verdicts -----------------------------------------------------------------------------------


def test_rates() -> None:
    assert multiply_rate("tf32", CEILINGS) == 300e12
    assert multiply_rate("fp16", CEILINGS) == multiply_rate("bf16", CEILINGS) == 600e12
    assert multiply_rate("ieee", CEILINGS) == 200e12
    assert multiply_rate("ieee", replace(CEILINGS, tf32=900e12)) == 300e12


def test_floor_is_the_larger_of_bytes_and_flops() -> None:
    moving = floor(4_000_000_000, 150_000_000_000, "tf32", CEILINGS)
    assert (moving.seconds, moving.bound) == (pytest.approx(1e-3), "bytes")
    multiplying = floor(4_000_000_000, 400_000_000_000, "ieee", CEILINGS)
    assert (multiplying.seconds, multiplying.bound) == (pytest.approx(2e-3), "FLOPs")


def test_faster_is_three_percent() -> None:
    assert verdict(1.0301) == "faster" and verdict(1.029) == "level" and verdict(0.975) == "level"
    assert verdict(0.96) == "slower" and verdict(None) == ""


def test_median_and_spread() -> None:
    timing = Timing([1.0, 2.0, 1.1, 1.2, 0.9], 10)
    assert timing.median_ms == 1.1 and timing.spread == pytest.approx(1.0)


# --- files -------------------------------------------------------------------------------------------------


def test_results_survive_a_file(tmp_path: Path) -> None:
    good = made_up(ROWS[0], 1.0, eager=4.0)
    good.times["compile"] = Timing(failure="RuntimeError: no compiler")
    good.times["convt3d"].host_us = 10.5
    wrong = RowResult(ROWS[1].name, 0, status=WRONG, message="beyond the bound")
    results = stored(wrong, good)
    file = tmp_path / "deep" / "benchmark.json"
    results.save(file)
    again = Results.load(file)
    assert again.rows == results.rows and again.shards == results.shards
    assert (again.gpu, again.kernel) == ("A GPU", "auto")
    assert again.pending(ROWS[:3]) == [ROWS[1], ROWS[2]]  # what is wrong is measured again
    assert [row.name for row in again.ordered()] == [good.name, wrong.name]
    data = json.loads(file.read_text())
    assert data["rows"][0]["times"]["convt3d"]["median_ms"] == 1.0
    assert again.rows[good.name].speedup("eager") == pytest.approx(4.0)
    assert again.rows[good.name].speedup("compile") is None
    assert list(tmp_path.rglob("*.partial")) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        Results.load(file)


# --- table and picture -------------------------------------------------------------------------------------


def test_cells() -> None:
    reference = made_up(row_named("reference/tf32/ncdhw"), 0.62, eager=3.87, compile=1.83)
    cells = dict(zip(report.COLUMNS, report.cells(reference), strict=True))
    assert cells["convt3d ms"] == "0.620" and cells["floor ms"] == "0.554" and cells["÷ floor"] == "1.12"
    assert cells["× eager"] == "6.24" and cells["× compile"] == "2.95" and cells["of"] == "bytes"
    reference.status = WRONG
    assert "WRONG" in report.cells(reference)
    assert len(report.cells(reference)) == len(report.COLUMNS)


def test_summary_names_what_is_not_ahead() -> None:
    level = made_up(ROWS[0], 1.0, eager=1.02, compile=2.0)
    ahead = made_up(ROWS[1], 1.0, eager=2.0)
    ahead.times["compile"] = Timing(failure="RuntimeError: no compiler")
    failed = RowResult(ROWS[2].name, 0, status=FAILED, message="RuntimeError: broken")
    lines = "\n".join(report.summary([level, ahead, failed]))
    assert "faster than eager: 1 of 2 rows" in lines and "faster than torch.compile: 1 of 1 rows" in lines
    assert f"level: {level.name}" in lines and f"FAILED: {failed.name}: RuntimeError: broken" in lines
    assert f"compile failed: {ahead.name}: RuntimeError: no compiler" in lines


def test_plot_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [made_up(row, 1.0, eager=3.0, compile=0.9) for row in select("reference,psmnet-*/tf32/*")]
    rows[3].status, rows[3].times = WRONG, {}
    file = tmp_path / "benchmark.json"
    stored(*rows).save(file)
    assert plot.main([str(file)]) == 0
    printed = capsys.readouterr().out
    assert "reference/bf16/ndhwc" in printed and "copy 4.00 TB/s" in printed
    picture = file.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    other = tmp_path / "other.png"
    assert plot.main([str(file), "--rows", "psmnet-64-32", "--output", str(other), "--no-table"]) == 0
    assert other.exists() and "psmnet" not in capsys.readouterr().out
    assert plot.main([str(file), "--rows", "nothing"]) == 2
    assert plot.main([str(tmp_path / "missing.json")]) == 2


# --- whole runs --------------------------------------------------------------------------------------------


class StandIn(Gpu):
    """A CPU that answers as a GPU does."""

    device = "cpu"

    def __init__(self, name: str = "stand-in") -> None:
        self._name = name
        self.flushes = 0

    @property
    def name(self) -> str:
        return self._name

    def fits_in_cache(self, byte_count: int) -> bool:
        return True

    def flush_cache(self) -> None:
        self.flushes += 1

    def time(self, calls: Sequence[Call], flush: bool) -> list[float]:
        times = []
        for call in calls:
            if flush:
                self.flush_cache()
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        return times

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass

    def peak_bytes(self, call: Call) -> int:
        call()
        return 2**30

    @contextmanager
    def tf32(self, allowed: bool) -> Iterator[None]:
        yield

    def ceilings(self) -> Ceilings:
        return CEILINGS


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """A table that a CPU can run; PyTorch's compiler is not needed to test ours."""
    rows = [Row(TINY, mode, layout) for mode in ("ieee", "fp16") for layout in ("ncdhw", "ndhwc")]
    monkeypatch.setattr(measure, "_RUN_SECONDS", 1e-3)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setenv("CONVT3D_KERNEL", "auto")  # run() sets it; this puts it back
    monkeypatch.setenv("CONVT3D_COMMIT", "0123abc")
    return rows


def arguments(output: Path, **changes: Any) -> argparse.Namespace:
    parsed = run._parser().parse_args(["--output", str(output)])
    return argparse.Namespace(**{**vars(parsed), **changes})


def test_a_whole_run_and_its_resumption(
    tiny: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "benchmark.json"
    gpu = StandIn()
    assert run.run(gpu, tiny[:2], arguments(tmp_path)) == 0
    first = Results.load(file)
    assert list(first.rows) == [row.name for row in tiny[:2]] and gpu.flushes > 0
    result = first.rows["tiny/ieee/ndhwc"]
    assert set(result.times) == {"convt3d", "eager", "compile", "conv"}
    assert all(len(t.runs_ms) == 5 and t.host_us is not None for t in result.times.values())
    assert result.path == "cpu" and result.samples_checked == 3 and result.input_sets == 2
    assert result.max_abs_error is not None and 0 < result.max_abs_error < 1e-5
    assert result.bound_share is not None and result.bound_share < 1
    assert first.shards[0]["commit"] == "0123abc" and first.shards[0]["ceilings"] == vars(CEILINGS)
    printed = capsys.readouterr().out
    assert "[1/2] tiny/ieee/ncdhw" in printed and "small row" in printed

    assert run.run(gpu, tiny, arguments(tmp_path, resume=file, compile=False)) == 0
    second = Results.load(file)
    assert len(second.shards) == 2 and len(second.rows) == 4
    assert second.rows["tiny/ieee/ncdhw"] == first.rows["tiny/ieee/ncdhw"]
    assert second.rows["tiny/fp16/ncdhw"].shard == 1 and "compile" not in second.rows["tiny/fp16/ncdhw"].times
    assert run.run(gpu, tiny, arguments(tmp_path, resume=file)) == 0
    assert len(Results.load(file).shards) == 2  # nothing was left

    for other in (
        {"gpu": StandIn("another"), "arguments": arguments(tmp_path, resume=file)},
        {"gpu": gpu, "arguments": arguments(tmp_path, resume=file, kernel="sm80")},
    ):
        with pytest.raises(run.UsageError, match="a table has one of each"):
            run.run(rows=tiny, **other)  # type: ignore[arg-type]


def test_an_older_file_is_kept(tiny: list[Row], tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text("mine")
    run.run(StandIn(), tiny[:1], arguments(tmp_path, compile=False))
    assert (tmp_path / "benchmark.previous.json").read_text() == "mine"


def test_the_time_limit(tiny: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.run(StandIn(), tiny, arguments(tmp_path, time_limit=0.0))
    printed = capsys.readouterr().out
    assert "4 rows are left" in printed and "--resume" in printed


def test_a_wrong_row_has_no_time(tiny: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = convt3d.conv_transpose3d

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = right(*args, **kwargs)
        out[-1, 3, 2, 1, 0] += 1e-3
        return out

    monkeypatch.setattr(convt3d, "conv_transpose3d", wrong)
    assert run.run(StandIn(), tiny[:1], arguments(tmp_path)) == 1
    (result,) = Results.load(tmp_path / "benchmark.json").rows.values()
    assert result.status == WRONG and not result.times
    assert "sample 2" in result.message and "(0, 3, 2, 1, 0)" in result.message


def test_unwritten_outputs_are_wrong(tiny: list[Row]) -> None:
    inputs = measure.draw(tiny[0], "cpu")
    checked = check.check(tiny[0], inputs, lambda x, w, b, a: torch.full_like(a, float("nan")), "cpu")
    assert checked.message.endswith("outputs are nan or infinite") and checked.samples == 0


def test_failures_are_results(tiny: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    result = measure.measure(tiny[0], StandIn(), 0, CEILINGS)
    assert result.times["compile"].failure == "RuntimeError: no compiler"
    assert result.has("convt3d") and not result.has("compile")
    monkeypatch.setattr(convt3d, "conv_transpose3d", broken)
    result = measure.measure(tiny[0], StandIn(), 0, CEILINGS)
    assert (result.status, result.message, result.times) == (FAILED, "RuntimeError: no compiler", {})


def test_inputs_have_the_rows_layout_and_are_fresh(tiny: list[Row]) -> None:
    for row in tiny:
        first, second = measure.draw(row, "cpu"), measure.draw(row, "cpu")
        for name in ("input", "weight", "add"):
            assert first[name].dtype == row.dtype
            assert first[name].is_contiguous(memory_format=row.memory_format)
            assert not torch.equal(first[name], second[name])
        assert measure.ours(row)(*(first[n] for n in ("input", "weight", "bias", "add"))).stride() == (
            first["add"].stride()
        )


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert "NVIDIA GPU" in capsys.readouterr().err
    assert run.main(["--rows", "nothing"]) == 2
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in workloads.ROWS) and "2214.8" in printed


def test_lists_of_the_other_scripts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concatenations and networks: their names, and that they say so where there is no GPU."""
    assert {row.workload.name for row in cat.rows("*")} >= {"nnunet-128-64-d64", "nnunet-320-320-d8"}
    assert {row.mode for row in cat.rows("*/fp16/*")} == {"fp16"}
    monkeypatch.setattr(sys, "argv", ["networks.py", "--list", "--networks", "nnunet*,unetr"])
    assert networks.main() == 0
    assert capsys.readouterr().out.split() == ["nnunet-plain", "nnunet-resenc", "unetr"]
    if not torch.cuda.is_available():
        for script in (cat, networks):
            monkeypatch.setattr(sys, "argv", ["script"])
            assert script.main() == 2
            assert "no NVIDIA GPU" in capsys.readouterr().err


# --- training ----------------------------------------------------------------------------------------------


def test_training_steps(
    tiny: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert training.run(StandIn(), tiny[:3], True, tmp_path) == 0
    rows = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [row.name for row in tiny[:3]]
    for row in rows:
        assert row["status"] == "ok" and set(row["times"]) == {"convt3d", "eager", "compile"}
        assert all(len(timing["runs_ms"]) == 5 for timing in row["times"].values())
        assert row["peak_bytes"] == {"convt3d": 2**30, "eager": 2**30, "compile": 2**30}
        assert 0 < row["errors"]["convt3d"] <= 1.5 * row["errors"]["eager"]
    printed = capsys.readouterr().out
    assert "tiny/ieee/ndhwc" in printed and "1.00" in printed

    right = convt3d.conv_transpose3d
    monkeypatch.setattr(convt3d, "conv_transpose3d", lambda *a, **k: right(*a, **k) * 1.001)
    assert training.run(StandIn(), tiny[:1], False, tmp_path) == 1
    assert "WRONG" in capsys.readouterr().out

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of order")

    monkeypatch.setattr(convt3d, "conv_transpose3d", broken)
    assert training.run(StandIn(), tiny[:1], False, tmp_path) == 1
    assert "FAILED: tiny/ieee/ncdhw: RuntimeError: out of order" in capsys.readouterr().out


def test_training_without_a_gpu_or_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.main([]) == 2
    assert "there is none here" in capsys.readouterr().err
    assert training.main(["--rows", "nothing"]) == 2
    assert "--list" in capsys.readouterr().err
