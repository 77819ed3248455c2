# SPDX-License-Identifier: Apache-2.0
"""``python -m convt3d explain``: how a call would run, without running it."""

from __future__ import annotations

import torch

from .call import CallSpec
from .console import Console
from .timing import copy_bandwidth


def explain_call(console: Console, spec: CallSpec) -> int:
    """Prints the answer of :func:`convt3d.explain`; 0, or 1 where the call itself is refused."""
    bandwidth = copy_bandwidth(rounds=5) if torch.cuda.is_available() else None
    try:
        explanation = spec.explain(spec.draw("meta"), bandwidth)
    except (RuntimeError, ValueError, NotImplementedError, OverflowError) as error:
        console.line(str(error))
        return 1
    console.table(spec.describe(), ("what", "value"), explanation.rows())
    return 0
