# SPDX-License-Identifier: Apache-2.0
"""What the backward kernel is asked for, with fake CUDA tensors and a stand-in for the binding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import Case
from convt3d import _backward, _grad_pre
from convt3d._activations import ACTIVATIONS
from cuda_stand_in import Binding, install, on_cuda, problem_of


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Binding]:
    return partial(install, monkeypatch)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


TRAINING = Case(cin=8, cout=16, size=(2, 2, 4), activation="silu", dtype=torch.float16)
ALL_GRADIENTS = [True] * 4


def backward(case: Case, mask: list[bool]) -> list[Tensor]:
    """The backward operator on tensors of a GPU that is not there."""
    tensors = on_cuda(case)
    problem = problem_of(case, tensors)
    grad = torch.empty(case.output_shape(), dtype=case.dtype, device="cuda")
    return _backward.backward(
        problem,
        grad,
        tensors.input,
        tensors.weight,
        tensors.bias,
        tensors.add,
        mask,
        recompute=lambda: torch.empty_like(grad),
    )


@pytest.mark.parametrize(
    ("changes", "mask", "in_place", "sums"),
    [
        ({}, ALL_GRADIENTS, 1, 1),
        ({}, [True, True, False, True], 1, 0),
        ({}, [True, True, False, False], 0, 0),
        ({"add_order": "after"}, [True, False, True, False], 0, 1),
        ({"add": "channel"}, [False, True, False, True], 0, 1),
        ({"add": "plane"}, [False, True, False, True], 1, 0),
        ({"activation": "none"}, [True, True, True, False], 0, 1),
    ],
)
def test_what_the_backward_kernel_is_asked_for(
    changes: dict[str, Any],
    mask: list[bool],
    in_place: int,
    sums: int,
    fake: FakeTensorMode,
    bind: Callable[..., Binding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Channels-last for the convolutions; over t only where the gradient of add needs it."""
    monkeypatch.setattr(_grad_pre, "_LEAST_BYTES", 0)
    taken = Binding(torch.empty(16 if sums else 0, device="cuda"))
    bind(None, taken)
    case = replace(TRAINING, name="", **changes)
    grads = backward(case, mask)
    assert len(grads) == sum(mask)
    _, t, ndhwc, code, _, *flags = taken.calls[0]
    assert flags == [in_place, sums]
    assert (t is None) == (case.activation == "none") and code == ACTIVATIONS[case.activation].code
    assert ndhwc.is_contiguous(memory_format=torch.channels_last_3d) and ndhwc.shape == case.output_shape()
    # Then input and weight into channels-last.
    assert [call[2].shape for call in taken.calls[1:3]] == [(2, 8, 2, 2, 4), (8, 16, 3, 3, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"cout": 12},
        {"dtype": torch.float32, "precision": "ieee"},
        {"dtype": torch.float64},
        {"dtype": torch.float64, "activation": "none"},
    ],
    ids=str,
)
def test_a_backward_that_stays_in_its_layout(
    changes: dict[str, Any],
    fake: FakeTensorMode,
    bind: Callable[..., Binding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused by the library (the stand-in refuses all), it runs through ATen."""
    monkeypatch.setattr(_grad_pre, "_LEAST_BYTES", 0)
    refused = Binding(None)
    bind(None, refused)
    case = replace(TRAINING, name="", **changes)
    grads = backward(case, ALL_GRADIENTS)
    assert [tuple(g.shape) for g in grads] == [tuple(t.shape) for t in on_cuda(case).present()]
    assert [call[2] for call in refused.calls] == [None]


def test_a_backward_without_memory_raises_torchs_error(
    fake: FakeTensorMode, bind: Callable[..., Binding], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Binding(RuntimeError("convt3d: cannot allocate 64 bytes of output and 128 of workspace"))
    bind(None, failing)
    sizes: list[int] = []
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.uint8:
            sizes.append(size[0])
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RuntimeError, match="cannot allocate"):
        backward(TRAINING, ALL_GRADIENTS)
    assert sizes == [64, 128]
