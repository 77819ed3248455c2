# SPDX-License-Identifier: Apache-2.0
"""One description of a call, validated once; every implementation, real or fake, starts from it.

While a graph is traced, sizes that only the data tell are taken to be right: the real operator checks them.

Error classes are PyTorch's for the same mistake. Messages name the argument, its value and what would be
valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._activations import ACTIVATIONS, Activation
from ._memory_format import as_memory_format, output_is_channels_last, surely
from ._precision import PRECISIONS

Triple = tuple[int, int, int]

ADD_ORDERS = ("before", "after")  # the position is the kernels' code, ``convt3d_add_order``

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_SIXTEEN_BIT = frozenset({torch.float16, torch.bfloat16})


def triple(value: Any, name: str) -> Triple:
    """``value`` (an int, or a sequence of one or three ints) as (D, H, W).

    Raises:
        TypeError: not an int or a sequence of ints.
        RuntimeError: a sequence of another length.
        ValueError: an int that does not fit 64 bits.
    """
    values: Sequence[Any]
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        values = (value, value, value)
    elif isinstance(value, (tuple, list)):
        values = value * 3 if len(value) == 1 else value
        if len(values) != 3:
            for item in values:
                _int(item, value, name)
            raise RuntimeError(
                f"convt3d: {name} must be an int or a sequence of 3 ints (depth, height, width), "
                f"got {value!r}"
            )
    else:
        values = (value, value, value)  # an integer of another library's, or nothing that is allowed
    return (_int(values[0], value, name), _int(values[1], value, name), _int(values[2], value, name))


def _int(item: Any, value: Any, name: str) -> int:
    if isinstance(item, torch.SymInt):
        return item  # type: ignore[return-value]
    if type(item) is not int:
        if isinstance(item, (bool, float)):
            _not_ints(value, name)
        try:
            item = index(item)
        except TypeError:
            _not_ints(value, name)
    if not -INT64_MAX <= item <= INT64_MAX:
        raise ValueError(f"convt3d: {name} must fit a 64-bit integer, got {value!r}")
    return int(item)


def single_int(value: Any, name: str) -> int:
    """``value`` as an int: an integer of any library's, no bool.

    Raises:
        TypeError: anything else.
        ValueError: an int that does not fit 64 bits.
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        number = None if isinstance(value, (bool, float)) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"convt3d: {name} must be an int, got {value!r} ({type(value).__name__})")
    if not -INT64_MAX <= number <= INT64_MAX:
        raise ValueError(f"convt3d: {name} must fit a 64-bit integer, got {value!r}")
    return number


def number(value: Any, name: str) -> float:
    """``value`` as a float: a real number of any library's.

    Raises:
        TypeError: anything else.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"convt3d: {name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"convt3d: {name} must be a number, got {value!r}") from None


def _not_ints(value: Any, name: str) -> NoReturn:
    raise TypeError(
        f"convt3d: {name} must be an int or a sequence of 3 ints (depth, height, width), "
        f"got {value!r} ({type(value).__name__})"
    )


def output_extent(
    size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> int:
    """Output size along one dimension; see ``torch.nn.ConvTranspose3d``."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


