# SPDX-License-Identifier: Apache-2.0
"""The CUDA libraries: where they are, whether they load, and the calls into them.

Loaded at the first CUDA call, never at import, so that the package imports anywhere. Where they cannot be
loaded the reason is kept for ``info`` and ``explain``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import threading
from dataclasses import dataclass
from math import copysign
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._activations import ACTIVATIONS
from ._memory_format import output_is_channels_last
from ._precision import PRECISION_CODES, PRECISIONS, conv_precision, resolve_precision
from ._problem import ADD_ORDERS
from ._version import __version__

LIB_DIR = Path(__file__).resolve().parent / "_lib"
KERNELS_LIBRARY = LIB_DIR / "libconvt3d.so"
BINDING_LIBRARY = LIB_DIR / "libconvt3d_torch.so"

KERNEL_ENV = "CONVT3D_KERNEL"
"""Environment variable, read in every call: auto, sm80, sm90, or aten (no kernel of ours)."""

# ``convt3d_kernel`` in convt3d.h; -1 is ours: use ATen.
KERNEL_CODES = {"": 0, "auto": 0, "sm80": 1, "sm90": 2, "aten": -1}
USE_ATEN = -1


@dataclass(frozen=True)
class Native:
    """The loaded binding, or why there is none."""

    forward: Any = None
    forward_into: Any = None
    quick: Any = None
    quick_cat: Any = None
    activation_backward_: Any = None
    reason: str = ""

    @property
    def available(self) -> bool:
        return self.forward is not None


# How python/csrc/binding.cpp reports a failed allocation: bytes of the output and of the workspace.
_OUT_OF_MEMORY = re.compile(r"convt3d: cannot allocate (\d+) bytes of output and (\d+) of workspace")

_load_library: Any = torch.ops.load_library
_lock = threading.Lock()
_native: Native | None = None


def native() -> Native:
    """The binding, loaded once per process."""
    global _native
    if _native is None:
        with _lock:
            if _native is None:
                _native = _load()
    return _native


def _load() -> Native:
    if torch.version.cuda is None:
        return Native(reason="this torch was built without CUDA")
    kernels, reason = open_kernels(KERNELS_LIBRARY)
    if kernels is None:
        return Native(reason=reason)
    if not BINDING_LIBRARY.is_file():
        return Native(reason=_does_not_exist(BINDING_LIBRARY))
    try:
        _load_library(str(BINDING_LIBRARY))
        operators = torch.ops.convt3d_native
        return Native(
            operators.forward.default,
            operators.forward_into.default,
            getattr(operators.quick.default, "_op", operators.quick.default),  # without the Python around it
            operators.quick_cat.default,
            operators.activation_backward_.default,
        )
    except (OSError, AttributeError, RuntimeError) as error:
        # torch says no more than that it could not load; what the loader said is the cause.
        cause = "" if error.__cause__ is None else f": {error.__cause__}"
        return Native(reason=f"{BINDING_LIBRARY} does not load: {error}{cause}")


def _does_not_exist(path: Path) -> str:
    package = LIB_DIR.parent
    if path.is_relative_to(package):  # of the whole path a terminal shows little else
        path = path.relative_to(package.parent)
    return f"this convt3d was built without its CUDA library ({path} does not exist)"


@functools.cache
def open_kernels(path: Path) -> tuple[Any, str]:
    """The kernel library as ctypes sees it, or None and why it cannot be used.

    A library of another version is refused: its structures or their meaning may be others, and the binding,
    which links it, would pass them on.
    """
    if not path.is_file():
        return None, _does_not_exist(path)
    try:
        library = ctypes.CDLL(str(path))
        library.convt3d_version.restype = ctypes.c_char_p
        version = library.convt3d_version().decode()
    except (OSError, AttributeError) as error:
        return None, f"{path} does not load: {error}"
    if version != __version__:
        return None, f"{path} is version {version}, this package {__version__}: build or install it again"
    return library, ""


def requested_kernel() -> int:
    """The code that ``CONVT3D_KERNEL`` asks for.

    Raises:
        ValueError: an unknown name.
    """
    name = os.environ.get(KERNEL_ENV, "")
    try:
        return KERNEL_CODES[name]
    except KeyError:
        names = ", ".join(n for n in KERNEL_CODES if n)
        raise ValueError(
            f"convt3d: the environment variable {KERNEL_ENV} must be one of {names}, got {name!r}"
        ) from None


def forward(arguments: tuple[Any, ...]) -> Tensor | None:
    """The kernels' result, or None where they do not take the call.

    Args:
        arguments: of ``torch.ops.convt3d.conv_transpose3d``, in order, with CUDA tensors and a 5-D input.

    Raises:
        torch.OutOfMemoryError: memory for the output or the workspace ran out.
        RuntimeError: a CUDA call failed.
    """
    coded = _coded(arguments)
    if coded is None:
        return None
    return call(*coded, int(output_is_channels_last(arguments[0], arguments[1])))


def forward_into(out: Tensor, arguments: tuple[Any, ...]) -> bool:
    """Like :func:`forward`, into ``out``; False, with nothing written, where no kernel takes the call.

    Args:
        out: of the output's shape and with any strides; shares no memory with an input.
    """
    coded = _coded(arguments)
    return coded is not None and call_into(out, *coded)


def _coded(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The binding's arguments, or None where the call is not for the kernels."""
    *described, add_order, activation, negative_slope, precision = arguments
    kernel = requested_kernel()
    act = ACTIVATIONS.get(activation)
    if (
        kernel == USE_ATEN
        or act is None
        or add_order not in ADD_ORDERS
        or precision not in PRECISIONS
        or not native().available
    ):
        return None
    return (
        *described,
        ADD_ORDERS.index(add_order),
        act.code,
        negative_slope,
        PRECISION_CODES[resolve_precision(precision, "cuda")],
        kernel,
    )


