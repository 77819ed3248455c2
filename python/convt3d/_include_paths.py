# SPDX-License-Identifier: Apache-2.0
"""Where the kernels' sources are, for extensions that compile one of them."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def include_paths() -> list[str]:
    """Folders for a compiler's ``-I``: the C interface (``convt3d/convt3d.h``) and the sm80 family's sources.

    ``examples/kernelbench/model_new_inline.py`` compiles one of its kernels into an extension. CUTLASS's
    headers come on top.

    Raises:
        FileNotFoundError: an installation without the sources.
    """
    installed = _PACKAGE / "_include"
    if (installed / "convt3d" / "convt3d.h").is_file():
        return [str(installed)]
    checkout = _PACKAGE.parents[1] / "cutlass_kernels"
    if (checkout / "include" / "convt3d" / "convt3d.h").is_file():
        return [str(checkout / "include"), str(checkout / "src")]
    raise FileNotFoundError(f"convt3d: neither {installed} nor {checkout} has the kernels' sources")
