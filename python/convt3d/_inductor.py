# SPDX-License-Identifier: Apache-2.0
"""``convt3d.enable_inductor``: the fusion in every model that ``torch.compile`` compiles from then on."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._inductor_pass import ConvTranspose3dPass


def enable_inductor(device_types: str | Collection[str] = ("cuda",)) -> None:
    """Makes ``torch.compile`` run transposed convolutions with what follows them as one operation.

    With the backend "inductor" (the default one), in every model that is compiled from then on:
    ``nn.ConvTranspose3d``, ``F.conv_transpose3d`` and convt3d's own call, followed by batch norm (in eval),
    an add, an activation of the table, or a concatenation with a skip; see :func:`convt3d.fuse`. A
    convolution that none of these follows is left to PyTorch. A pass that is registered already
    (``torch._inductor.config.pre_grad_custom_pass``) goes on running, before this one.

    Args:
        device_types: where to do it, one or several. On a CPU there is nothing to gain.

    Calling it again sets ``device_types`` anew. Models that are compiled already stay as they are.
    """
    from torch._inductor import config

    from ._inductor_pass import ConvTranspose3dPass

    if isinstance(device_types, str):
        device_types = (device_types,)
    current = _registered()
    if current is not None:
        current.device_types = tuple(device_types)
    else:
        config.pre_grad_custom_pass = ConvTranspose3dPass(config.pre_grad_custom_pass, device_types)


def disable_inductor() -> None:
    """Undoes :func:`enable_inductor`, for models that are compiled from then on."""
    from torch._inductor import config

    current = _registered()
    if current is not None:
        current.device_types = ()  # it may have been wrapped, and stay
        if config.pre_grad_custom_pass is current:
            config.pre_grad_custom_pass = current.before


def _registered() -> ConvTranspose3dPass | None:
    """Our pass, where it is registered by itself or in a list."""
    from torch._inductor import config

    from ._inductor_pass import ConvTranspose3dPass

    registered = config.pre_grad_custom_pass
    for item in registered if isinstance(registered, (list, tuple)) else (registered,):
        if isinstance(item, ConvTranspose3dPass):
            return item
    return None
