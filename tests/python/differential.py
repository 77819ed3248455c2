# SPDX-License-Identifier: Apache-2.0
"""Random calls, valid and invalid, against float64 and against eager PyTorch.

    python tests/python/differential.py --cases 3000 --device cuda --seed 7
    python tests/python/differential.py --device cuda --replay 7:1234        # one case of that run again

A valid call is judged in every output by itself (accuracy.py), in strides, type and aliasing, in the
gradients that it asks for, and in leaving its inputs alone. An invalid one raises the class of error that
eager PyTorch raises, and leaves everything as it was.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _source_tree  # noqa: F401 (finds convt3d)
from accuracy import judge, mode_of
from cases import Case, Tensors
from convt3d import conv_transpose3d, explain
from convt3d._accuracy import slope
from convt3d._activations import ACTIVATIONS
from convt3d._memory_format import as_memory_format, output_is_channels_last
from convt3d._precision import resolve_precision, round_to_tf32
from forms import operator, run
from random_calls import DEFECTS, Call, broken_arguments, random_call

# Where an activation's slope jumps; there a rounded pre-activation may have either slope.
KINKS = {"relu": (0.0,), "leaky_relu": (0.0,), "hardswish": (-3.0, 3.0), "x_hardswish": (-3.0, 3.0)}


@dataclass(frozen=True)
class GradientBound:
    """``|g - g64| <= share * (the sum of the terms' absolute values)``; none within ``near`` of a kink."""

    share: float
    near: float


GRADIENTS = {
    "float64": GradientBound(1e-12, 1e-9),
    "ieee": GradientBound(2e-5, 1e-4),
    "tf32": GradientBound(1e-2, 3e-2),
    "float16": GradientBound(5e-3, 3e-2),
    "bfloat16": GradientBound(4e-2, 2e-1),
}


# What eager answers in several ways, by device, type and batch; an empty batch, say, skips its checks.
EAGER_VARIES = ("bias-device", "weight-sparse", "weight-empty", "input-empty", "padding-overflow")


class Fault(AssertionError):
    """What is wrong with a result."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Fault(what)


# --- the surroundings of a call ---


@contextmanager
def surroundings(call: Call, device: str) -> Iterator[None]:
    """The settings of the process that the call asks for; all of them are put back."""
    conv = torch.backends.cudnn.conv
    kernel, switch = os.environ.get("CONVT3D_KERNEL"), conv.fp32_precision
    deterministic = torch.are_deterministic_algorithms_enabled()
    os.environ["CONVT3D_KERNEL"] = call.kernel
    conv.fp32_precision = call.switch
    if call.poison:
        # In this mode torch fills what it allocates with nan.
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if call.context == "no_grad":
                stack.enter_context(torch.no_grad())
            elif call.context == "inference":
                stack.enter_context(torch.inference_mode())
            elif call.context == "autocast":
                stack.enter_context(torch.autocast(device, dtype=call.autocast))
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        conv.fp32_precision = switch
        if kernel is None:
            del os.environ["CONVT3D_KERNEL"]
        else:
            os.environ["CONVT3D_KERNEL"] = kernel


# --- valid calls ---


def check_valid(call: Call, device: str) -> str:
    """Runs and judges the call; returns the path that it took."""
    tensors = call.make(device)
    wanted = [
        t.detach().requires_grad_(want) if t is not None and t.is_floating_point() else t
        for t, want in zip(vars(tensors).values(), call.wants, strict=True)
    ]
    given = Tensors(*wanted)  # type: ignore[arg-type]
    copies = [t.detach().clone() for t in given.present()]
    case = call.case
    arguments = {**case.arguments(), "add": given.add}
    with surroundings(call, device):
        path = explain(given.input, given.weight, given.bias, **arguments).path
        out = run(call.form, given.input, given.weight, given.bias, **arguments)
        if path in ("sm80", "sm90", "cpu"):
            again = run("eager", given.input, given.weight, given.bias, **arguments)
            require(torch.equal(again, out), "two calls gave different bits")
        tf32 = resolve_precision(case.precision or "default", device) == "tf32"
    if call.context == "autocast" and case.dtype.is_floating_point and case.dtype != torch.float64:
        case = replace(case, dtype=call.autocast)
    for tensor, copy in zip(given.present(), copies, strict=True):
        require(torch.equal(tensor, copy), "an input was written")
        require(not _overlap(tensor, out), "the result shares an input's memory")
    _check_strides(call, case, given, out)
    _check_values(call, case, given, out, path, tf32)
    wants_grad = (
        torch.is_grad_enabled()
        and call.context in ("", "autocast")
        and any(t.requires_grad for t in given.present())
    )
    require(out.requires_grad == wants_grad, f"requires_grad is {out.requires_grad}")
    if wants_grad:
        with surroundings(replace(call, context=""), device):
            _check_gradients(call, case, given, out, tf32)
    return path


def _overlap(a: Tensor, b: Tensor) -> bool:
    return b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _check_strides(call: Call, case: Case, t: Tensors, out: Tensor) -> None:
    x, w = t.input if call.batched else t.input.unsqueeze(0), t.weight
    shape = case.output_shape()
    memory_format = as_memory_format(output_is_channels_last(x.to(case.dtype), w.to(case.dtype)))
    like = torch.empty(shape, device="meta", memory_format=memory_format)
    like = like if call.batched else like.squeeze(0)
    require(out.dtype == case.dtype, f"type {out.dtype}, not {case.dtype}")
    require(out.shape == like.shape, f"shape {tuple(out.shape)}, not {tuple(like.shape)}")
    require(out.stride() == like.stride(), f"strides {out.stride()}, not {like.stride()}")


def _on_cpu(call: Call, t: Tensors, dtype: torch.dtype) -> Tensors:
    """The operands as the operator sees them, dense and batched, on the CPU."""
    moved = [None if x is None else x.detach().to(dtype).cpu().contiguous().clone() for x in vars(t).values()]
    if not call.batched:
        assert moved[0] is not None
        moved[0] = moved[0].unsqueeze(0)
    return Tensors(*moved)  # type: ignore[arg-type]


def _check_values(call: Call, case: Case, given: Tensors, out: Tensor, path: str, tf32: bool) -> None:
    result = out.detach().cpu() if call.batched else out.detach().cpu().unsqueeze(0)
    operands = _on_cpu(call, given, case.dtype)
    if case.dtype.is_floating_point:
        verdict = judge(case, operands, result, mode_of(case, tf32, path))
        require(not verdict.failure, verdict.failure)
        return
    wide = torch.complex128 if case.dtype.is_complex else torch.int64
    t = _preactivation(case, *(None if x is None else x.to(wide) for x in vars(operands).values()))
    y = ACTIVATIONS[case.activation].forward(t, 0.0)
    if case.add_order == "after" and operands.add is not None:
        y = y + operands.add
    if case.dtype.is_complex:
        require(
            torch.allclose(result.to(wide), y, rtol=1e-4, atol=1e-4), "complex values differ from eager's"
        )
    else:
        require(torch.equal(result, y), "integer values differ from eager's")


def _preactivation(case: Case, x: Any, w: Any, b: Any, add: Any) -> Tensor:
    t = F.conv_transpose3d(x, w, b, **case.conv_arguments())
    return t if add is None or case.add_order == "after" else t + add


def _check_gradients(call: Call, case: Case, given: Tensors, out: Tensor, tf32: bool) -> None:
    """Each gradient, element by element, against float64 relative to the sum of its terms' sizes."""
    mode = str(case.dtype)[6:] if case.dtype != torch.float32 else "tf32" if tf32 else "ieee"
    bound = GRADIENTS[mode]
    operands = _on_cpu(call, given, case.dtype)
    if tf32 and case.dtype == torch.float32:
        operands = replace(
            operands, input=round_to_tf32(operands.input), weight=round_to_tf32(operands.weight)
        )
    leaves = [None if t is None else t.double().requires_grad_() for t in vars(operands).values()]
    t = _preactivation(case, *leaves)
    y = ACTIVATIONS[case.activation].forward(t, case.negative_slope)
    if case.add_order == "after" and leaves[3] is not None:
        y = y + leaves[3]
    generator = torch.Generator().manual_seed(len(call.seed))
    cotangent = torch.randn(y.shape, generator=generator).to(case.dtype).double()
    for kink in KINKS.get(case.activation, ()):
        cotangent = torch.where((t.detach() - kink).abs() < bound.near, 0.0, cotangent)
    present = [leaf for leaf in leaves if leaf is not None]
    exact = torch.autograd.grad(y, present, cotangent)
    # The same sums of absolute values. Where a slope is nearly zero its error is not.
    steep = slope(case.activation, case.add_order == "after", t.detach(), torch.zeros_like(t)) + 1
    sizes = [None if leaf is None else leaf.detach().abs().requires_grad_() for leaf in leaves]
    total = _preactivation(replace(case, add_order="before"), *sizes)
    terms = torch.autograd.grad(total, [s for s in sizes if s is not None], steep * cotangent.abs())
    shaped = cotangent if call.batched else cotangent.squeeze(0)
    wanted = [t for t in given.present() if t.requires_grad]
    got = iter(torch.autograd.grad(out, wanted, shaped.to(out.dtype).to(out.device)))
    names = [name for name, t in vars(given).items() if t is not None]
    for name, tensor, true, size in zip(names, given.present(), exact, terms, strict=True):
        if not tensor.requires_grad:
            continue
        grad = next(got)
        require(grad.shape == tensor.shape, f"the gradient of {name} has shape {tuple(grad.shape)}")
        require(grad.dtype == tensor.dtype, f"the gradient of {name} is {grad.dtype}")
        error = (grad.detach().cpu().double().view(true.shape) - true).abs()
        # Half the distance of subnormal numbers: in fp16 a tiny gradient has few digits, eager's too.
        info = torch.finfo(case.dtype)
        allowed = bound.share * size + max(info.smallest_normal * info.eps / 2, 1e-30)
        if not (error <= allowed).all():
            worst = (error / allowed).nan_to_num(nan=torch.inf).max().item()
            raise Fault(f"the gradient of {name} is off by {worst:.3g} times what is allowed ({mode})")


# --- invalid calls ---


def eager(a: dict[str, Any]) -> Tensor:
    """What the operator stands for, in plain PyTorch; its own options are checked by nobody."""
    out = F.conv_transpose3d(
        a["input"],
        a["weight"],
        a["bias"],
        a["stride"],
        a["padding"],
        a["output_padding"],
        a["groups"],
        a["dilation"],
    )
    return out if a["add"] is None else out + a["add"]


def _allocations(device: str) -> int:
    """How often memory of the GPU was allocated so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if device == "cuda" else 0


def check_invalid(call: Call, device: str) -> str:
    """The error's class is eager's, where eager refuses the call too; nothing has changed behind it."""
    tensors = call.make(device)
    arguments = broken_arguments(call, tensors)
    copies = [t.clone() for t in tensors.present()]
    expected: type[Exception] = DEFECTS[call.defect][1]
    if call.defect not in EAGER_VARIES:
        try:
            eager(arguments)
        except Exception as error:
            # Of its own classes torch has several for one mistake, by device and backend.
            expected = RuntimeError if isinstance(error, RuntimeError) else type(error)
    before = _allocations(device)
    raised: Exception | None = None
    with surroundings(call, device):
        function = operator if call.form == "operator" and expected is RuntimeError else conv_transpose3d
        try:
            function(arguments.pop("input"), arguments.pop("weight"), arguments.pop("bias"), **arguments)
        except Exception as error:
            raised = error.with_traceback(None)
    made = _allocations(device) - before
    require(made == 0, f"memory was allocated {made} times before the refusal")
    require(raised is not None, f"defect {call.defect!r}: no error")
    require(
        isinstance(raised, expected),
        f"defect {call.defect!r}: {type(raised).__name__} ({raised}), not {expected.__name__}",
    )
    require("convt3d" in str(raised), f"defect {call.defect!r}: the message is not ours: {raised}")
    for tensor, copy in zip(tensors.present(), copies, strict=True):
        require(torch.equal(tensor, copy), "an input was written")
    return "refused"


def check(call: Call, device: str) -> str:
    """Raises :class:`Fault`, or whatever a valid call raised; returns where the call ran."""
    return check_invalid(call, device) if call.defect else check_valid(call, device)


# --- many calls ---

CHUNK = 25
"""Cases that a process takes at a time."""

Progress = Callable[[int, int], None]
"""Told how many more cases are done, and how many have failed so far."""


@dataclass
class Outcome:
    passed: int
    failures: list[tuple[Call, str]]
    counts: Counter[str]
    seconds: float


def run_cases(
    seed: int, indices: Iterable[int], device: str, stop_after: int = 20, progress: Progress | None = None
) -> Outcome:
    """The cases of run ``seed`` that ``indices`` name; goes on behind a failure, up to ``stop_after``."""
    start = time.monotonic()
    failures: list[tuple[Call, str]] = []
    counts: Counter[str] = Counter()
    passed = 0
    for index in indices:
        call = random_call(f"{seed}:{index}", device)
        try:
            counts[check(call, device)] += 1
            counts[f"form {call.form}"] += 1
            passed += 1
        except Exception as error:
            what = str(error) if isinstance(error, Fault) else traceback.format_exc(limit=-4)
            failures.append((call, what))
            if len(failures) >= stop_after:
                break
        if progress is not None:
            progress(1, len(failures))
    return Outcome(passed, failures, counts, time.monotonic() - start)


def run_in_processes(seed: int, count: int, device: str, jobs: int, progress: Progress) -> Outcome:
    """`run_cases` of ``count`` cases by ``jobs`` processes, each with its own CUDA context and allocator."""
    start = time.monotonic()
    total = Outcome(0, [], Counter(), 0.0)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=use_few_threads) as pool:
        parts = [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
        running = {pool.submit(run_cases, seed, part, device): len(part) for part in parts}
        for future in as_completed(running):
            outcome = future.result()
            total.passed += outcome.passed
            total.failures += outcome.failures
            total.counts += outcome.counts
            progress(running[future], len(total.failures))
            if len(total.failures) >= 20:
                pool.shutdown(cancel_futures=True)
                break
    return replace(total, seconds=time.monotonic() - start)


def use_few_threads() -> None:
    """References are small and computed on the CPU: many threads would wait for each other."""
    torch.set_num_threads(min(torch.get_num_threads(), 2))


class Bar:
    """Shows how many of ``count`` cases are done."""

    def __init__(self, count: int) -> None:
        self._count, self._done, self._start = count, 0, time.monotonic()

    def __call__(self, more: int, failed: int) -> None:
        self._done += more
        _show(self._done, self._count, failed, self._start)


def _show(done: int, count: int, failed: int, start: float) -> None:
    seconds = time.monotonic() - start
    left = seconds / done * (count - done)
    line = f"{done}/{count} cases, {failed} failed, {seconds:.0f} s, about {left:.0f} s to go"
    if sys.stderr.isatty():
        bar = "#" * (30 * done // count)
        print(f"\r[{bar:<30}] {line}", end="" if done < count else "\n", file=sys.stderr, flush=True)
    elif done % max(count // 10, 1) == 0 or done == count:
        print(line, file=sys.stderr, flush=True)


def report(failures: list[tuple[Call, str]], device: str) -> str:
    return "\n".join(
        f"\nFAILED seed {call.seed}: {what}\n  {call}\n"
        f"  again: python tests/python/differential.py --device {device} --replay {call.seed}"
        for call, what in failures
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random calls against float64 and eager PyTorch.")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="processes (default: 4 on a GPU, 1 on a CPU)")
    parser.add_argument("--replay", metavar="SEED:INDEX", help="run one case again")
    options = parser.parse_args(arguments)
    if options.cases < 1:
        parser.error("--cases must be at least 1")
    jobs = options.jobs
    if jobs is None:
        jobs = min(4, os.cpu_count() or 1) if options.device == "cuda" else 1
    if jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU that torch can use")
    if options.replay:
        call = random_call(options.replay, options.device)
        print(call)
        print(f"passed, on {check(call, options.device)}")
        return 0
    bar = Bar(options.cases)
    if jobs > 1:
        outcome = run_in_processes(options.seed, options.cases, options.device, jobs, bar)
    else:
        outcome = run_cases(options.seed, range(options.cases), options.device, progress=bar)
    print(report(outcome.failures, options.device))
    print(", ".join(f"{name} {n}" for name, n in sorted(outcome.counts.items())))
    print(
        f"{outcome.passed} passed, {len(outcome.failures)} failed of {options.cases} cases, "
        f"seed {options.seed}, on {options.device}, in {outcome.seconds:.0f} s"
    )
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    use_few_threads()
    sys.exit(main())
