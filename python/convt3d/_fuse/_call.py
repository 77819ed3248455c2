# SPDX-License-Identifier: Apache-2.0
"""A call of the fused operator that may run later than it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._cat import conv_transpose3d_cat
from .._functional import conv_transpose3d
from .._problem import Triple
from ._ambience import Ambience


@dataclass
class Call:
    """The arguments of one :func:`convt3d.conv_transpose3d`, collected step by step; never changed.

    With ``cat`` (skip, skip_first) it is one :func:`convt3d.conv_transpose3d_cat`, and nothing follows.
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
    add: Tensor | None = None
    add_order: str = "before"
    activation: str = "none"
    negative_slope: float = 0.01
    cat: tuple[Tensor, bool] | None = None

    def but(self, **changes: Any) -> Call:
        """A copy with some fields changed (``dataclasses.replace`` takes ten times as long)."""
        made = object.__new__(Call)
        made.__dict__ = {**self.__dict__, **changes}
        return made

    def run_here(self) -> Tensor:
        """:meth:`run` where the ambience is known to be that of the call."""
        self._check_versions()
        return self._run(self.input, self.weight, self.bias, self.add)

    def run(self) -> Tensor:
        self._check_versions()
        now = Ambience.current(self.ambience.device)
        if self.ambience == now:
            return self._run(self.input, self.weight, self.bias, self.add)
        with self.ambience.restored(now):
            return self._run(self.input, self.weight, self.bias, self.add)

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
        arguments: Any = (
            input,
            weight,
            bias,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )
        rest: Any = {
            "add": add,
            "add_order": self.add_order,
            "activation": self.activation,
            "negative_slope": self.negative_slope,
            "precision": self.precision,
        }
        if self.cat is not None:
            return conv_transpose3d_cat(*arguments, skip=self.cat[0], skip_first=self.cat[1], **rest)
        return conv_transpose3d(*arguments, **rest)

    def gradients(self, grad_output: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Of input, weight, bias and add, for a graph that got hold of the pending tensor itself."""
        self._check_versions()
        again = torch.is_grad_enabled()  # whether these are to be differentiated, too
        with self.ambience.modes(), torch.enable_grad():
            # Aliases, as one of the tensors may have been made from another.
            leaves = [
                None if t is None else t.view_as(t) if again and w else t.detach().requires_grad_(w)
                for t, w in zip(self.tensors, wanted, strict=True)
            ]
            out = self._run(*leaves)  # type: ignore[arg-type]
            chosen = [leaf for leaf, want in zip(leaves, wanted, strict=True) if leaf is not None and want]
            found = iter(torch.autograd.grad(out, chosen, grad_output, create_graph=again))
        return [next(found) if t is not None and w else None for t, w in zip(leaves, wanted, strict=True)]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.input, self.weight, self.bias, self.add

    @property
    def wants_grad(self) -> bool:
        return self.ambience.grad and any(t is not None and t.requires_grad for t in self.tensors)

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
