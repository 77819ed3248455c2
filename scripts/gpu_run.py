# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, side by side in one run, with one summary: for docs/gpu-runs.md.

    python scripts/gpu_run.py                        # on what `make build` or an installed wheel provides
    python scripts/gpu_run.py --bench 'reference/*'  # benchmarks too: on a second GPU, or behind the tests
    python scripts/gpu_run.py --only 'pytest*,cpp*'  # some of the parts; --list names them

CI has no GPU, so this is run by hand. The tests share one GPU and many processor cores; a part that hangs is
stopped by its limit and counts as failed. Each part's output is in PART.txt, the summary in summary.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "python"
# Files that look at what was built or at the sources; no test of theirs needs a GPU.
WITHOUT_GPU = {"test_build_scripts", "test_docs", "test_library", "test_sass", "test_tables", "test_wheel"}
# Of the larger programs: a sanitizer is a hundred times slower.
SANITIZED = {
    "forward": "All/Forward.ReferenceWorkloadReduced/*:All/Forward.WideLayers/*",
    "small": "All/Small.Values/*",
    "product": "All/Product.Tiles/*:All/Product.Channels/*",
}
# racecheck follows each access to shared memory. It does not see the order that __syncwarp makes, on which
# the sm90 family's rings rely from their second lap on (docs/gpu-runs.md, 2026-11-30).
RACECHECKED = SANITIZED | {
    "forward": "All/Forward.ReferenceWorkloadReduced/*:All/Forward.FewCtas/sm80*",
    "columns": "All/Columns.Tiles/*:All/Columns.LayoutsOfXAndY/*:All/Columns.Parts/*",
}
LAST_WORDS = re.compile(r"\d+ (?:passed|failed|errors?)|SUMMARY|PASSED|FAILED|of \d+ cases|rows? ")


@dataclass
class Part:
    """One process of the run.

    Attributes:
        gpus: its CUDA_VISIBLE_DEVICES.
        limit: seconds until it is stopped.
    """

    name: str
    command: Sequence[str]
    limit: float
    gpus: str = "0"
    status: int | None = None
    seconds: float = 0.0
    env: dict[str, str] = field(default_factory=dict)

    def run(self, out: Path) -> None:
        start = time.monotonic()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": self.gpus, "PYTHONDONTWRITEBYTECODE": "1", **self.env}
        with (out / f"{self.name}.txt").open("w") as log:
            process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            try:
                self.status = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own children too
                process.wait()
                self.status = -signal.SIGKILL
        self.seconds = time.monotonic() - start

    def outcome(self, out: Path) -> str:
        """What it says last of how many passed, and whether its limit or its status says otherwise."""
        lines = (out / f"{self.name}.txt").read_text(errors="replace").splitlines()
        said = [line.strip(" =[]") for line in lines if LAST_WORDS.search(line)]
        words = said[-1] if said else (lines[-1] if lines else "no output")
        if self.status == -signal.SIGKILL:
            return f"stopped after {self.limit:.0f} s: {words}"
        return words if self.status == 0 else f"FAILED (status {self.status}): {words}"


def shards() -> dict[str, list[str]]:
    """The Python tests in parts of similar length."""
    files = {path.stem: str(path) for path in sorted(TESTS.glob("test_*.py"))}
    parts = {
        "accuracy": ["test_gpu_accuracy"],
        "reference": ["test_gpu_reference", "test_gpu_nonfinite", "test_gpu_reports", "test_inductor"],
        "gradients": ["test_gradient_accuracy", "test_gpu_activation_backward", "test_gpu_training"],
        "runtime": ["test_gpu_runtime", "test_gpu_memory"],
        "graphs": ["test_graphs_under_autocast"],
        "harness": ["test_kernelbench", "test_cat_gpu"],
        "devices": ["test_gpu_two_devices"],
    }
    named = {name for names in parts.values() for name in names} | WITHOUT_GPU | {"test_differential"}
    parts["others"] = [name for name in files if name not in named]
    return {part: [files[name] for name in names if name in files] for part, names in parts.items()}


