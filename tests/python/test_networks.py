# SPDX-License-Identifier: Apache-2.0
"""benchmarks/networks.py: how networks before and after are compiled, timed in turns and shown."""

from __future__ import annotations

import fcntl
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import convt3d
import networks
import pairs
from gpu import Call


def test_cells_of_a_network() -> None:
    result = {
        "fused": 2, "transposed_convolutions": 3, "share": 0.123, "fp32_difference": 2e-6,
        "ms": {"fp16": (3.0, 2.0)},
    }  # fmt: skip
    cells = networks.cells("net", result)
    assert len(cells) == len(networks.COLUMNS) and "3.00 → 2.00 (1.50)" in cells and "12 %" in cells
    assert networks.cells("net", {**result, "wrong": "differs"})[-1] == "differs"
    compiled = networks.cells("net", {"ms": {"fp16-compiled": (3.0, 2.0)}})
    assert len(compiled) == len(cells) and "3.00 → 2.00 (1.50)" in compiled
    assert networks.difference([torch.tensor([2.0, 4.5])], [torch.tensor([2.0, 5.0])]) == pytest.approx(0.1)


def test_errors_under_autocast_are_of_three_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is off by a quarter in every second output, and one that is off by an eighth in all."""
    drawn: list[torch.Tensor] = []

    def args(device: str) -> tuple[torch.Tensor]:
        drawn.append(torch.full((4,), 1.0 + len(drawn)))
        return (drawn[-1],)

    class Off(torch.nn.Module):
        def __init__(self, by: list[float]) -> None:
            super().__init__()
            self.by = torch.tensor(by)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (x.max() * self.by if under[0] == "fp16" else 0.0)

    under = [""]

    def mode(name: str) -> Any:
        under[0] = name
        return torch.no_grad()

    monkeypatch.setattr(networks, "mode", mode)
    network = networks.Network(make=torch.nn.Identity, args=args)
    first = args("cpu")
    nets = (Off([0.25, 0.0, 0.25, 0.0]), Off([0.125] * 4))
    errors = networks._fp16_errors(network, nets, [(first, [first[0]])])
    assert len(drawn) == 3
    expected = {"before": 0.25, "before_rms": 0.25 / 2**0.5, "after": 0.125, "after_rms": 0.125}
    assert errors == pytest.approx(expected)


def test_networks_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that runs ever slower: the difference of neighbours is what it should be."""
    clock, passes = [0.0], []

    class Turns:
        def synchronize(self) -> None:
            clock[0] += passes[-1][1] if passes else 0.0  # the GPU's part

        def time_behind(self, call: Call, milliseconds: float) -> float:
            call()
            assert milliseconds > 2 * 1e3 * passes[-1][0]
            return 1e3 * passes[-1][1]

    def network(host: float, gpu: float) -> Call:
        def run() -> None:
            passes.append((host, gpu))
            clock[0] += host * (1 + len(passes) / 100)

        return run

    clocks = SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic)
    monkeypatch.setattr(pairs, "time", clocks)
    turns: Any = Turns()
    taken = pairs.time_pairs(turns, network(0.010, 0.004), network(0.008, 0.005), seconds=0.0)
    assert len(taken.wall.pairs) == len(taken.gpu.pairs) == pairs.FEWEST
    (gain, error), (gpu_gain, gpu_error) = taken.host.gain, taken.gpu.gain
    assert taken.host.before > taken.host.after and 2.0 < gain < 3.0 and 0 < error < 0.2
    assert (gpu_gain, gpu_error) == pytest.approx((-1.0, 0.0), abs=1e-9)
    assert taken.wall.gain[0] == pytest.approx(gain - 1.0, abs=0.2)


def test_one_process_measures_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with networks.turn(lock), lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with networks.turn(None):
        pass


def test_compiled_networks_are_compiled_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a graph from a cache would not be counted."""
    model = torch.nn.Sequential(torch.nn.ConvTranspose3d(2, 3, 2, 2), torch.nn.ReLU()).eval()
    monkeypatch.setattr(networks, "mode", lambda name: torch.no_grad())
    real = convt3d.enable_inductor
    monkeypatch.setattr(convt3d, "enable_inductor", lambda: real("cpu"))
    x = torch.randn(1, 2, 3, 3, 3)
    for _ in range(2):
        nets, fused = networks._compiled(model, (x,), "fp32-compiled")
        assert fused == 1
        with torch.no_grad():
            for net in nets:
                assert networks.difference([net(x)], [model(x)]) < 1e-6
