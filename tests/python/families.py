# SPDX-License-Identifier: Apache-2.0
"""Tests of one kernel family: which calls it must take, and proof that it is what ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cases import Case, Tensors
from convt3d import _native

ATEN = "aten + tail"

families = pytest.mark.parametrize("family", ["sm80", "sm90", "aten"], indirect=True)
own_families = pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Family:
    """A kernel family ("sm80", "sm90"), "auto" or "aten", which every call of the test asks for.

    A call that a family refuses runs on ATen and may well pass, so a test says which calls it means, by
    :meth:`takes` or :meth:`require`, and makes them through :meth:`call` or inside :meth:`runs`.
    """

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.refusal = "nothing was asked"
        self._code = _native.KERNEL_CODES[name]
        self._seen: list[tuple[int, bool]] = []  # of each call into the binding: kernel asked for, and taken
        binding_call = _native.call

        def call(*arguments: Any) -> Tensor | None:
            result = binding_call(*arguments)
            self._seen.append((arguments[-2], result is not None))
            return result

        def quick(*arguments: Any) -> Tensor | None:
            result: Tensor | None = binding_quick(*arguments)
            if result is not None:  # what it leaves, `call` takes or refuses
                self._seen.append((self._code, True))
            return result

        monkeypatch.setattr(_native, "call", call)
        # The short way reads the kernel from the environment, which is set below.
        loaded = _native.native()
        binding_quick = loaded.quick
        if binding_quick is not None:
            monkeypatch.setattr(_native, "_native", replace(loaded, quick=quick))
        monkeypatch.setenv(_native.KERNEL_ENV, name)

    def __repr__(self) -> str:
        return self.name

    def takes(self, case: Case, tensors: Tensors) -> bool:
        """Whether it runs the call. sm80 must, except for what it is meant to refuse; ATen always does."""
        e = case.explain(tensors)
        if self.name == "aten":
            assert e.path == ATEN
            return True
        if e.path == self.name or (self.name == "auto" and e.path != ATEN):
            return True
        assert e.path == ATEN
        self.refusal = str(e.refused)
        if self.name == "sm80":
            assert 0 in case.output_shape(), f"sm80 must take {case}: {self.refusal}"
        return False

    def require(self, case: Case, tensors: Tensors) -> None:
        """Skips the test where the family does not take the call."""
        if not self.takes(case, tensors):
            pytest.skip(f"{self.name} does not take this call: {self.refusal}")

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Asserts that this family ran every call of the block, by the binding's own account."""
        del self._seen[:]
        yield
        if self.name == "aten":
            assert self._seen == []
        else:
            assert self._seen, "no call reached the binding"
            assert set(self._seen) == {(self._code, True)}

    def call(self, case: Case, tensors: Tensors) -> Tensor:
        with self.runs():
            return case.call(tensors)

    def call_on(self, kernel: str, case: Case, tensors: Tensors) -> Tensor:
        """The result of a second call, for which a kernel ran with ``kernel`` in its name.

        On Hopper it must have; another device may have a faster one, which skips the test. The first call's
        result is poisoned, since the second one may get its memory.
        """
        self.call(case, tensors).fill_(float("nan"))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            result = self.call(case, tensors)
            torch.cuda.synchronize()
        names = [event.key for event in recorded.key_averages() if "convt3d" in event.key]
        if not any(kernel in name for name in names):
            assert not is_hopper(), names
            pytest.skip("another kernel is the faster one on this device")
        return result