@dataclass(frozen=True)
class Problem:
    """A valid call. Triples are (D, H, W); sizes may be SymInts, the slope a SymFloat.

    Attributes:
        batched: False for a 4-D (C, D, H, W) input, which runs as a batch of one.
        channels_last: the memory format of the output (and of the gradients of input and weight).
        opmath_dtype: the type in which sums and the epilogue are computed.
    """

    batched: bool
    batch: int
    in_channels: int
    out_channels: int
    groups: int
    in_size: Triple
    kernel: Triple
    stride: Triple
    padding: Triple
    output_padding: Triple
    dilation: Triple
    out_size: Triple
    dtype: torch.dtype
    device: torch.device
    add_before: bool
    activation: Activation
    negative_slope: float
    precision: str
    channels_last: bool

    @property
    def output_shape_5d(self) -> tuple[int, int, int, int, int]:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.output_shape_5d if self.batched else self.output_shape_5d[1:]

    @property
    def memory_format(self) -> torch.memory_format:
        return as_memory_format(self.channels_last)

    @property
    def is_sixteen_bit(self) -> bool:
        return self.dtype in _SIXTEEN_BIT

    @property
    def opmath_dtype(self) -> torch.dtype:
        if self.dtype == torch.complex32:  # which ATen has convolutions of, and little else
            return torch.complex64
        return torch.float32 if self.is_sixteen_bit else self.dtype

    def empty_output(self, device: torch.device | str | None = None) -> Tensor:
        """An uninitialised output: what the fake operator returns, and what the real ones must look like."""
        out = torch.empty(
            self.output_shape_5d,
            dtype=self.dtype,
            device=self.device if device is None else device,
            memory_format=self.memory_format,
        )
        return out if self.batched else out.squeeze(0)

    @staticmethod
    def create(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        output_padding: Sequence[int],
        groups: int,
        dilation: Sequence[int],
        add: Tensor | None,
        add_order: str,
        activation: str,
        negative_slope: float,
        precision: str,
    ) -> Problem:
        """Validates the operator's arguments (in its schema's order) and describes the call.

        Raises:
            TypeError: an argument of the wrong kind.
            RuntimeError: shapes, sizes, types or devices that do not go together.
            NotImplementedError: a dtype that PyTorch's operator does not have either.
            ValueError: an unknown activation, add_order or precision.
        """
        act = check_choices(activation, add_order)
        _check_options(negative_slope, precision)
        spatial = (
            triple(stride, "stride"),
            triple(padding, "padding"),
            triple(output_padding, "output_padding"),
            triple(dilation, "dilation"),
        )
        _check_tensors(input, weight, bias, add)
        _check_dtype(input.dtype, input.device, act)
        _check_ranges(*spatial, groups)
        batched = input.dim() == 5
        shape = input.shape if batched else (1, *input.shape)
        _check_channels(input, shape, weight, bias, groups)
        out_size = _output_size(shape, weight.shape, *spatial)
        problem = Problem(
            batched=batched,
            batch=shape[0],
            in_channels=shape[1],
            out_channels=weight.shape[1] * groups,
            groups=groups,
            in_size=(shape[2], shape[3], shape[4]),
            kernel=(weight.shape[2], weight.shape[3], weight.shape[4]),
            stride=spatial[0],
            padding=spatial[1],
            output_padding=spatial[2],
            dilation=spatial[3],
            out_size=out_size,
            dtype=input.dtype,
            device=input.device,
            add_before=add_order == "before",
            activation=act,
            negative_slope=negative_slope,
            precision=precision,
            channels_last=output_is_channels_last(input if batched else input.unsqueeze(0), weight),
        )
        _check_numel(problem)
        _check_int32(*spatial)
        if add is not None:
            check_broadcast(add, problem.output_shape)
        return problem


