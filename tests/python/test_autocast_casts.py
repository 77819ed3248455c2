# SPDX-License-Identifier: Apache-2.0
"""Casts of parameters under autocast, kept as long as autocast keeps its own; here a stand-in does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convt3d import FusedConvTranspose3d, _autocast

TYPE = torch.float16  # CUDA's autocast type unless it is set


class Kept:
    """What autocast keeps."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def einsum(self, equation: str, operands: list[Tensor]) -> Tensor:
        (operand,) = operands
        if id(operand) not in self._tensors:
            self._tensors[id(operand)] = operand.detach().to(TYPE)
        return self._tensors[id(operand)].view(-1)

    def clear(self) -> None:
        self._tensors.clear()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    made = Kept()
    monkeypatch.setattr(_autocast, "_einsum", made.einsum)
    monkeypatch.setattr(_autocast, "_is_capturing", lambda: False)
    state = {"_latest": None, "_parameter": None, "_kept": 0, "_used": True, "_without": 0}
    for name, value in state.items():
        monkeypatch.setattr(_autocast, name, value)
    return made


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def without_gradients(request: pytest.FixtureRequest) -> Any:
    with request.param():
        yield


def cast(tensor: Tensor, dtype: torch.dtype = TYPE) -> Tensor:
    return _autocast._cast(tensor, dtype)


@pytest.mark.usefixtures("without_gradients")
def test_one_cast_until_autocast_forgets(kept: Kept) -> None:
    with torch.inference_mode(False):
        first, second = (nn.Parameter(torch.randn(3, 2)) for _ in range(2))
    one, two = cast(first), cast(second)
    assert (
        one.dtype == two.dtype == TYPE
        and torch.equal(one, first.to(TYPE))
        and torch.equal(two, second.to(TYPE))
    )
    gc.collect()
    assert cast(first) is one and cast(second) is two
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is not None
    kept.clear()
    first.data.fill_(7.0)  # changes neither version nor address
    again = cast(first)
    assert torch.equal(again, torch.full((3, 2), 7.0, dtype=TYPE)) and cast(first) is again
    del again
    gone = weakref.ref(cast(first))
    del first
    assert gone() is None  # with its parameter


@pytest.mark.usefixtures("without_gradients")
def test_what_wants_no_gradient_any_more_is_cast_again(kept: Kept) -> None:
    with torch.inference_mode(False):
        parameter = nn.Parameter(torch.randn(2, 2))
    assert cast(parameter) is cast(parameter)
    parameter.requires_grad_(False)
    parameter.data.fill_(3.0)
    assert torch.equal(cast(parameter), torch.full((2, 2), 3.0, dtype=TYPE))


@pytest.mark.usefixtures("without_gradients")
def test_parameters_with_casts_can_be_swapped(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.utils.swap_tensors takes none that has weak references."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    for change in (
        lambda m: m.half(),
        lambda m: m.load_state_dict(FusedConvTranspose3d(2, 3, 2).state_dict()),
    ):
        with torch.inference_mode(False):
            module = FusedConvTranspose3d(2, 3, 2)
        usual = cast(module.weight)
        assert cast(module.weight) is usual
        before = module.weight.detach().clone()
        change(module)
        assert module.weight.dtype == TYPE or not torch.equal(module.weight, before)
        assert torch.equal(cast(module.weight).float(), module.weight.to(TYPE).float())


@pytest.mark.usefixtures("without_gradients")
def test_not_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autocast does not keep either, and what a graph has to make."""
    with torch.inference_mode(False):
        parameter = nn.Parameter(torch.randn(2, 2))
        view = parameter.detach().view(4).requires_grad_()
        others = [torch.randn(2), view, nn.Parameter(torch.randn(2), requires_grad=False)]
    for other in others:
        assert cast(other) is not cast(other) and torch.equal(cast(other), other.to(TYPE))
    usual = cast(parameter)
    assert cast(parameter) is usual
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        assert cast(parameter) is not usual
    finally:
        torch.set_autocast_cache_enabled(enabled)
    monkeypatch.setattr(_autocast, "_is_capturing", lambda: True)
    assert cast(parameter) is not usual
    monkeypatch.setattr(_autocast, "_is_capturing", lambda: False)
    assert cast(parameter) is usual


@pytest.mark.usefixtures("without_gradients")
def test_another_type_or_tensor(kept: Kept) -> None:
    """An autocast inside another one, and a parameter in the place of one that is gone."""
    with torch.inference_mode(False):
        parameter, other = (nn.Parameter(torch.randn(2)) for _ in range(2))
    before = torch.get_autocast_dtype("cuda")
    cast(parameter)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert cast(parameter, torch.bfloat16).dtype == torch.bfloat16
    finally:
        torch.set_autocast_dtype("cuda", before)
    casts = _autocast._latest
    assert casts is not None
    casts[id(other)] = casts[id(parameter)]
    assert torch.equal(cast(other), other.to(TYPE))


@pytest.mark.usefixtures("without_gradients")
def test_nothing_is_kept_where_it_is_of_no_use(kept: Kept) -> None:
    """With an autocast for every pass, but for one pass in many; and again once it is of use."""
    with torch.inference_mode(False):
        parameters = [nn.Parameter(torch.randn(2)) for _ in range(3)]
    keeps = []
    for i in range(2 * (_autocast._PATIENCE + 1)):
        for parameter in parameters:
            assert torch.equal(cast(parameter), parameter.to(TYPE))
        latest = _autocast._latest
        keeps.append(latest is not None and len(latest) == len(parameters))
        assert keeps[-1] or not latest
        kept.clear()
        parameters[0].data.fill_(i)
    assert keeps == 2 * [True, *_autocast._PATIENCE * [False]]
    for _ in range(_autocast._PATIENCE):  # one pass within another's autocast
        for _ in range(2):
            one, other = (cast(parameters[1]) for _ in range(2))
        assert one is other
        kept.clear()


def cast_fp32(equation: str, operands: list[Tensor]) -> Tensor:
    return operands[0].view(-1)


def cast_anew(equation: str, operands: list[Tensor]) -> Tensor:
    return operands[0].to(TYPE).view(-1)


@pytest.mark.parametrize("einsum", [cast_fp32, cast_anew])
def test_where_autocast_keeps_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch, einsum: Any) -> None:
    monkeypatch.setattr(_autocast, "_einsum", einsum)
    parameter = nn.Parameter(torch.randn(2))
    with torch.no_grad():
        assert cast(parameter) is not cast(parameter)
        assert torch.equal(cast(parameter), parameter.to(TYPE))


def test_a_torch_without_the_counts(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autocast, "_storage_use_count", None)
    parameter = nn.Parameter(torch.randn(2))
    with torch.no_grad():
        assert cast(parameter) is not cast(parameter)


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_another_default_type(kept: Kept, default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    parameter = nn.Parameter(torch.randn(2))
    torch.set_default_dtype(default)
    try:
        with torch.no_grad():
            assert cast(parameter) is cast(parameter)
    finally:
        torch.set_default_dtype(before)


def test_threads_share_one_mark(kept: Kept) -> None:
    """A second one would keep the storage of the first in use for good."""
    parameter = nn.Parameter(torch.randn(2))
    with torch.no_grad():
        one = cast(parameter)
        assert _autocast._begin(parameter.device) is _autocast._latest and cast(parameter) is one
        kept.clear()
        parameter.data.fill_(3.0)
        assert torch.equal(cast(parameter), parameter.to(TYPE))
