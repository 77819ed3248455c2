# SPDX-License-Identifier: Apache-2.0
"""Timing of work on a GPU, by a stand-in for CUDA's clock, and what is shown meanwhile."""

from __future__ import annotations

import sys

import pytest
import torch

from convt3d.cli import timing
from convt3d.cli.progress import Progress
from convt3d.cli.timing import CpuTimer, GpuTimer, copy_bandwidth, interleaved, milliseconds


class Gpu:
    """torch.cuda of a GPU with a cache of 50 MB; its clock goes on as its work says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 0.0, 0
        gpu = self

        class Event:
            at: float

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None:
                gpu.waits += 1

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        def wait() -> None:
            gpu.waits += 1

        class Properties:
            L2_cache_size = 50_000_000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_one_call(gpu: Gpu) -> None:
    assert milliseconds(lambda: gpu.work(0.002), "cuda") == pytest.approx(2.0)
    assert gpu.waits == 1


def test_the_cold_cache_is_not_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call follows a flush that its time does not hold; the host waits at the ends alone."""
    timer, flushes = GpuTimer(), []
    monkeypatch.setattr(timer, "flush_cache", lambda: (flushes.append(1), gpu.work(1.0)))
    calls = [lambda: gpu.work(0.003), lambda: gpu.work(0.001), lambda: gpu.work(0.002)]
    assert timer.time(calls, flush=True) == pytest.approx([3.0, 1.0, 2.0])
    assert len(flushes) == 3 and gpu.waits == 2
    assert timer.time(calls, flush=False) == pytest.approx([3.0, 1.0, 2.0])
    assert len(flushes) == 3


def test_what_fits_in_the_cache(gpu: Gpu) -> None:
    timer = GpuTimer()
    assert timer.fits_in_cache(199_999_999) and not timer.fits_in_cache(200_000_000)
    assert not CpuTimer().fits_in_cache(1)


def test_the_flush_reads_one_buffer(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 4096)
    monkeypatch.setattr(GpuTimer, "device", "cpu")
    timer = GpuTimer()
    timer.flush_cache()
    first = timer._flush_buffer
    assert first is not None and first.nbytes == 4096
    timer.flush_cache()
    assert timer._flush_buffer is first


def test_turns_and_counts(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One median for each run, of as many calls as fill the time, taking turns."""
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        gpu.work(seconds)

    monkeypatch.setattr(GpuTimer, "flush_cache", lambda self: gpu.work(0.5))
    shown: list[int] = []
    result = interleaved(
        {"slow": lambda: call("slow", 0.01), "fast": lambda: call("fast", 0.0001)},
        GpuTimer(),
        byte_count=1000,
        runs=3,
        seconds=0.05,
        progress=lambda: shown.append(1),
    )
    assert result["slow"] == pytest.approx([10.0] * 3) and result["fast"] == pytest.approx([0.1] * 3)
    assert len(shown) == 8
    # Six to settle and to estimate; then 0.05 s hold 5 slow ones, and 100 is the most.
    assert order == ["slow"] * 6 + ["fast"] * 6 + (["slow"] * 5 + ["fast"] * 100) * 3


def test_bandwidth_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes read and written by the median."""
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda count, device: rand(count))

    def medians(calls: dict[str, object], device: str, warmup: int, rounds: int) -> dict[str, float]:
        assert device == "cuda" and rounds == 7
        calls["copy"]()  # type: ignore[operator]
        return {"copy": 0.5}

    monkeypatch.setattr(timing, "medians", medians)
    size = 2**18 * 4
    assert copy_bandwidth(rounds=7, gibibytes=2**-10) == pytest.approx(2 * size / 0.5e-3)


def test_a_bar_at_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with Progress(2) as progress:
        progress.start("first")
        progress.done("first: 1 ms [no markup]")
        progress.step()
    out = capsys.readouterr().out
    assert "first: 1 ms [no markup]" in out and "[1/2]" not in out
    assert "2/2" in out


def test_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as progress:
        progress.start("first")
        progress.done("first: 1 ms")
        progress.done("second: 2 ms")
    with Progress(1, quiet=True) as progress:
        progress.stage("timing")
        progress.done("unseen")
    assert capsys.readouterr().out == "[1/2] first: 1 ms\n[2/2] second: 2 ms\ntiming ...\n"
