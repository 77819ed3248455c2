# SPDX-License-Identifier: Apache-2.0
"""The memory format of outputs and gradients.

One rule, PyTorch's on CUDA, serves the real and the fake operator on every device: channels_last_3d where
the input or the weight suggests it and the type is not double, contiguous otherwise. (PyTorch's own fake
kernel and its CPU kernels follow other rules; one rule everywhere keeps a compiled graph's strides true.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# cuDNN is kept off channels-last for double, and complex runs as convolutions of its real type.
_ALWAYS_CONTIGUOUS = frozenset({torch.float64, torch.complex128})


def suggests_channels_last_3d(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether PyTorch's ``suggest_memory_format`` says channels_last_3d for a 5-D tensor.

    Args:
        shape: (N, C, D, H, W); may hold SymInts.
        strides: elements, in the same order.

    The rule: walking C, W, H, D, N, each stride is at least the extent of what came before. Ambiguous cases
    (any size 0, a channel stride of 0, and N111 tensors whose strides are all alike) count as contiguous.
    """
    try:
        return _suggests(shape, strides)
    except RuntimeError:  # a size that nothing is known of: torch does not answer the comparison
        return _suggests_for_sure(shape, strides)


def _suggests(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if strides[1] == 0:
        return False
    extent: int = 0
    for dim in (1, 4, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < extent:
            return False
        if dim == 0 and extent == strides[1]:
            return False
        extent = strides[dim]
        if shape[dim] > 1:
            extent *= shape[dim]
    return True


def _suggests_for_sure(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """The same where it holds for every value of the unknown sizes but 0 (an empty tensor's strides)."""
    if surely(strides[1] == 0):
        return False
    extent: int = 0
    for dim in (1, 4, 3, 2, 0):
        if surely(shape[dim] == 0) or not surely(strides[dim] >= extent):
            return False
        if dim == 0 and surely(extent == strides[1]):
            return False
        extent = strides[dim] * shape[dim]
    return True


def surely(condition: bool) -> bool:
    """``condition``, or False where it depends on a size that only the data tell (an unbacked symbol)."""
    if type(condition) is bool:
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def output_is_channels_last(input: Tensor, weight: Tensor) -> bool:
    """Whether a result computed from 5-D ``input`` and ``weight`` is channels_last_3d."""
    return is_channels_last(input.dtype, input.shape, input.stride(), weight.shape, weight.stride())


def is_channels_last(
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    weight_shape: Sequence[int],
    weight_strides: Sequence[int],
) -> bool:
    """:func:`output_is_channels_last`, of the input's and the weight's shapes and strides."""
    if dtype in _ALWAYS_CONTIGUOUS:
        return False
    return suggests_channels_last_3d(shape, strides) or suggests_channels_last_3d(
        weight_shape, weight_strides
    )


def cat_is_channels_last(first_shape: Sequence[int], first_channels_last: bool, second: Tensor) -> bool:
    """Whether ``torch.cat([first, second], 1)`` is channels_last_3d: where it is the format of both.

    Args:
        first_shape, first_channels_last: of a 5-D result of ours, which has exactly that format's strides.
        second: 5-D.
    """
    # The strides of one value per sample are ambiguous, and an empty result counts as contiguous.
    return (
        first_channels_last
        and any(surely(extent > 1) for extent in first_shape[1:])
        and not any(surely(extent == 0) for extent in first_shape)
        and suggests_channels_last_3d(second.shape, second.stride())
    )


def as_memory_format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last_3d if channels_last else torch.contiguous_format


def with_exact_strides(tensor: Tensor, channels_last: bool) -> Tensor:
    """``tensor`` (5-D) with exactly the strides that ``torch.empty`` gives in that memory format.

    Copies only where the layout really differs; strides of size-1 dimensions are relabelled without a copy.
    """
    memory_format = as_memory_format(channels_last)
    wanted = torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()
    if tensor.stride() == wanted:
        return tensor
    if not tensor.is_contiguous(memory_format=memory_format):
        tensor = tensor.contiguous(memory_format=memory_format)
    return tensor if tensor.stride() == wanted else tensor.as_strided(tensor.shape, wanted)
