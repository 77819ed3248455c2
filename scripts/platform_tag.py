# SPDX-License-Identifier: Apache-2.0
"""The platform tag of a wheel: on which Linux systems its libraries run (PEP 600)."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from typing import Protocol

# Libraries that every manylinux system has, and those that the package or torch bring.
_ALLOWED = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux-[a-z0-9-]+|libtorch|libconvt3d)\.so"
)
# For each glibc the newest symbols of the C++ runtime that a system with it promises (x86-64, from
# auditwheel's policies). A library that asks for a new libstdc++ and an old glibc needs a new system too.
_CXX_RUNTIME = {
    (2, 17): {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)},
    (2, 24): {"GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10), "GCC": (4, 8, 0)},
    (2, 27): {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    (2, 31): {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    (2, 34): {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    (2, 35): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 39): {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}


class Library(Protocol):
    """What is asked of an elf.Elf."""

    def needed(self) -> list[str]: ...
    def symbol_versions(self) -> set[str]: ...


def _oldest_glibc(version: str) -> tuple[int, ...] | None:
    """The oldest glibc of a system with a symbol such as ``GLIBCXX_3.4.26``; None if no system has it."""
    name, _, number = version.partition("_")
    if not re.fullmatch(r"[\d.]+", number):
        return None
    parts = tuple(map(int, number.split(".")))
    if name == "GLIBC":
        return parts[:2]
    return next((glibc for glibc, newest in _CXX_RUNTIME.items() if parts <= newest.get(name, ())), None)


def platform_tag(libraries: Iterable[Library]) -> str:
    """``manylinux_x_y_<machine>``, with the oldest system that the libraries run on.

    ``linux_<machine>`` where they need more than such a system promises.
    """
    machine = platform.machine()
    glibc: tuple[int, ...] = next(iter(_CXX_RUNTIME))
    for library in libraries:
        oldest = [_oldest_glibc(version) for version in library.symbol_versions()]
        if None in oldest or not all(map(_ALLOWED.match, library.needed())):
            return f"linux_{machine}"
        glibc = max([glibc, *(version for version in oldest if version is not None)])
    return "manylinux_{}_{}_{}".format(*glibc, machine)
