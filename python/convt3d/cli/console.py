# SPDX-License-Identifier: Apache-2.0
"""Output through rich where it is installed, as plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


class Console:
    """Prints lines, steps and tables.

    Args:
        plain: never use rich.
    """

    def __init__(self, plain: bool = False) -> None:
        self._rich: Any = None
        if not plain:
            try:
                from rich.console import Console as RichConsole
            except ImportError:
                return
            self._rich = RichConsole(highlight=False)

    def line(self, text: str = "") -> None:
        if self._rich is not None:
            self._rich.print(text, markup=False, soft_wrap=True)
        else:
            print(text)

    def step(self, text: str) -> None:
        """Progress: what is being done now."""
        if self._rich is not None:
            self._rich.print(f"... {text}", style="dim", markup=False, soft_wrap=True)
        else:
            print(f"... {text}")
        sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; columns after the first that look like numbers are aligned to the right."""
        right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
        if self._rich is not None:
            self._rich.print(_rich_table(title, columns, rows, right))
            return
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(f"\n{title}")
        for row in [columns, ["-" * width for width in widths], *rows]:
            cells = (
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            )
            print("  ".join(cells).rstrip())


def _rich_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    # No lines between columns: eight of them have to fit 80 characters, which is what a pipe gets.
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name, to_right in zip(columns, right, strict=True):
        table.add_column(name, justify="right" if to_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit() or text == "-"
