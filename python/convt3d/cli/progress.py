# SPDX-License-Identifier: Apache-2.0
"""What is being done: a bar at a terminal that rich can draw on, lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """A bar for ``total`` steps.

    Args:
        quiet: no line for each step that has ended.
    """

    def __init__(self, total: int, quiet: bool = False) -> None:
        self._total, self._done, self._quiet = total, 0, quiet
        self._bar: Any = None
        if sys.stdout.isatty():
            try:
                from rich import progress
            except ImportError:
                return
            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}"),
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def start(self, name: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def stage(self, name: str) -> None:
        """Something begins that may take long; said elsewhere than at a terminal, too."""
        if self._bar is not None:
            self.start(name)
        else:
            self.say(f"{name} ...")

    def done(self, text: str) -> None:
        """One row has ended."""
        self.step()
        if self._quiet:
            return
        if self._bar is not None:
            self.say(text)
        else:
            self.say(f"[{self._done}/{self._total}] {text}")

    def step(self) -> None:
        """The bar moves on by one."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
