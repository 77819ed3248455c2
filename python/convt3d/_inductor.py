# SPDX-License-Identifier: Apache-2.0
"""``convt3d.enable_inductor``: the fusion in every model that ``torch.compile`` compiles from then on."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._inductor_chain import ChainedPass


def enable_inductor(device_types: str | Collection[str] = ("cuda",)) -> None:
    """Makes ``torch.compile`` run transposed convolutions with what follows them as one operation.

    With the backend "inductor" (the default one), in every model that is compiled from then on:
    ``nn.ConvTranspose3d``, ``F.conv_transpose3d`` and convt3d's own call, followed by batch norm (in eval),
    an add, an activation of the table, or a concatenation with a skip; see :func:`convt3d.fuse`. A
    convolution that none of these follows is left to PyTorch. A pass that is registered already
    (``torch._inductor.config.pre_grad_custom_pass``) goes on running, before this one. A second pass, in
    ``post_grad_custom_post_pass``, shortens what a call costs the host.

    Args:
        device_types: where to do it, one or several. On a CPU there is nothing to gain.

    Calling it again sets ``device_types`` anew. Models that are compiled already stay as they are.
    """
    from torch._inductor import config

    if isinstance(device_types, str):
        device_types = (device_types,)
    for name, kind in _kinds().items():
        registered = getattr(config, name)
        current = _own(registered, kind)
        if current is not None:
            current.device_types = tuple(device_types)
        elif name == _PRE_GRAD or not _asks_for_inference(registered):
            setattr(config, name, kind(registered, device_types))


def disable_inductor() -> None:
    """Undoes :func:`enable_inductor`, for models that are compiled from then on."""
    from torch._inductor import config

    for name, kind in _kinds().items():
        current = _own(getattr(config, name), kind)
        if current is not None:
            current.device_types = ()  # it may have been wrapped, and stay
            if getattr(config, name) is current:
                setattr(config, name, current.before)


_PRE_GRAD = "pre_grad_custom_pass"


def _kinds() -> dict[str, type[ChainedPass]]:
    """The settings of Inductor's where our passes are registered."""
    from ._inductor_lowering import PackPass
    from ._inductor_pass import ConvTranspose3dPass

    return {_PRE_GRAD: ConvTranspose3dPass, "post_grad_custom_post_pass": PackPass}


def _own(registered: Any, kind: type[ChainedPass]) -> ChainedPass | None:
    """Our pass, where it is registered by itself or in a list."""
    for item in registered if isinstance(registered, (list, tuple)) else (registered,):
        if isinstance(item, kind):
            return item
    return None


def _asks_for_inference(registered: Any) -> bool:
    """Whether a pass that is there takes a second argument, which it would not get from one of ours.

    Ours, which only makes calls shorter, stays away then.
    """
    from torch._inductor import custom_graph_pass

    kind = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())
    items = registered if isinstance(registered, (list, tuple)) else (registered,)
    return any(isinstance(item, kind) for item in items)