def check_choices(activation: Any, add_order: Any) -> Activation:
    """The activation of that name.

    Raises:
        TypeError: not a string.
        ValueError: an unknown name.
    """
    for name, value in (("activation", activation), ("add_order", add_order)):
        if not isinstance(value, str):
            raise TypeError(f"convt3d: {name} must be a string, got {value!r} ({type(value).__name__})")
    act = ACTIVATIONS.get(activation)
    if act is None:
        raise ValueError(f"convt3d: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if add_order not in ADD_ORDERS:
        raise ValueError(f"convt3d: add_order must be 'before' or 'after', got {add_order!r}")
    return act


def _check_options(negative_slope: float, precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"convt3d: precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if not isinstance(negative_slope, (int, float, torch.SymFloat)):
        raise TypeError(f"convt3d: negative_slope must be a number, got {negative_slope!r}")


def _check_tensors(input: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> None:
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias), ("add", add)):
        if tensor is None and name in ("bias", "add"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"convt3d: {name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise RuntimeError(
                f"convt3d: {name} must be a dense (strided) tensor, got layout {tensor.layout}"
            )
        if tensor.dtype != input.dtype:
            raise RuntimeError(
                f"convt3d: input, weight, bias and add must have one dtype, but input is {input.dtype} and "
                f"{name} is {tensor.dtype}"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"convt3d: input, weight, bias and add must be on one device, but input is on {input.device} "
                f"and {name} is on {tensor.device}"
            )
    if input.dim() not in (4, 5):
        raise RuntimeError(
            "convt3d: input must be 5-D (batch, channels, depth, height, width) or 4-D without the batch, "
            f"got shape {tuple(input.shape)}"
        )
    if weight.dim() != 5:
        raise RuntimeError(
            "convt3d: weight must be 5-D (in_channels, out_channels / groups, depth, height, width), "
            f"got shape {tuple(weight.shape)}"
        )


def _check_dtype(dtype: torch.dtype, device: torch.device, act: Activation) -> None:
    if dtype in _FLOATS:
        return
    if dtype in _COMPLEX:
        if not act.complex_ok:
            raise NotImplementedError(f"convt3d: activation {act.name!r} is not defined for {dtype} input")
        return
    # PyTorch has int64 on a CPU, and no other integer type.
    if dtype != torch.int64 or device.type not in ("cpu", "meta"):
        raise NotImplementedError(
            f"convt3d: input on {device.type} must be float16, bfloat16, float32, float64 or complex "
            f"(on cpu also int64), got {dtype}"
        )
    if not act.integer_ok:
        raise NotImplementedError(f"convt3d: activation {act.name!r} is not defined for {dtype} input")


def _check_ranges(
    stride: Triple, padding: Triple, output_padding: Triple, dilation: Triple, groups: int
) -> None:
    if not isinstance(groups, (int, torch.SymInt)) or isinstance(groups, bool):
        raise TypeError(f"convt3d: groups must be an int, got {groups!r} ({type(groups).__name__})")
    if groups <= 0:
        raise RuntimeError(
            f"convt3d: groups must be positive (non-positive groups is not supported), got {groups}"
        )
    for name, values, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("output_padding", output_padding, 0),
        ("dilation", dilation, 1),
    ):
        if values[0] < least or values[1] < least or values[2] < least:
            raise RuntimeError(f"convt3d: {name} must be at least {least} in every dimension, got {values}")
    for s, d, op in zip(stride, dilation, output_padding, strict=True):
        if op >= s and op >= d:
            raise RuntimeError(
                "convt3d: output_padding must be smaller than either stride or dilation in every dimension, "
                f"got output_padding {output_padding}, stride {stride}, dilation {dilation}"
            )


def _check_channels(
    input: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, groups: int
) -> None:
    weight_shape = tuple(weight.shape)
    for name, extent in zip(
        ("in_channels", "out_channels", "depth", "height", "width"), weight_shape, strict=True
    ):
        if surely(extent == 0):
            raise RuntimeError(f"convt3d: weight must have {name} of at least 1, got shape {weight_shape}")
    if surely(weight_shape[0] % groups != 0):
        raise RuntimeError(
            f"convt3d: groups must divide the weight's in_channels, got groups {groups} and weight of shape "
            f"{weight_shape}"
        )
    if surely(shape[1] != weight_shape[0]):
        raise RuntimeError(
            f"convt3d: input must have the weight's {weight_shape[0]} in_channels, got {shape[1]} channels: "
            f"input of shape {tuple(input.shape)}, weight of shape {weight_shape}"
        )
    if any(surely(extent == 0) for extent in shape[2:]) and surely(shape[0] != 0):
        raise RuntimeError(
            "convt3d: input may have an empty batch, but depth, height and width must be at least 1, "
            f"got shape {tuple(input.shape)}"
        )
    if bias is not None:
        out_channels = weight_shape[1] * groups
        if bias.dim() != 1 or surely(bias.shape[0] != out_channels):
            raise RuntimeError(
                f"convt3d: bias must be 1-D with {out_channels} elements (out_channels), "
                f"got shape {tuple(bias.shape)}"
            )


