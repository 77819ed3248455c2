# SPDX-License-Identifier: Apache-2.0
"""Results as they are kept: the JSON file, resuming from it, and what is derived from its times."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from floor import Ceilings
from workloads import ROWS, Row

SCHEMA = 1
LEAD = 1.03
"""Faster means at least 3 % ahead on the medians; less is a draw."""

OK, WRONG, FAILED = "ok", "wrong", "failed"


@dataclass
class Timing:
    """One contestant in one row.

    Attributes:
        runs_ms: the median of each run, milliseconds of GPU time per call.
        calls: timed calls in each run.
        host_us: median host time until a call returns, microseconds; small rows only.
        failure: why it did not run; then the rest is empty.
    """

    runs_ms: list[float] = field(default_factory=list)
    calls: int = 0
    host_us: float | None = None
    failure: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.runs_ms)

    @property
    def spread(self) -> float:
        """(slowest run - fastest run) / median."""
        return (max(self.runs_ms) - min(self.runs_ms)) / self.median_ms

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.failure:
            data |= {"median_ms": self.median_ms, "spread": self.spread}
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Timing:
        return Timing(data["runs_ms"], data["calls"], data["host_us"], data["failure"])


@dataclass
class RowResult:
    """One row.

    Attributes:
        status: "ok"; "wrong" (the result does not agree with float64) or "failed" (convt3d raised): no times.
        message: what went wrong.
        shard: the index of the run that measured it, whose ceilings the floor is computed from.
        path, refused: as ``convt3d.explain`` says them for these very tensors.
        max_abs_error: against float64, over the samples of the batch that were checked.
        bound_share: the largest part of the accuracy bound that an output used; 1 is the limit.
        times: by contestant: convt3d, eager, compile, and in small rows conv (eager's convolution alone).
    """

    name: str
    shard: int
    status: str = OK
    message: str = ""
    path: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    flops: int = 0
    floor_ms: float = 0.0
    floor_bound: str = ""
    max_abs_error: float | None = None
    bound_share: float | None = None
    samples_checked: int = 0
    input_sets: int = 0
    l2_flushed: bool = False
    times: dict[str, Timing] = field(default_factory=dict)

    def has(self, contestant: str) -> bool:
        return contestant in self.times and not self.times[contestant].failure

    @property
    def floor_ratio(self) -> float | None:
        """convt3d's time over the floor."""
        return self.times["convt3d"].median_ms / self.floor_ms if self.has("convt3d") else None

    def speedup(self, over: str) -> float | None:
        """How many times faster convt3d is than another contestant."""
        if not self.has("convt3d") or not self.has(over):
            return None
        return self.times[over].median_ms / self.times["convt3d"].median_ms

    def achieved(self, contestant: str) -> float | None:
        """FLOPs per second."""
        return self.flops / (self.times[contestant].median_ms * 1e-3) if self.has(contestant) else None

    def to_json(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name != "times"}
        data["times"] = {name: timing.to_json() for name, timing in self.times.items()}
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> RowResult:
        times = {name: Timing.from_json(timing) for name, timing in data["times"].items()}
        return RowResult(**{**data, "times": times})


def verdict(speedup: float | None) -> str:
    """ "faster", "level" or "slower", at 3 %; "" where there is nothing to compare."""
    if speedup is None:
        return ""
    if speedup >= LEAD:
        return "faster"
    return "slower" if speedup <= 1 / LEAD else "level"


@dataclass
class Results:
    """Everything in one JSON file.

    Attributes:
        gpu: its name; shards of one file come from one kind of GPU.
        kernel: what CONVT3D_KERNEL said.
        shards: one record for each run of the command: date, versions, ceilings.
        rows: by name.
    """

    gpu: str
    kernel: str
    shards: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, RowResult] = field(default_factory=dict)

    def ceilings(self, shard: int) -> Ceilings:
        return Ceilings(**self.shards[shard]["ceilings"])

    def pending(self, rows: Iterable[Row]) -> list[Row]:
        """Those that have no good result yet."""
        return [row for row in rows if row.name not in self.rows or self.rows[row.name].status != OK]

    def ordered(self) -> list[RowResult]:
        """In the table's order; rows that the table no longer has come last."""
        order = {row.name: index for index, row in enumerate(ROWS)}
        return sorted(self.rows.values(), key=lambda result: order.get(result.name, len(order)))

    def save(self, path: Path) -> None:
        """Whole or not at all: an interrupted run leaves the file of the row before."""
        data = {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "kernel": self.kernel,
            "shards": self.shards,
            "rows": [result.to_json() for result in self.ordered()],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> Results:
        """Raises:
        ValueError: not a file of results, or of another schema.
        OSError: no such file.
        """
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise ValueError(f"{path} has schema {data['schema']}, and this program reads {SCHEMA}")
            rows = [RowResult.from_json(row) for row in data["rows"]]
            return Results(data["gpu"], data["kernel"], data["shards"], {row.name: row for row in rows})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} does not hold benchmark results: {error!r}") from error
