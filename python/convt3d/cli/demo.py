# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d demo``: the reference network through convt3d and through PyTorch, side by side."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._explain import explain
from .._precision import conv_fp32_switch
from ..modules import ModelNew
from ..reference import BATCH, Model, get_init_inputs, get_inputs
from .console import Console
from .picture import ON_A_CPU, save_picture
from .timing import copy_bandwidth, medians

_REFERENCE_CHUNK = 8  # samples at a time in float64


@dataclass
class Candidate:
    """One way to run the network.

    Attributes:
        precision: what PyTorch's switch says while it runs.
        path: as ``explain`` names it; "-" for PyTorch's own.
        skipped: why it was not run; empty if it was.
    """

    name: str
    call: Callable[[], Tensor]
    precision: str
    path: str = "-"
    milliseconds: float = float("nan")
    max_error: float = float("nan")
    errors: Tensor | None = None
    skipped: str = ""


def demo(
    console: Console, output: Path, device: str = "auto", batch: int | None = None, seed: int | None = None
) -> int:
    """Runs the demo; returns 0, or 1 where a result is wrong or the device is not there.

    Args:
        output: folder for ``demo.png``, made if missing.
        device: "auto", "cpu" or "cuda".
        batch: samples; the whole workload (128) on a GPU and 2 on a CPU if None.
        seed: of weights and inputs; a new one if None.
    """
    on_gpu = torch.cuda.is_available()
    if device == "cuda" and not on_gpu:
        console.line("There is no GPU that torch can use; `python -m convt3d info` says more.")
        return 1
    device = ("cuda" if on_gpu else "cpu") if device == "auto" else device
    batch = batch or (BATCH if device == "cuda" else 2)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.line(
        f"KernelBench level 2, problem 26: ConvTranspose3d + add + t * hardswish(t), batch {batch}, fp32"
    )
    console.line(f"on {_device_name(device)}, seed {seed}")
    if device == "cpu":
        console.line("Skipped for want of a GPU: CUDA kernels, byte floor, torch.compile; batch reduced.")

    with torch.no_grad():
        console.step("drawing weights and inputs")
        torch.manual_seed(seed)
        model = Model(*get_init_inputs()).to(device)
        torch.manual_seed(seed)
        ours = ModelNew(*get_init_inputs()).to(device)
        x, add = (tensor.to(device) for tensor in get_inputs(batch, uniform=False))
        console.step("computing the float64 reference")
        reference = _reference(model, x, add)
        candidates = _candidates(model, ours, x, add, device)
        for candidate in candidates:
            console.step(f"running {candidate.name}")
            _check(candidate, reference, device)
        console.step("timing")
        _time(candidates, device)
        bandwidth = copy_bandwidth() if device == "cuda" else None

    explanation = _explain(ours, x, add, "default", bandwidth)
    _print_table(console, candidates, explanation.floor_seconds)
    if bandwidth is not None and explanation.floor_seconds is not None:
        console.line(
            f"byte floor: {explanation.bytes:,} bytes at {bandwidth / 1e12:.2f} TB/s "
            f"(a large copy, measured now) = {explanation.floor_seconds * 1e3:.3f} ms"
        )
    if device == "cpu":
        console.line(ON_A_CPU)
    for candidate in candidates:
        if candidate.skipped:
            console.line(f"{candidate.name} was skipped: {candidate.skipped}")
    picture = save_picture(candidates, output, _device_name(device), batch, explanation.floor_seconds)
    console.line(picture)
    return _verdict(console, candidates)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _reference(model: nn.Module, x: Tensor, add: Tensor) -> Tensor:
    """The network's result in float64, computed in chunks to bound the memory."""
    double = copy.deepcopy(model).double()
    out = torch.empty_like(add, dtype=torch.float64)
    for start in range(0, x.shape[0], _REFERENCE_CHUNK):
        part = slice(start, start + _REFERENCE_CHUNK)
        out[part] = double(x[part].double(), add[part].double())
    return out


