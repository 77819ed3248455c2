# SPDX-License-Identifier: Apache-2.0
"""The operators for ``torch.distributed.tensor.DTensor``: each process runs its own samples.

DTensor has a rule for PyTorch's convolutions and none for an operator that it does not know. The rule here:
a batch that is split stays split, everything else is gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from . import _cat, _ops, _product
from ._backward import empty_gradients
from ._memory_format import as_memory_format, output_is_channels_last
from ._problem import Problem

_INPUT, _WEIGHT, _SKIP = 0, 1, 13  # places among the arguments; the skip is a concatenation's
_TENSORS = (_INPUT, _WEIGHT, 2, 8, _SKIP)  # and bias, add
_OF_A_BATCH = (_INPUT, 8, _SKIP)

_Placements = tuple[Placement, ...]


def _forward(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> DTensor:
    if len(args) > _SKIP:
        problem, _, skip, _ = _cat.described(tuple(args))
        whole = _cat.empty_result(problem, skip, "meta")
    else:
        whole = Problem.create(*args).empty_output("meta")
    placed = _Placed(args)
    return placed.joined(func(*placed.local), placed.batch, whole)


def _backward(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> list[DTensor]:
    grad_output, *given, mask = args
    problem = _ops._backward_problem(grad_output, tuple(given), mask)
    placed = _Placed(given)
    grads = func(placed.own(grad_output, placed.batch), *placed.local, mask)
    wholes = empty_gradients(problem, *_ops._tensors(tuple(given)), mask, device="meta")
    wanted = [at for at, want in zip(_TENSORS, mask, strict=False) if want]
    return [
        placed.joined(grad, placed.gradient(at), whole)
        for grad, at, whole in zip(grads, wanted, wholes, strict=True)
    ]


def _product_rule(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> DTensor:
    a, b, kind, size, *geometry = args
    # Two images give a sum over the batch; one, with the weight, another image.
    other = _SKIP if kind == "weight" else _WEIGHT
    pair = [None] * (_SKIP + 1)
    pair[_INPUT], pair[other] = a, b
    placed = _Placed(pair)
    local = func(placed.local[_INPUT], placed.local[other], kind, size, *geometry)
    shape = _product._shape(a, b, kind, size, geometry[3])
    memory_format = as_memory_format(output_is_channels_last(a, b))
    whole = torch.empty(shape, device="meta", memory_format=memory_format)
    return placed.joined(local, placed.gradient(_WEIGHT) if kind == "weight" else placed.batch, whole)


class _Placed:
    """The arguments of a call, each placed as its input is.

    Attributes:
        batch: placements of what has the input's batch. All else is whole in every process.
        local: the arguments, with this process's parts in the place of the tensors.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        input = args[_INPUT]
        self._check(input, None)
        self.mesh = input.device_mesh
        self.batch: _Placements = tuple(
            p if input.dim() == 5 and type(p) is Shard and p.dim == 0 else Replicate()
            for p in input.placements
        )
        self._split = {
            at
            for at in _OF_A_BATCH
            if at < len(args)
            and args[at] is not None
            and args[at].dim() == input.dim() == 5
            and args[at].shape[0] == input.shape[0]
        }
        whole = tuple(Replicate() for _ in self.batch)
        self.local = [
            self.own(arg, self.batch if at in self._split else whole)
            if at in _TENSORS and arg is not None
            else arg
            for at, arg in enumerate(args)
        ]

    def own(self, tensor: DTensor, placements: _Placements) -> Tensor:
        """This process's part of ``tensor`` when it is placed like that."""
        self._check(tensor, self.mesh)
        return tensor.redistribute(placements=placements).to_local()

    def gradient(self, at: int) -> _Placements:
        """Of the argument at that place. What every process has whole adds up over the parts of the batch."""
        if at in self._split:
            return self.batch
        return tuple(Partial() if isinstance(p, Shard) else p for p in self.batch)

    def joined(self, local: Tensor, placements: _Placements, whole: Tensor) -> DTensor:
        """The tensor of which ``local`` is this process's part, of the shape and strides of ``whole``."""
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    @staticmethod
    def _check(tensor: Any, mesh: Any) -> None:
        if not isinstance(tensor, DTensor) or (mesh is not None and tensor.device_mesh != mesh):
            raise RuntimeError(
                "convt3d: input, weight, bias, add and skip must all be DTensors of one device mesh, or all "
                f"plain tensors, got {type(tensor).__name__} of shape {tuple(tensor.shape)} beside others"
            )


for _library, _name, _rule in (
    (_ops._library, "conv_transpose3d_core", _forward),
    (_cat._library, "conv_transpose3d_cat_core", _forward),
    (_ops._library, "conv_transpose3d_backward", _backward),
    (_product._library, "product", _product_rule),
):
    torch.library.register_torch_dispatch(f"convt3d::{_name}", DTensor, _rule, lib=_library)