# The settings of short calls: triples, groups, add_order, activation, negative_slope, precision. Each comes
# with what the binding reads, a CPU tensor made once: an integer argument takes torch longer than a tensor.
# Two of them where the precision is None: with PyTorch's switch at "ieee" and at "tf32".
_Settings = tuple[Any, Any, Any, Any, Any, Any]
_Known = tuple[_Settings, Tensor, Tensor]
_settings: dict[_Settings, _Known] = {}
# Those with a slope that equals another one (0.0 and -0.0) or not even itself (nan), by its bits.
_settings_by_bits: dict[_Settings, _Known] = {}
# Those of compiled graphs, in both precisions, by the numbers themselves.
_packed_settings: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
_PRECISION = 15  # its place among them
DEFAULT_PRECISION = 2
"""In a compiled graph the code of "default", beside those of the kernels."""
_MOST_SETTINGS = 1024
_LIMIT = 1 << 20


def quick(
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    triples: tuple[Any, Any, Any, Any],
    groups: Any,
    add_order: Any,
    activation: Any,
    negative_slope: Any,
    precision: Any,
    skip: Tensor | None = None,
    skip_first: bool = False,
) -> Tensor | None:
    """The short way of an eager call, which must cost few microseconds: nothing is checked but types.

    Args:
        tensors: plain tensors or None: input, weight, bias, add.
        triples: as the user gave them: stride, padding, output_padding, dilation.
        groups, add_order, activation, negative_slope, precision: as the user gave them.
        skip, skip_first: of a concatenation; plain, too.

    Returns:
        None where anything is unusual or no kernel takes the call.
    """
    input, weight, bias, add = tensors
    if input is None or weight is None or not input.is_cuda:
        return None
    loaded = _native or native()
    operator = loaded.quick
    if operator is None:
        return None
    key = (triples, groups, add_order, activation, negative_slope, precision)
    try:
        known = _settings.get(key)
    except TypeError:  # a list, say
        return None
    if known is not None:
        (s, p, o, d), g, order, act, slope, prec = known[0]
        stride, padding, output_padding, dilation = triples
        identical = (  # as they are from one line of a program: no need to look at their types
            s is stride
            and p is padding
            and o is output_padding
            and d is dilation
            and g is groups
            and order is add_order
            and act is activation
            and slope is negative_slope
            and prec is precision
        )
        if not identical and not _same(known[0], key):
            known = None
    if known is None:
        known = _new_settings(key)
        if known is None:
            return None
    settings = known[2] if precision is None and conv_precision() == "tf32" else known[1]
    if skip is not None:
        return _run_quick(loaded, input, weight, bias, add, skip, skip_first, settings)
    try:
        out: Tensor | None = operator(input, weight, bias, add, settings)
    except RuntimeError as error:
        _raise_if_out_of_memory(error, input.device)
        raise
    return out


