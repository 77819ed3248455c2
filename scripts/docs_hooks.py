# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: the roles of the docstrings (``:func:`x```) become links to the API page, or plain code."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod|data):<code>~?([^<]*)</code>")
_SHORT = re.compile(r"\A[A-Za-z_]+\Z")


def _link(match: re.Match[str]) -> str:
    name = match[1]
    target = f"convt3d.{name}" if _SHORT.match(name) else name
    return f'<autoref optional identifier="{target}"><code>{name}</code></autoref>'


def on_page_content(html: str, **kwargs: Any) -> str:
    return _ROLE.sub(_link, html)
