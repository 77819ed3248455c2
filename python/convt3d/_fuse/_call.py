# SPDX-License-Identifier: Apache-2.0
"""A call of the fused operator that may run later than it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._cat import conv_transpose3d_cat
from .._functional import conv_transpose3d
from .._problem import Triple
from ._ambience import Ambience


@dataclass
class Call:
    """The arguments of one :func:`convt3d.conv_transpose3d`, collected step by step; never changed.

    With ``cat`` (skip, skip_first) it is one :func:`convt3d.conv_transpose3d_cat`, and nothing follows.
    When it runs, it leaves the names of the steps that it has taken in with its module.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: Triple
    padding: Triple
    output_padding: Triple
    groups: int
    dilation: Triple
    precision: str | None
    ambience: Ambience
    versions: tuple[tuple[Tensor, int], ...]
    module: dict[str, Any]  # its attributes
    taken: tuple[str, ...] = ()
    add: Tensor | None = None
    add_order: str = "before"
    activation: str = "none"
    negative_slope: float = 0.01
    cat: tuple[Tensor, bool] | None = None

    def with_step(self, name: str, **changes: Any) -> Call:
        """A copy with one more step and some fields changed."""
        # dataclasses.replace takes ten times as long.
        made = object.__new__(Call)
        made.__dict__ = {**self.__dict__, **changes, "taken": (*self.taken, name)}
        return made

    def run_here(self) -> Tensor:
        """:meth:`run` where the ambience is known to be that of the call."""
        self._check_versions()
        return self._run()

    def run(self) -> Tensor:
        self._check_versions()
        now = Ambience.current(self.ambience.device)
        if self.ambience == now:
            return self._run()
        with self.ambience.restored(now):
            return self._run()

    def _run(self) -> Tensor:
        self.module["convt3d_last"] = self.taken
        arguments: Any = (
            self.input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )
        rest: Any = {
            "add": self.add,
            "add_order": self.add_order,
            "activation": self.activation,
            "negative_slope": self.negative_slope,
            "precision": self.precision,
        }
        if self.cat is not None:
            return conv_transpose3d_cat(*arguments, skip=self.cat[0], skip_first=self.cat[1], **rest)
        return conv_transpose3d(*arguments, **rest)

    def _check_versions(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    "convt3d: a tensor that a fused transposed convolution reads was changed in place "
                    "between the convolution and what follows it (or the result was kept by a hook and read "
                    "after the weights had changed). Call convt3d.fuse() again with the hooks in place, or "
                    "convt3d.unfuse()"
                )


def versions_of(*tensors: Tensor | None) -> tuple[tuple[Tensor, int], ...]:
    """What in-place changes are noticed by; inference tensors do not count theirs."""
    found = []
    for tensor in tensors:  # a generator takes three times as long
        if tensor is not None and not tensor.is_inference():
            found.append((tensor, tensor._version))
    return tuple(found)
