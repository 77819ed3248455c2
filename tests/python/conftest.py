# SPDX-License-Identifier: Apache-2.0
"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import accuracy
from convt3d._fuse import _call, _module
from families import Family


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="there is no NVIDIA GPU that torch can use")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the accuracy bound the worst result used, by mode: what its constants are judged by."""
    for mode, (share, where) in sorted(accuracy.worst_shares.items()):
        terminalreporter.write_line(f"accuracy bound used, {mode}: {share:.3f} of 1 ({where})")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel is forced unless a test does it; a fixed seed; PyTorch's switch is left as it was found.

    fuse() takes in what follows a result of any size, as the tests' are small.
    """
    monkeypatch.delenv("CONVT3D_KERNEL", raising=False)
    monkeypatch.setattr(_module, "WORTH_WAITING", 0)
    torch.manual_seed(0)
    before = torch.backends.cudnn.conv.fp32_precision
    yield
    if torch.backends.cudnn.conv.fp32_precision != before:
        torch.backends.cudnn.conv.fp32_precision = before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks of a few channels lose time to threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the calls that a fused model deferred and that then ran, with " cat" into one."""
    found: list[str] = []

    def watch(name: str, suffix: str) -> None:
        real = getattr(_call, name)

        def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
            found.append(kwargs["activation"] + suffix)
            return real(*args, **kwargs)  # type: ignore[no-any-return]

        monkeypatch.setattr(_call, name, spy)

    watch("conv_transpose3d", "")
    watch("conv_transpose3d_cat", " cat")
    return found


@pytest.fixture
def force_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes calls in this test ask for one kernel family; a call that it refuses runs on ATen."""
    return lambda kernel: monkeypatch.setenv("CONVT3D_KERNEL", kernel)


@pytest.fixture
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family named by the parameter, forced and watched."""
    return Family(request.param, monkeypatch)