def _output_size(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Triple,
    padding: Triple,
    output_padding: Triple,
    dilation: Triple,
) -> Triple:
    for dim in range(3):
        # Both products, checked by themselves: their difference may come back into range.
        travel = (shape[2 + dim] - 1) * stride[dim]
        reach = dilation[dim] * (weight_shape[2 + dim] - 1)
        for part in (travel + reach + output_padding[dim] + 1, 2 * padding[dim]):
            if isinstance(part, int) and part > INT64_MAX:
                raise RuntimeError(
                    "convt3d: sizes overflow 64-bit integers: "
                    + _size_arguments(shape, weight_shape, stride, padding, output_padding, dilation)
                )
    out = tuple(
        output_extent(
            shape[2 + i], weight_shape[2 + i], stride[i], padding[i], output_padding[i], dilation[i]
        )
        for i in range(3)
    )
    if any(surely(extent < 0) for extent in out):
        raise RuntimeError(
            f"convt3d: the output size would be negative, {out}: padding is too large for "
            + _size_arguments(shape, weight_shape, stride, padding, output_padding, dilation)
        )
    return (out[0], out[1], out[2])


def _size_arguments(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Triple,
    padding: Triple,
    output_padding: Triple,
    dilation: Triple,
) -> str:
    return (
        f"input size {tuple(shape[2:])}, kernel size {tuple(weight_shape[2:])}, stride {stride}, "
        f"padding {padding}, output_padding {output_padding}, dilation {dilation}"
    )


def _check_numel(problem: Problem) -> None:
    numel = 1
    for extent in problem.output_shape_5d:
        if not isinstance(extent, int):
            return
        numel *= max(extent, 1)
    if numel * problem.dtype.itemsize > INT64_MAX:
        raise RuntimeError(
            f"convt3d: sizes overflow 64-bit integers: the output would have shape {problem.output_shape}"
        )


def _check_int32(stride: Triple, padding: Triple, output_padding: Triple, dilation: Triple) -> None:
    """ATen's and cuDNN's convolutions cut these to 32 bits, whatever comes out: an error, or another call."""
    for name, values in (
        ("stride", stride),
        ("padding", padding),
        ("output_padding", output_padding),
        ("dilation", dilation),
    ):
        if values[0] > INT32_MAX or values[1] > INT32_MAX or values[2] > INT32_MAX:
            raise RuntimeError(f"convt3d: {name} must be less than 2^31 in every dimension, got {values}")


def check_broadcast(add: Tensor, output_shape: Sequence[int]) -> None:
    """Raises RuntimeError unless ``add`` has ``output_shape`` or broadcasts to exactly that."""
    offset = len(output_shape) - add.dim()
    if offset >= 0 and not any(
        surely(extent != 1) and surely(extent != output_shape[offset + dim])
        for dim, extent in enumerate(add.shape)
    ):
        return
    raise RuntimeError(
        f"convt3d: add must have the output's shape {tuple(output_shape)} or broadcast to it, "
        f"got shape {tuple(add.shape)}"
    )


def check_grad_output(problem: Problem, grad_output: Tensor) -> None:
    """Raises RuntimeError unless ``grad_output`` has the shape, type and device of the problem's output."""
    shape = problem.output_shape
    if grad_output.dim() != len(shape) or any(
        surely(got != wanted) for got, wanted in zip(grad_output.shape, shape, strict=True)
    ):
        raise RuntimeError(
            f"convt3d: grad_output must have the output's shape {tuple(shape)}, "
            f"got shape {tuple(grad_output.shape)}"
        )
    if grad_output.dtype != problem.dtype or grad_output.device != problem.device:
        raise RuntimeError(
            f"convt3d: grad_output must be {problem.dtype} on {problem.device} as the output is, "
            f"got {grad_output.dtype} on {grad_output.device}"
        )
