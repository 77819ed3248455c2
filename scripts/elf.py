# SPDX-License-Identifier: Apache-2.0
"""Reads what the build and its tests ask of an ELF file: symbol versions, and the GPU code inside.

Standard library only: it runs in a bare build environment, and on machines without binutils or CUDA's tools.
64-bit little-endian files only, which is what is built here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECTION = struct.Struct("<IIQQQQIIQQ")
_VERNEED = struct.Struct("<HHIII")
_VERNAUX = struct.Struct("<IHHII")
_SYMBOL = struct.Struct("<IBBHQQ")
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_HEADER = struct.Struct("<IHHQ")
_FATBIN_ENTRY = struct.Struct("<HHIQ")  # kind, version, size of this header, size of the payload
_FATBIN_ARCHITECTURE_SPECIFIC = 0x100000
_DT_NEEDED, _DT_RUNPATH = 1, 29


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    link: int
    data: memoryview


@dataclass(frozen=True)
class GpuCode:
    """One piece of GPU code: ``elf`` for machine code, ``ptx`` for what newer GPUs compile at load time.

    ``architecture`` is nvcc's name without its prefix: "80", "90a".
    """

    kind: str
    architecture: str


class Elf:
    """A shared library on disk."""

    def __init__(self, path: Path) -> None:
        self._data = memoryview(path.read_bytes())
        if bytes(self._data[:6]) != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        (start,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count, names = struct.unpack_from("<HHH", self._data, 0x3A)
        raw = [_SECTION.unpack_from(self._data, start + i * size) for i in range(count)]
        name_table = self._data[raw[names][4] :]
        self.sections = [
            # SHT_NOBITS (8), such as .bss, has no bytes in the file.
            Section(_text(name_table, s[0]), s[1], s[6], self._data[s[4] : s[4] + (0 if s[1] == 8 else s[5])])
            for s in raw
        ]

    def _of(self, name: str) -> Iterator[tuple[Section, memoryview]]:
        """Sections of that name, each with its string table."""
        for section in self.sections:
            if section.name == name:
                yield section, self.sections[section.link].data

    def _dynamic(self, tag: int) -> list[str]:
        found = []
        for section, strings in self._of(".dynamic"):
            for key, value in struct.iter_unpack("<QQ", section.data):
                if key == tag:
                    found.append(_text(strings, value))
        return found

    def needed(self) -> list[str]:
        """Libraries that the loader must bring, DT_NEEDED."""
        return self._dynamic(_DT_NEEDED)

    def runpath(self) -> list[str]:
        return self._dynamic(_DT_RUNPATH)

    def symbol_versions(self) -> set[str]:
        """Versions asked of other libraries, such as ``GLIBC_2.34``."""
        versions = set()
        for section, strings in self._of(".gnu.version_r"):
            at = 0
            while True:
                _, count, _, first, following = _VERNEED.unpack_from(section.data, at)
                entry = at + first
                for _ in range(count):
                    _, _, _, name, step = _VERNAUX.unpack_from(section.data, entry)
                    versions.add(_text(strings, name))
                    entry += step
                if not following:
                    break
                at += following
        return versions

    def symbols(self) -> list[tuple[str, bool]]:
        """Dynamic symbols as (mangled name, whether it is defined here)."""
        found = []
        for section, strings in self._of(".dynsym"):
            for name, _, _, index, _, _ in _SYMBOL.iter_unpack(section.data):
                found.append((_text(strings, name), index != 0))
        return found

    def gpu_code(self) -> list[GpuCode]:
        """What CUDA's runtime would find in the file's fat binaries.

        The layout is not documented. It was read off what nvcc 13.0 writes for sm_80, 90, 90a, 100a and 103f,
        and what is read is checked for plausible values.
        """
        found = []
        for section, _ in self._of(".nv_fatbin"):
            at = 0
            while at + _FATBIN_HEADER.size <= len(section.data):
                magic, _, header, size = _FATBIN_HEADER.unpack_from(section.data, at)
                if magic != _FATBIN_MAGIC:
                    at += 8  # padding between fat binaries
                    continue
                entry, end = at + header, at + header + size
                while entry < end:
                    kind, _, entry_header, payload = _FATBIN_ENTRY.unpack_from(section.data, entry)
                    (architecture,) = struct.unpack_from("<I", section.data, entry + 28)
                    (flags,) = struct.unpack_from("<I", section.data, entry + 40)
                    if kind not in (1, 2) or not 20 <= architecture < 1000:
                        raise ValueError(
                            f"unknown fat binary entry: kind {kind}, architecture {architecture}"
                        )
                    suffix = "a" if flags & _FATBIN_ARCHITECTURE_SPECIFIC else ""
                    found.append(GpuCode("ptx" if kind == 1 else "elf", f"{architecture}{suffix}"))
                    entry += entry_header + payload
                at = end
        return found


def _text(table: memoryview, offset: int) -> str:
    raw = table[offset : offset + 4096].tobytes()
    return raw[: raw.index(b"\0")].decode()