def _run_quick(
    loaded: Native,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    skip: Tensor | None,
    skip_first: bool,
    settings: Tensor,
) -> Tensor | None:
    """The binding's operators for short calls. None: no kernel takes the call."""
    out: Tensor | None
    try:
        if skip is None:
            out = loaded.quick(input, weight, bias, add, settings)
        else:
            out = loaded.quick_cat(skip, skip_first, input, weight, bias, add, settings)
    except RuntimeError as error:
        _raise_if_out_of_memory(error, input.device)
        raise
    return out


def quick_packed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    skip: Tensor | None,
    skip_first: bool,
    settings: list[int],
) -> Tensor | None:
    """:func:`quick` for the arguments of ``torch.ops.convt3d.conv_transpose3d_packed``, on CUDA.

    Args:
        settings: what python/csrc/eager_rules.hpp reads, with :data:`DEFAULT_PRECISION` for "default".
    """
    loaded = _native or native()
    if loaded.quick is None:
        return None
    key = tuple(settings)
    tensors = _packed_settings.get(key)
    if tensors is None:
        _make_room(_packed_settings)
        tensors = _packed_settings[key] = tuple(_tensor(_with_precision(settings, code)) for code in (0, 1))
    code = settings[_PRECISION]
    if code == DEFAULT_PRECISION:  # as it is now, not as it was when the graph was made
        code = PRECISION_CODES[conv_precision()]
    return _run_quick(loaded, input, weight, bias, add, skip, skip_first, tensors[code])


def quick_operator(
    arguments: tuple[Any, ...], skip: Tensor | None = None, skip_first: bool = False
) -> Tensor | None:
    """:func:`quick` for the arguments of ``torch.ops.convt3d.conv_transpose3d``, in order."""
    input, weight, bias, stride, padding, output_padding, groups, dilation, add, *rest = arguments
    add_order, activation, negative_slope, precision = rest
    return quick(
        (input, weight, bias, add),
        (tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation)),
        groups,
        add_order,
        activation,
        negative_slope,
        None if precision == "default" else precision,
        skip,
        skip_first,
    )


def _same(known: _Settings, key: _Settings) -> bool:
    """Whether equal settings are of plain types, too: True equals 1; and of the two zeros the same one.

    What is the same object needs no look, but every module has triples of its own.
    """
    (s, p, o, d), groups, add_order, activation, slope, precision = known
    stride, padding, output_padding, dilation = key[0]
    if not (s is stride and p is padding and o is output_padding and d is dilation):
        for value in key[0]:
            if type(value) is not int:
                if type(value) is not tuple:
                    return False
                depth, height, width = value
                if type(depth) is not int or type(height) is not int or type(width) is not int:
                    return False
    return (
        (key[1] is groups or type(key[1]) is int)
        and (key[2] is add_order or type(key[2]) is str)
        and (key[3] is activation or type(key[3]) is str)
        and (
            key[4] is slope
            or (type(key[4]) is float and (slope != 0.0 or copysign(1.0, slope) == copysign(1.0, key[4])))
        )
        and (key[5] is precision or type(key[5]) is str)
    )


def _new_settings(key: _Settings) -> _Known | None:
    """Remembers what python/csrc/eager_rules.hpp reads; None where a setting is not of a plain type."""
    triples, groups, add_order, activation, negative_slope, precision = key
    numbers: list[int] = []
    for value in triples:
        triple = (value,) * 3 if type(value) is int else value
        if type(triple) is not tuple or len(triple) != 3:
            return None
        numbers += triple
    numbers.append(groups)
    if any(type(n) is not int or not 0 <= n < _LIMIT for n in numbers) or groups == 0:
        return None
    if type(activation) is not str or type(add_order) is not str or type(precision) not in (str, type(None)):
        return None
    if activation not in ACTIVATIONS or add_order not in ADD_ORDERS:
        return None
    if precision is not None and precision not in PRECISION_CODES:  # not "default" either: no user's word
        return None
    if type(negative_slope) is not float:
        return None
    numbers += tail_settings(activation, add_order, PRECISION_CODES.get(precision, 0), negative_slope)
    bits = numbers[-1]
    if negative_slope != 0.0 and negative_slope == negative_slope:
        return _remember(_settings, key, key, numbers)
    by_bits = (triples, groups, add_order, activation, bits, precision)
    known = _settings_by_bits.get(by_bits) or _remember(_settings_by_bits, by_bits, key, numbers)
    if negative_slope == 0.0:  # as most calls have the zero of the one before
        _make_room(_settings)
        _settings[key] = known
    return known