def _explain(model: ModelNew, x: Tensor, add: Tensor, precision: str, bandwidth: float | None) -> Any:
    conv = model.conv_transpose
    return explain(
        x,
        conv.weight,
        conv.bias,
        conv.stride,
        conv.padding,  # type: ignore[arg-type]
        conv.output_padding,
        add=add,
        activation=conv.activation,
        precision=None if precision == "default" else precision,
        bandwidth=bandwidth,
    )


def _candidates(model: nn.Module, ours: ModelNew, x: Tensor, add: Tensor, device: str) -> list[Candidate]:
    path = partial(_explain, ours, x, add, bandwidth=None)
    if device == "cpu":
        return [
            Candidate("PyTorch", lambda: model(x, add), "default"),
            Candidate("convt3d", lambda: ours(x, add), "default", path("default").path),
        ]
    compiled = torch.compile(model)
    rows = []
    for precision in ("tf32", "ieee"):
        rows += [
            Candidate(f"PyTorch eager, {precision}", lambda: model(x, add), precision),
            Candidate(f"torch.compile, {precision}", lambda: compiled(x, add), precision),
            Candidate(f"convt3d, {precision}", lambda: ours(x, add), precision, path(precision).path),
        ]
    return rows


def _run(candidate: Candidate, device: str) -> Tensor:
    with conv_fp32_switch(candidate.precision, device):
        return candidate.call()


def _check(candidate: Candidate, reference: Tensor, device: str) -> None:
    try:
        result = _run(candidate, device)
    except Exception as error:
        if candidate.name.startswith("convt3d"):
            raise
        # torch.compile needs a compiler and Triton; the demo goes on without it.
        candidate.skipped = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        return
    step = max(1, reference.numel() // 2_000_000)
    candidate.max_error = max(
        float((ours.double() - exact).abs().max()) for ours, exact in zip(result, reference, strict=True)
    )
    candidate.errors = (result.flatten()[::step].double() - reference.flatten()[::step]).abs().cpu()


def _time(candidates: list[Candidate], device: str) -> None:
    warmup, rounds = (5, 30) if device == "cuda" else (1, 7)
    # The switch stays out of the timed calls: one group of candidates for each setting.
    for precision in dict.fromkeys(candidate.precision for candidate in candidates):
        group = {c.name: c.call for c in candidates if c.precision == precision and not c.skipped}
        with ExitStack() as stack:
            stack.enter_context(conv_fp32_switch(precision, device))
            for name, value in medians(group, device, warmup, rounds).items():
                next(c for c in candidates if c.name == name).milliseconds = value


def _print_table(console: Console, candidates: list[Candidate], floor: float | None) -> None:
    columns = ["what", "path", "max abs error", "ms", "speed against eager"]
    if floor is not None:
        columns.append("time / byte floor")
    rows = []
    eager: dict[str, float] = {}
    for c in candidates:
        eager.setdefault(c.precision, c.milliseconds)
        if c.skipped:
            rows.append([c.name, c.path, *["-"] * (len(columns) - 2)])
            continue
        row = [
            c.name,
            c.path,
            f"{c.max_error:.2e}",
            f"{c.milliseconds:.3f}",
            f"{eager[c.precision] / c.milliseconds:.2f}x",
        ]
        if floor is not None:
            row.append(f"{c.milliseconds * 1e-3 / floor:.2f}")
        rows.append(row)
    console.table("against float64, normal inputs", columns, rows)


def _verdict(console: Console, candidates: list[Candidate]) -> int:
    """Fails where convt3d is further from float64 than its contract allows."""
    wrong = []
    for ours in (c for c in candidates if c.name.startswith("convt3d")):
        theirs = next(c for c in candidates if c.precision == ours.precision and c is not ours)
        # ieee: the contract's own bound. Otherwise both round the same operands, and differ in the sums only.
        limit = 2e-5 if ours.precision in ("ieee", "default") else theirs.max_error + 2e-5
        if not ours.max_error <= limit:
            wrong.append(f"{ours.name}: max abs error {ours.max_error:.2e} exceeds {limit:.2e}")
    for text in wrong:
        console.line(f"WRONG: {text}")
    if not wrong:
        console.line("Results agree with float64 within the stated accuracy.")
    return int(bool(wrong))
