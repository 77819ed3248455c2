# SPDX-License-Identifier: Apache-2.0
"""What autocast's rule for the operator makes of plain tensors: doing it here saves a call its way there.

Of parameters autocast keeps what its rules have cast until the outermost autocast ends, so that PyTorch's
convolutions do not cast a weight in every call. It has no function that would give what it keeps. So we keep
our own casts, for just as long: autocast keeps one tensor for us, a cast of an empty parameter, and our casts
are an attribute of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._composite import autocast_dtype

_is_autocast_enabled = torch.is_autocast_enabled  # without an argument CUDA's, in half the time
_autocast_dtype = torch.get_autocast_dtype
_is_cache_enabled = torch.is_autocast_cache_enabled
_is_capturing = torch.cuda.is_current_stream_capturing
_einsum: Any = torch._VF.einsum  # type: ignore[attr-defined]

_Tensors = TypeVar("_Tensors", bound=tuple[Any, ...])


class _Casts(dict[int, tuple["weakref.ref[Tensor]", Tensor]]):
    """Parameters, by id, and their casts. A class of its own, since a dict has no weak references."""


def _none() -> _Casts | None:
    return None


_latest: Callable[[], _Casts | None] = _none
_parameters: dict[torch.device, Tensor] = {}

# To begin costs more than to cast, and is of no use where every pass has an autocast of its own: where no
# cast was used twice, so many for each of them are made without.
_PATIENCE = 16
_kept = 0  # since the latest beginning
_used = True  # whether one of these was used twice
_without = 0  # still to be made


def after_autocast(tensors: _Tensors) -> _Tensors:
    """Plain tensors as the rule would cast them.

    Under no_grad alone: the casts are not in a graph.
    """
    if not _is_autocast_enabled():
        return tensors
    dtype = _autocast_dtype("cuda")
    return tuple(  # type: ignore[return-value]
        [t if t is None or t.dtype is dtype or not t.is_cuda else _cast(t, dtype) for t in tensors]
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A CUDA tensor in autocast's type, of which CUDA's is ``dtype``."""
    global _kept, _used, _without
    casts = _latest()
    known = None if casts is None else casts.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1].dtype is dtype and _keeps():
        _used = True
        return known[1]
    dtype = autocast_dtype(tensor, "cuda")
    # As autocast itself, which keeps nothing else.
    if (
        not tensor.requires_grad
        or tensor.dtype is not torch.float32
        or not tensor.is_leaf
        or tensor._is_view()
        or not _keeps()
    ):
        return tensor.to(dtype)
    if casts is None:
        if not _used:
            _without, _used = _PATIENCE * _kept, True
        if _without > 0:
            _without -= 1
        else:
            casts = _begin(tensor.device)
    cast = tensor.to(dtype)
    if casts is not None:
        _kept += 1
        casts[id(tensor)] = weakref.ref(tensor), cast
    return cast


def _keeps() -> bool:
    """Whether casts are kept now: a CUDA graph has to make what it reads."""
    return _is_cache_enabled() and not _is_capturing()


def _begin(device: torch.device) -> _Casts | None:
    """Casts that live as long as what autocast keeps from now on; None where it keeps nothing."""
    global _latest, _kept, _used
    with torch.inference_mode(False):  # or nobody notes what the view is of
        parameter = _parameters.get(device)
        if parameter is None:
            parameter = _parameters[device] = torch.nn.Parameter(torch.empty(0, device=device))
        # An operation with such a rule, which gives a view of its operand.
        kept = _einsum("...", [parameter])._base
    if kept is None or kept is parameter:
        return None
    casts: _Casts | None = getattr(kept, "convt3d_casts", None)  # another thread's
    if casts is None:
        casts = kept.convt3d_casts = _Casts()
    _latest, _kept, _used = weakref.ref(casts), 0, False
    return casts