def tail_settings(activation: str, add_order: str, precision: int, negative_slope: float) -> tuple[int, ...]:
    """The settings behind the triples and groups, as numbers; ``precision`` is one."""
    (bits,) = struct.unpack("q", struct.pack("d", negative_slope))
    return ACTIVATIONS[activation].code, ADD_ORDERS.index(add_order), precision, bits


def _remember(where: dict[_Settings, _Known], under: _Settings, key: _Settings, numbers: list[int]) -> _Known:
    _make_room(where)
    settings = _tensor(numbers)
    tf32 = settings if key[5] is not None else _tensor(_with_precision(numbers, PRECISION_CODES["tf32"]))
    known = where[under] = (key, settings, tf32)
    return known


def _with_precision(numbers: list[int], code: int) -> list[int]:
    return [*numbers[:_PRECISION], code, *numbers[_PRECISION + 1 :]]


def _make_room(where: dict[Any, Any]) -> None:
    if len(where) >= _MOST_SETTINGS:
        where.clear()


def _tensor(numbers: list[int]) -> Tensor:
    with torch.inference_mode(False):  # it serves later calls, too
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def call(*arguments: Any) -> Tensor | None:
    """``convt3d_native::forward`` itself."""
    return _call(native().forward, *arguments)  # type: ignore[no-any-return]


def call_into(out: Tensor, *arguments: Any) -> bool:
    """``convt3d_native::forward_into`` itself."""
    return _call(native().forward_into, out, *arguments)  # type: ignore[no-any-return]


def activation_backward_(
    grad_output: Tensor,
    t: Tensor | None,
    activation: str,
    negative_slope: float,
    sums: bool,
    ndhwc: Tensor | None = None,
    in_place: bool = True,
) -> Tensor | None:
    """``grad_output * act'(t)``, into ``t`` itself, into ``ndhwc``, or both; without ``t`` act is "none".

    Args:
        grad_output, t: 5-D CUDA tensors of one shape and type, of any strides.
        sums: whether each channel's sum of the result is wanted.
        ndhwc: like them, packed channels-last. The others then have to be rows along W.
        in_place: whether ``t`` is to be overwritten.

    Returns:
        The sums, fp32, (C,), or an empty tensor where none are wanted. None where the library does not take
        the call; then nothing was written.

    Raises:
        torch.OutOfMemoryError: memory for the sums or the workspace ran out.
        RuntimeError: a CUDA call failed.
    """
    if requested_kernel() == USE_ATEN or not native().available:
        return None
    code = ACTIVATIONS[activation].code
    arguments = (grad_output, t, ndhwc, code, negative_slope, int(in_place and t is not None), int(sums))
    return _call(native().activation_backward_, *arguments)  # type: ignore[no-any-return]


def _call(operator: Any, *arguments: Any) -> Any:
    """One of the binding's operators, with torch's own error where memory runs out."""
    try:
        return operator(*arguments)
    except RuntimeError as error:
        _raise_if_out_of_memory(error, arguments[0].device)
        raise


def _raise_if_out_of_memory(error: RuntimeError, device: torch.device) -> None:
    """Raises torch's own error where ``error`` says that an allocation of the binding's failed.

    The stable ABI hands it on as a plain one. The same allocations again, by torch itself, raise the one that
    callers know how to handle.
    """
    failed = _OUT_OF_MEMORY.search(str(error))
    if failed is not None:
        _again = [torch.empty(int(size), dtype=torch.uint8, device=device) for size in failed.groups()]
