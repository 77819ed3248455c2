# SPDX-License-Identifier: Apache-2.0
"""The differential test at a size for every day, and proof that it notices what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import differential
from random_calls import DEFECTS, Call, random_call

SEED = 2026


@pytest.mark.parametrize("chunk", range(3))
def test_random_calls_on_a_cpu(chunk: int, one_thread: None) -> None:
    outcome = differential.run_cases(SEED + chunk, range(200), "cpu")
    assert not outcome.failures, differential.report(outcome.failures, "cpu")
    assert outcome.passed == 200


@pytest.mark.gpu
def test_random_calls_on_a_gpu() -> None:
    """A tenth of a full run, which is a command of its own."""
    outcome = differential.run_cases(SEED, range(300), "cuda")
    assert not outcome.failures, differential.report(outcome.failures, "cuda")


def test_a_seed_is_one_call_and_all_kinds_occur() -> None:
    calls = [random_call(f"{SEED}:{i}", "cuda") for i in range(3000)]
    assert calls[7] == random_call(f"{SEED}:7", "cuda")
    assert {call.defect for call in calls} == {"", *DEFECTS}
    assert {call.form for call in calls} == {"eager", "operator", "compiled", "dynamic", "exported"}
    assert {call.context for call in calls} == {"", "no_grad", "inference", "autocast"}
    assert {call.kernel for call in calls} == {"auto", "sm80", "sm90", "aten"}
    assert {call.batched for call in calls} == {True, False}
    assert sum(any(call.wants) for call in calls) > 300
    assert any(call.case.batch == 0 for call in calls)
    t, again = (calls[7].make("cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(t.present(), again.present(), strict=True))


def plain_call(**wanted: Any) -> Call:
    """The first valid eager float32 call of which all that holds."""
    for i in range(10_000):
        call = random_call(f"{SEED}:{i}", "cpu")
        given = {"defect": "", "form": "eager", "context": "", **wanted}
        case = call.case
        if (case.dtype, case.add_order) != (torch.float32, "before") or not case.batch or case.add == "none":
            continue
        if all(getattr(call, name) == value for name, value in given.items()):
            return call
    raise AssertionError("no such call")


def off_by_a_little(out: Tensor) -> Tensor:
    out[(-1,) * out.dim()] += 1e-4 * (1 + out.abs().max())
    return out


def with_a_nan(out: Tensor) -> Tensor:
    out[(0,) * out.dim()] = float("nan")
    return out


def in_other_strides(out: Tensor) -> Tensor:
    return out.transpose(-1, -2).contiguous().transpose(-1, -2)


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "value": (off_by_a_little, "beyond the bound"),
    "nan": (with_a_nan, "beyond the bound|different bits"),
    "strides": (in_other_strides, "strides"),
    "type": (Tensor.double, "type torch.float64"),
    "shape": (lambda out: out[..., :-1], "shape"),
    "detached": (lambda out: out.clone().requires_grad_(), "requires_grad is True"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_result_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = WRONG[kind]
    real = differential.run
    call = plain_call(wants=(False,) * 4)
    differential.check(call, "cpu")
    monkeypatch.setattr(differential, "run", lambda *a, **k: spoil(real(*a, **k)))
    with pytest.raises(differential.Fault, match=message):
        differential.check(call, "cpu")


def test_a_changed_input_and_an_alias_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = differential.run
    call = plain_call(wants=(False,) * 4)

    def write(form: str, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        out = real(form, x, *rest, **options)
        x.view(-1)[0] += 1
        return out

    call_dense = next(
        c
        for i in range(10_000)
        if (c := random_call(f"{SEED}:{i}", "cpu")).layouts[0] is None
        and not c.defect
        and c.case.dtype == torch.float64
        and c.form == "eager"
        and not c.case.input_channels_last
    )
    monkeypatch.setattr(differential, "run", write)
    with pytest.raises(differential.Fault, match=r"an input was written|different bits"):
        differential.check(call_dense, "cpu")
    monkeypatch.setattr(differential, "run", lambda form, x, *rest, **options: x)
    with pytest.raises(differential.Fault, match="shares an input's memory"):
        differential.check(call, "cpu")


@pytest.mark.parametrize("position", range(4))
def test_a_wrong_gradient_is_noticed(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, off by a thousandth of it."""
    call = next(
        c
        for i in range(10_000)
        if (c := random_call(f"{SEED}:{i}", "cpu")).wants[position]
        and not c.defect
        and c.case.dtype == torch.float64
        and c.case.bias
        and c.case.add != "none"
        and c.case.batch
        and c.context == ""
        and c.form == "eager"
    )
    differential.check(call, "cpu")
    real = torch.autograd.grad
    place = sum(call.wants[:position])
    calls: list[int] = []

    def grad(*args: Any, **kwargs: Any) -> Any:
        results = list(real(*args, **kwargs))
        calls.append(1)
        if len(calls) == 3:  # the reference's gradients and its bound come first
            flat = results[place].view(-1)
            worst = flat.abs().argmax()
            flat[worst] *= 1.001
        return tuple(results)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    with pytest.raises(differential.Fault, match=r"the gradient of \w+ is off by"):
        differential.check(call, "cpu")


def test_a_call_that_should_have_been_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(
        c
        for i in range(10_000)
        if (c := random_call(f"{SEED}:{i}", "cpu")).defect == "padding" and c.form == "eager"
    )
    differential.check(call, "cpu")
    monkeypatch.setattr(differential, "conv_transpose3d", lambda *a, **k: torch.zeros(1))
    with pytest.raises(differential.Fault, match="defect 'padding': no error"):
        differential.check(call, "cpu")

    def another_error(*a: Any, **k: Any) -> Tensor:
        raise KeyError("convt3d")

    monkeypatch.setattr(differential, "conv_transpose3d", another_error)
    with pytest.raises(differential.Fault, match=r"KeyError .* not RuntimeError"):
        differential.check(call, "cpu")


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean run, a run with failures that says how to replay them, and a replay."""
    assert differential.main(["--cases", "5", "--device", "cpu", "--seed", "3"]) == 0
    assert "5 passed, 0 failed of 5 cases, seed 3, on cpu" in capsys.readouterr().out
    assert differential.main(["--device", "cpu", "--replay", "3:4"]) == 0
    assert "passed, on" in capsys.readouterr().out

    def fail(call: Call, device: str) -> str:
        raise differential.Fault("broken on purpose") if call.seed.endswith("0") else KeyError("unexpected")

    monkeypatch.setattr(differential, "check", fail)
    assert differential.main(["--cases", "2", "--device", "cpu", "--seed", "3"]) == 1
    out = capsys.readouterr().out
    assert "FAILED seed 3:0: broken on purpose" in out and "KeyError: 'unexpected'" in out
    assert "python tests/python/differential.py --device cpu --replay 3:1" in out
    with pytest.raises(differential.Fault):
        differential.main(["--device", "cpu", "--replay", "3:0"])
    with pytest.raises(SystemExit):
        differential.main(["--cases", "0", "--device", "cpu"])
