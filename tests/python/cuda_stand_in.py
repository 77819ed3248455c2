# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the binding, and tensors of a GPU that is not there (under FakeTensorMode)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Case, Tensors
from convt3d import _native
from convt3d._problem import Problem


class Binding:
    """Takes the call, refuses it, or fails, and remembers what it was given."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def install(monkeypatch: pytest.MonkeyPatch, outcome: Any, backward: Any = None) -> Binding:
    """Puts a stand-in in the binding's place; ``backward`` in that of its backward kernel."""
    binding = Binding(outcome)
    native = _native.Native(forward=binding, quick=binding, activation_backward_=backward or Binding(None))
    monkeypatch.setattr(_native, "_native", native)
    return binding


def on_cuda(case: Case) -> Tensors:
    made = case.make()

    def move(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

    return Tensors(*(move(t) for t in vars(made).values()))  # type: ignore[arg-type]


def problem_of(case: Case, t: Tensors) -> Problem:
    return Problem.create(*arguments(case, t))


def arguments(case: Case, t: Tensors) -> tuple[Any, ...]:
    return (
        t.input,
        t.weight,
        t.bias,
        case.stride,
        case.padding,
        case.output_padding,
        case.groups,
        case.dilation,
        t.add,
        case.add_order,
        case.activation,
        case.negative_slope,
        case.precision or "default",
    )
