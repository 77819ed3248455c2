# SPDX-License-Identifier: Apache-2.0
"""Composite operators, which autocast's rule is for: ``torch.ops.convt3d.conv_transpose3d`` and its like.

PyTorch has ``aten::conv_transpose3d``, which autocast casts for, and behind it ``aten::convolution``, which
it does not. Ours come in the same pairs, a composite operator and its core, so that a graph means what it
would mean with ``nn.ConvTranspose3d`` in it:

- A graph made in front of autocast (``torch.export``'s) holds the composite. Like the convolutions beside
  it, whose results it may get, it follows the autocast in which the graph runs.
- A graph made behind autograd (``torch.compile``'s, AOTInductor's, ``run_decompositions``') holds the core,
  and casts where it was made under autocast. It computes in the types that it says, wherever it runs: in its
  weight's, where what comes before it has another one. For on CUDA autocast casts for ``aten::convolution``,
  too, so that a convolution in the graph gives another type than the graph says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _ops

# Where PyTorch itself has a rule for its convolutions.
AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS", "xpu": "AutocastXPU"}

_WEIGHT = 1  # its place among the arguments


def autocast_dtype(tensor: Tensor, device_type: str) -> torch.dtype:
    """The type that an enabled autocast of ``device_type`` gives the operator's ``tensor``."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    # On MPS PyTorch's rule for this operation is the one that widens.
    return torch.float32 if device_type == "mps" else torch.get_autocast_dtype(device_type)


def define(library: Any, name: str, core: Any) -> Any:
    """Defines ``name`` in ``library`` as the composite over ``core``, an operator of the same arguments.

    The rule of PyTorch's own convolutions: floating-point tensors, except double, take the autocast type. All
    are cast, bias and add too, so the output has the autocast type whatever the type of ``add`` is.
    """
    schema, core_name = str(core._schema), core._schema.name
    arguments = schema[schema.index("(") :]
    library.define(name + arguments, tags=(torch.Tag.pt2_compliant_tag,))

    def plain(*args: Any) -> Tensor:
        _ops.meet_dtensor()
        return core(*args)  # type: ignore[no-any-return]

    library.impl(name, plain, "CompositeImplicitAutograd")
    library.impl(name, plain, "FuncTorchBatched")
    for device_type, key in AUTOCAST_KEYS.items():
        library.impl(name, _autocast(core, key, _to_autocast(device_type)), key)
        # What the core's kernels call must not be cast for, either.
        library.impl(core_name.partition("::")[2], _autocast(core, key, _to_weight), key)
    return getattr(torch.ops.convt3d, name).default


def _autocast(core: Any, key: str, cast: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A kernel for autocast's ``key``: the core, without autocast, of tensors as ``cast(tensor, weight)``."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any) -> Tensor:
        weight = args[_WEIGHT]
        _ops.meet_dtensor()
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return core(*(cast(a, weight) if isinstance(a, Tensor) else a for a in args))  # type: ignore[no-any-return]

    return kernel


def _to_autocast(device_type: str) -> Callable[[Tensor, Tensor], Tensor]:
    def cast(tensor: Tensor, weight: Tensor) -> Tensor:
        return tensor.to(autocast_dtype(tensor, device_type)) if tensor.device.type == device_type else tensor

    return cast


def _to_weight(tensor: Tensor, weight: Tensor) -> Tensor:
    # No autocast makes or takes doubles: where they meet another type, the caller has mixed them.
    if not tensor.is_floating_point() or torch.float64 in (tensor.dtype, weight.dtype):
        return tensor
    return tensor.to(weight.dtype)


forward_op = define(_ops._library, "conv_transpose3d", _ops.core_op)