def all_parts(binaries: Path, seed: int, gpu_count: int) -> list[Part]:
    python = sys.executable
    every = ",".join(str(i) for i in range(gpu_count))
    parts = [
        Part(
            f"pytest-{name}",
            [python, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files],
            limit=400,
            gpus=every if name == "devices" else "0",
        )
        for name, files in shards().items()
    ]
    differential = [python, str(TESTS / "differential.py"), "--device", "cuda", "--seed", str(seed)]
    parts.append(Part("differential", [*differential, "--cases", "3000", "--jobs", "6"], limit=300))
    programs = {path.name[5:-4]: str(path) for path in sorted(binaries.glob("test_*_gpu"))}
    for name, program in programs.items():
        parts.append(Part(f"cpp-{name}", [program, "--gtest_brief=1"], limit=300))
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is not None:
        for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
            options = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "3"]
            filters = RACECHECKED if tool == "racecheck" else SANITIZED
            for name, program in programs.items():
                command = [*options, program, "--gtest_brief=1", f"--gtest_filter={filters.get(name, '*')}"]
                parts.append(Part(f"{tool}-{name}", command, limit=400))
    return parts


def bench_part(rows: str, out: Path, gpu: int) -> Part:
    program = str(ROOT / "benchmarks" / "run.py")
    command = [sys.executable, program, "--rows", rows, "--output", str(out.resolve() / "bench")]
    return Part("bench", command, limit=600, gpus=str(gpu))


def run_together(parts: Iterable[Part], out: Path) -> None:
    parts = list(parts)
    threads = [threading.Thread(target=part.run, args=(out,)) for part in parts]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        waiting = [part.name for part in parts if part.status is None]
        line = f"{len(parts) - len(waiting)}/{len(parts)} parts, {time.monotonic() - start:.0f} s"
        if sys.stderr.isatty():
            print(f"\r{line}: {', '.join(waiting)[:90]:<90}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def summary(parts: Sequence[Part], out: Path) -> str:
    rows = [f"| {p.name} | {p.outcome(out)} | {p.seconds:.0f} |" for p in parts]
    return "\n".join(["| part | result | s |", "|---|---|---|", *rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Everything that needs a GPU, side by side.")
    parser.add_argument("--binaries", type=Path, default=ROOT / "build" / "native" / "tests" / "cpp")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "gpu-run", help="default: out/gpu-run")
    parser.add_argument("--only", metavar="PATTERNS", help="names or globs of parts, by commas")
    parser.add_argument("--bench", metavar="ROWS", help="measure these rows of benchmarks/run.py, too")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="of the random calls")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    options = parser.parse_args(arguments)
    import torch

    gpu_count = torch.cuda.device_count()
    patterns = (options.only or "*").split(",")
    parts = [
        part
        for part in all_parts(options.binaries, options.seed, max(gpu_count, 1))
        if any(fnmatchcase(part.name, pattern) for pattern in patterns)
    ]
    if options.list:
        print("\n".join(part.name for part in parts))
        return 0
    if not parts:
        parser.error(f"no part is named {options.only}")
    if gpu_count == 0:
        parser.error("there is no NVIDIA GPU that torch can use")
    options.output.mkdir(parents=True, exist_ok=True)
    bench = [bench_part(options.bench, options.output, min(gpu_count - 1, 1))] if options.bench else []
    if gpu_count > 1:
        run_together([*parts, *bench], options.output)
    else:  # a shared GPU gives no figures
        run_together(parts, options.output)
        run_together(bench, options.output)
    text = summary([*parts, *bench], options.output)
    (options.output / "summary.md").write_text(text)
    print(text)
    return 0 if all(part.status == 0 for part in [*parts, *bench]) else 1


if __name__ == "__main__":
    sys.exit(main())
