# SPDX-License-Identifier: Apache-2.0
"""What :func:`fuse` did, and why not more."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FuseEntry:
    """One transposed convolution.

    Attributes:
        name: of the module in the model; the first one, if it has several.
        replaced: whether the module is a ``FusedConvTranspose3d`` now.
        fused: what is taken in behind it, in order: "batch_norm" (in eval), "add", an activation; at the end
            "cat", a concatenation with a skip that the result is written into.
        reason: why nothing, or nothing more, is taken in.
        last: what the last call that ran has taken in of it, with or without gradients; None before the first
            one, in compiled models, and where nothing is planned.
    """

    name: str
    replaced: bool
    fused: tuple[str, ...]
    reason: str
    last: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if not self.replaced:
            return f"{self.name}: left as it is: {self.reason}"
        what = " + ".join(("conv", *self.fused))
        text = f"{self.name}: {what}; {self.reason}"
        if self.last is None:
            return text
        return f"{text}; the last call took in {' + '.join(self.last) or 'nothing'}"


@dataclass(frozen=True)
class FuseReport:
    """The transposed convolutions of a model, in the order of ``named_modules()``.

    Attributes:
        entries: one for each.
        notes: modules whose forward could not be traced, with the reason.
    """

    entries: tuple[FuseEntry, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def replaced(self) -> tuple[FuseEntry, ...]:
        return tuple(entry for entry in self.entries if entry.replaced)

    @property
    def left(self) -> tuple[FuseEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.replaced)

    @property
    def fused(self) -> tuple[FuseEntry, ...]:
        return tuple(entry for entry in self.entries if entry.fused)

    def __getitem__(self, name: str) -> FuseEntry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [
            f"convt3d.fuse: {len(self.replaced)} of {len(self.entries)} transposed convolutions replaced, "
            f"{len(self.fused)} with what follows"
            + (" (in inference, from about 64 MiB on)" if self.fused else "")
        ]
        lines += [f"  {entry}" for entry in self.entries]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
