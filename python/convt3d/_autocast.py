# SPDX-License-Identifier: Apache-2.0
"""What autocast's rule for the operator makes of plain tensors: doing it here saves a call its way there.

Of parameters autocast keeps what its rules have cast until the outermost autocast ends, so that PyTorch's
convolutions do not cast a weight in every call. It has no function that would give what it keeps. So we keep
our own casts, for just as long: autocast keeps the cast of an empty parameter for us, and once nobody but us
has that cast's storage, it has forgotten all. The memory of ours is free with the next such call, or with the
parameter.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._composite import autocast_dtype

_is_autocast_enabled = torch.is_autocast_enabled  # without an argument CUDA's, in half the time
_autocast_dtype = torch.get_autocast_dtype
_is_cache_enabled = torch.is_autocast_cache_enabled
_is_capturing = torch.cuda.is_current_stream_capturing
_einsum: Any = torch._VF.einsum  # type: ignore[attr-defined]
_C: Any = torch._C
_storage_address = getattr(_C, "_storage_address", None)
_storage_use_count = getattr(_C, "_storage_Use_Count", None)

_Tensors = TypeVar("_Tensors", bound=tuple[Any, ...])


class _Casts(dict[int, tuple["weakref.ref[Tensor]", Tensor]]):
    """Parameters, by id, and their casts, of the time while autocast has ``mark``'s storage, too."""

    def __init__(self, mark: Tensor) -> None:
        super().__init__()
        self.mark = mark
        self.storage = _storage_address(mark)  # type: ignore[misc]


_latest: _Casts | None = None
_parameter: Tensor | None = None  # the empty one
_lock = threading.RLock()

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
    casts = _latest
    if casts is not None and _storage_use_count(casts.storage) < 2:  # type: ignore[misc]
        casts.clear()
        casts = None
    known = None if casts is None else casts.get(id(tensor))
    # Autocast, too, looks up none that wants no gradient any more.
    if (
        known is not None
        and known[0]() is tensor
        and known[1].dtype is dtype
        and tensor.requires_grad
        and _keeps()
    ):
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
            if casts is None:
                _without = _PATIENCE * _PATIENCE
    cast = tensor.to(dtype)
    if casts is not None:
        _kept += 1
        key = id(tensor)
        casts[key] = weakref.ref(tensor, partial(casts.pop, key)), cast  # the other argument is a default
    return cast


def forget() -> None:
    """Drops all casts, and with them the weak references that parameters cannot be swapped with."""
    if _latest is not None:
        _latest.clear()


def _keeps() -> bool:
    """Whether casts are kept now: a CUDA graph has to make what it reads."""
    return _is_cache_enabled() and not _is_capturing()


def _begin(device: torch.device) -> _Casts | None:
    """Casts for as long as what autocast keeps from now on; None where it keeps nothing."""
    global _latest, _parameter, _kept, _used
    if _storage_address is None or _storage_use_count is None:  # this torch has no such functions
        return None
    with _lock, torch.inference_mode(False):
        # Another thread's, whose mark would count as a use of the storage.
        if _latest is not None and _storage_use_count(_latest.storage) > 1:
            return _latest
        if _parameter is None:
            _parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device=device))
        # An operation with such a rule, which gives a view of its operand. No Python object of the operand's:
        # to let go of one takes the interpreter's lock, which autocast must not wait for while it forgets.
        casts = _Casts(_einsum("...", [_parameter]).data)
        if casts.mark.dtype is torch.float32 or _storage_use_count(casts.storage) != 2:
            return None
        _latest, _kept, _used = casts, 0, False
        return casts
