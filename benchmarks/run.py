# SPDX-License-Identifier: Apache-2.0
"""Measures convt3d, eager PyTorch and torch.compile beside the floor of the GPU; see docs/benchmarks.md.

    python benchmarks/run.py [--rows PATTERN] [--resume FILE] [--time-limit SECONDS] ...

Prints a table, and writes ``benchmark.json`` (after every row) and ``benchmark.png``. Exit status: 0; 1 where
a row is wrong or failed; 2 where nothing could be measured: bad arguments, or no GPU; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import _paths  # noqa: F401 (finds convt3d)
import plot
import report
from convt3d._activations import ACTIVATIONS
from convt3d._native import KERNEL_ENV, native
from convt3d.cli.progress import Progress
from gpu import Gpu
from measure import measure
from results import FAILED, OK, Results, RowResult
from workloads import Row, select


class UsageError(Exception):
    """Nothing was measured, and the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        rows = select(arguments.rows)
        if arguments.activation is not None:
            rows = [row.with_activation(arguments.activation) for row in rows]
        if arguments.list:
            _list(rows)
            return 0
        if not torch.cuda.is_available():
            raise UsageError(
                "this measures an NVIDIA GPU, and there is none that torch can use here "
                "(--list, and plot.py on a stored file, work without one)"
            )
        return run(Gpu(), rows, arguments)
    except (UsageError, ValueError, OSError) as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return 2


def run(gpu: Gpu, rows: Sequence[Row], arguments: argparse.Namespace) -> int:
    """Measures what is missing of ``rows``; returns the exit status.

    Raises:
        UsageError: the file to resume from belongs to another GPU or kernel.
        ValueError, OSError: it cannot be read.
    """
    begin = time.monotonic()
    os.environ[KERNEL_ENV] = arguments.kernel
    results = _results(gpu, arguments)
    pending = results.pending(rows)
    file = arguments.output / "benchmark.json"
    out = report.console()
    if reason := native().reason:
        out.line(f"convt3d's CUDA library is not usable ({reason}): convt3d runs on ATen here")
    interrupted = False
    if pending:
        if file.exists() and (arguments.resume is None or file.resolve() != arguments.resume.resolve()):
            os.replace(file, file.with_suffix(".previous.json"))
        interrupted = _measure(gpu, results, pending, file, arguments, begin)
    else:
        out.line("every row has been measured already")
        results.save(file)
    wanted = {row.name for row in rows}
    shown = [row for row in results.ordered() if row.name in wanted]
    report.show(results, shown, out)
    left = [row.name for row in rows if row.name not in results.rows]
    if left:
        out.line(f"{len(left)} rows are left: the same command with --resume {file} continues")
    out.line(f"results: {file}")
    out.line(plot.draw(results, shown, file.with_suffix(".png")))
    if interrupted:
        return 130
    return 0 if all(row.status == OK for row in shown) else 1


def _results(gpu: Gpu, arguments: argparse.Namespace) -> Results:
    if arguments.resume is None:
        return Results(gpu.name, arguments.kernel)
    results = Results.load(arguments.resume)
    if (results.gpu, results.kernel) != (gpu.name, arguments.kernel):
        raise UsageError(
            f"{arguments.resume} was measured on {results.gpu} with kernel {results.kernel}, and this is "
            f"{gpu.name} with kernel {arguments.kernel}: a table has one of each"
        )
    return results


def _measure(
    gpu: Gpu,
    results: Results,
    pending: Sequence[Row],
    file: Path,
    arguments: argparse.Namespace,
    begin: float,
) -> bool:
    """Adds a shard to ``results``, saved after every row; returns whether it was interrupted."""
    longest = 0.0
    with Progress(len(pending)) as progress:
        try:
            progress.say("measuring the ceilings: a copy, and fp16, bf16 and tf32 matrix products")
            seed = secrets.randbelow(2**31)
            torch.manual_seed(seed)
            ceilings = gpu.ceilings()
            results.shards.append(
                {**gpu.describe(), "kernel": arguments.kernel, "seed": seed, "ceilings": vars(ceilings)}
            )
            for row in pending:
                start = time.monotonic()
                if arguments.time_limit is not None and start - begin + longest > arguments.time_limit:
                    progress.say(f"the next row might pass the limit of {arguments.time_limit:g} s: stopping")
                    return False
                progress.start(row.name)
                shard = len(results.shards) - 1
                result = measure(row, gpu, shard, ceilings, arguments.compile)
                results.rows[row.name] = result
                results.save(file)
                progress.done(_line(result))
                if result.status == FAILED and (reason := _broken(gpu)):
                    progress.say(f"the GPU does not answer any more ({reason}): stopping")
                    return False
                gpu.release()
                longest = max(longest, time.monotonic() - start)
        except KeyboardInterrupt:
            progress.say("interrupted")
            return True
    return False


def _broken(gpu: Gpu) -> str:
    """Why the CUDA context is of no more use, or "" where it is."""
    try:
        gpu.synchronize()
        gpu.release()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _line(result: RowResult) -> str:
    if result.status != OK:
        return f"{result.name}: {result.status.upper()}: {result.message}"
    texts = [
        f"{report.milliseconds(result.times['convt3d'].median_ms)} ms, {result.floor_ratio:.2f} of the floor"
    ]
    for other in ("eager", "compile"):
        speedup = result.speedup(other)
        texts += [] if speedup is None else [f"{speedup:.2f} times {other}"]
    return f"{result.name}: {', '.join(texts)}"


def _list(rows: Sequence[Row]) -> None:
    table = []
    for row in rows:
        byte_count, flops = row.work()
        table.append([row.name, f"{byte_count / 1e6:.1f}", f"{flops / 1e9:.1f}", f"{flops / byte_count:.1f}"])
    report.console().table(f"{len(rows)} rows", ("row", "MB", "GFLOP", "FLOP/byte"), table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="Measures convt3d, eager PyTorch and torch.compile beside the floor of the GPU.",
    )
    add = parser.add_argument
    add("--rows", metavar="PATTERN", help="names or globs, by commas; without a slash they name workloads")
    add(
        "--activation",
        metavar="NAME",
        choices=tuple(ACTIVATIONS),
        help=f"behind every row, instead of its own: {', '.join(ACTIVATIONS)}",
    )
    add("--resume", metavar="FILE", type=Path, help="skip rows that this JSON has already")
    add(
        "--kernel",
        choices=("auto", "sm80", "sm90"),
        default=os.environ.get(KERNEL_ENV) or "auto",
        help=f"kernel family of convt3d (default: {KERNEL_ENV}, or auto)",
    )
    add("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    add("--time-limit", metavar="SECONDS", type=float, help="start no row that might end later")
    add("--output", metavar="DIR", type=Path, default=Path("out/benchmarks"), help="default: %(default)s")
    add("--list", action="store_true", help="print the rows with their bytes and FLOPs; needs no GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
