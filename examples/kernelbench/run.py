# SPDX-License-Identifier: Apache-2.0
"""Checks and times the two ModelNew files by KernelBench's rules.

    python examples/kernelbench/run.py                   # both; about two minutes with the compilation
    python examples/kernelbench/run.py --only package

The rules: both models are built under the same seed; five trials of fresh inputs, each under a seed of its
own, must agree with allclose(atol=1e-4, rtol=1e-4); time is the mean over trials of GPU events around a call,
after warm-up, with the L2 cache overwritten before each. PyTorch's settings stay as it ships them (TF32).
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from convt3d import reference

HERE = Path(__file__).resolve().parent
FILES = {"package": HERE / "model_new_package.py", "inline": HERE / "model_new_inline.py"}
SEED = 42
CPU_BATCH = 4  # the problem's 128 would take minutes for each of five trials
CORRECTNESS_TRIALS = 5
TOLERANCE = 1e-4


def load(path):
    """The ModelNew class of a file, which is executed as the harness executes it."""
    namespace = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["ModelNew"]


def seed(value):
    torch.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(value)


def build(model_class, device):
    """A model under the seed that every model is built under."""
    seed(SEED)
    return model_class(*reference.get_init_inputs()).to(device)


def inputs(device, batch):
    return [tensor.to(device) for tensor in reference.get_inputs(batch)]


def check(ours, theirs, device, batch):
    """Largest difference over five trials of fresh inputs, and how many of them agreed."""
    seed(SEED)
    seeds = [int(s) for s in torch.randint(0, 2**32 - 1, (CORRECTNESS_TRIALS,))]
    worst, good = 0.0, 0
    for trial in seeds:
        seed(trial)
        args = inputs(device, batch)
        expected, result = theirs(*args), ours(*args)
        if result.shape != expected.shape:
            raise AssertionError(f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
        good += torch.allclose(result, expected, atol=TOLERANCE, rtol=TOLERANCE)
        worst = max(worst, float((result - expected).abs().max()))
    return worst, good


def time(model, device, trials, batch):
    """Milliseconds of each trial."""
    seed(SEED)
    args = inputs(device, batch)
    for _ in range(5):
        model(*args)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    overwritten = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    times = []
    for _ in range(trials):
        overwritten.fill_(42)
        torch.cuda.synchronize()
        begin.record()
        model(*args)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(FILES), help="one of the two files")
    parser.add_argument("--trials", type=int, default=100, help="timed calls of each model (100)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: correctness alone")
    parser.add_argument("--batch", type=int, help=f"{reference.BATCH}, the problem's; on a CPU {CPU_BATCH}")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args(argv)
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU that torch can use: --device cpu checks the package's file alone.")
        return 2
    batch = arguments.batch or (reference.BATCH if device == "cuda" else CPU_BATCH)
    chosen = [arguments.only] if arguments.only else list(FILES) if device == "cuda" else ["package"]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"KernelBench level 2, problem 26, batch {batch}, on {name}, torch {torch.__version__}")
    if batch != reference.BATCH:
        print(f"(the problem's batch is {reference.BATCH}: --batch {reference.BATCH})")
    record, failed = {"device": name, "torch": torch.__version__, "batch": batch}, False
    with torch.no_grad():
        theirs = build(reference.Model, device)
        for label in chosen:
            ours = build(load(FILES[label]), device)
            worst, good = check(ours, theirs, device, batch)
            failed = failed or good < CORRECTNESS_TRIALS
            record[label] = {"trials_that_agree": good, "max_difference": worst}
            text = f"{label}: {good} of {CORRECTNESS_TRIALS} trials agree, largest difference {worst:.1e}"
            if device == "cuda":
                record[label]["ms"] = time(ours, device, arguments.trials, batch)
                text += f", {statistics.mean(record[label]['ms']):.3f} ms"
            print(text, flush=True)
        if device == "cuda":
            record["eager"] = {"ms": time(theirs, device, arguments.trials, batch)}
            eager = statistics.mean(record["eager"]["ms"])
            print(f"PyTorch eager: {eager:.3f} ms")
            for label in chosen:
                print(f"{label}: {eager / statistics.mean(record[label]['ms']):.2f} times as fast")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
