# SPDX-License-Identifier: Apache-2.0
"""What a call would do: path, refused paths, traffic, work and floor. Runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from . import _cat, _kernel_query, _native
from ._accuracy import C, mode_of
from ._composite import AUTOCAST_KEYS, autocast_dtype
from ._functional import IntOrTriple, operator_arguments
from ._precision import resolve_precision
from ._problem import Problem

# What is assumed of the GPU when a tensor without memory is explained on a machine that has none.
_ASSUMED_DEVICE = _kernel_query.Device(compute_capability=90, multiprocessors=132)


@dataclass(frozen=True)
class Explanation:
    """How one call runs.

    Attributes:
        path: "sm90" or "sm80" (one kernel; with groups it may be run for each of them), "aten + tail" (ATen's
            convolution and in-place pointwise passes), or "cpu" (the same on a CPU).
        refused: why each faster path does not take the call, by path.
        note: what was assumed to answer.
        output_shape, output_stride: of the result; elements.
        dtype: of the result.
        precision: arithmetic of the multiplications: "ieee", "tf32", or a 16-bit type's exact products.
        error_factor: c * 2^-22 of the bound in docs/numerics.md. With y64 the float64 result, L the largest
            slope of the activation nearby, every output obeys
            ``|y - y64| <= 1/2 ulp(y64) + L * error_factor * (sum |x||w| + |bias| + |add|)``.
            None for integers (exact) and complex types (as good as PyTorch's).
        rounds_operands: whether that y64 is of the operands rounded to TF32.
        bytes: the least traffic: inputs read once, the output (with its skip) written once.
        flops: two per multiply-add, over the (output, tap) pairs that the stride leaves live.
        workspace_bytes: device memory beside the output, where a kernel of ours runs.
        bandwidth: bytes per second: as given, or else nominal, where torch tells it of the GPU.
    """

    path: str
    refused: dict[str, str]
    note: str
    output_shape: tuple[int, ...]
    output_stride: tuple[int, ...]
    dtype: torch.dtype
    precision: str
    error_factor: float | None
    rounds_operands: bool
    bytes: int
    flops: int
    workspace_bytes: int
    bandwidth: float | None = field(default=None)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def error_bound(self) -> str:
        """The bound of an output's error against float64, in words."""
        if self.error_factor is None:
            return "as PyTorch's" if self.dtype.is_complex else "exact"
        rounded = ", for operands rounded to TF32" if self.rounds_operands else ""
        power = f"2^{math.log2(self.error_factor):g}"
        return f"1/2 ulp({_name(self.dtype)}) + L * {power} * (sum |x||w| + |bias| + |add|){rounded}"

    @property
    def floor_seconds(self) -> float | None:
        """The time that the bytes alone take, where the bandwidth is known."""
        return self.bytes / self.bandwidth if self.bandwidth else None

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) pairs for a table."""
        rows = [("path", self.path)]
        rows += [(f"not {path}", reason) for path, reason in self.refused.items()]
        if self.note:
            rows.append(("note", self.note))
        rows += [
            ("output", f"{self.output_shape}, strides {self.output_stride}, {_name(self.dtype)}"),
            ("precision", self.precision),
            ("error", f"at most {self.error_bound}" if self.error_factor is not None else self.error_bound),
            ("bytes", f"{self.bytes:,}"),
            ("FLOPs", f"{self.flops:,}"),
            ("intensity", f"{self.arithmetic_intensity:.1f} FLOP/byte"),
        ]
        if self.workspace_bytes:
            rows.append(("workspace", f"{self.workspace_bytes:,} bytes"))
        if self.floor_seconds is not None and self.bandwidth is not None:
            rows.append(("floor", f"{self.floor_seconds * 1e3:.4g} ms at {self.bandwidth / 1e12:.3g} TB/s"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    add: Tensor | None = None,
    add_order: str = "before",
    activation: str = "none",
    negative_slope: float = 0.01,
    precision: str | None = None,
    skip: Tensor | None = None,
    skip_first: bool = False,
    bandwidth: float | None = None,
) -> Explanation:
    """Says how :func:`convt3d.conv_transpose3d` runs the same call, without running it.

    Takes that function's arguments, and with ``skip`` those of :func:`convt3d.conv_transpose3d_cat`. Tensors
    may be fake or on the meta device, which are answered for the current GPU, or, by an install that has
    kernels, for an SM90 one where there is none. What autocast casts counts in the type it is cast to.

    Args:
        skip, skip_first: of a concatenation, which ``path`` writes into.
        bandwidth: bytes per second that a large copy reaches, for the floor. None is what the GPU's memory
            could do by its clock, which no copy quite reaches.

    Raises:
        Exception: what the call itself raises.
    """
    if skip is not None and not isinstance(skip, Tensor):
        raise TypeError(f"convt3d: skip must be a Tensor, got {type(skip).__name__}")
    (input, weight, bias, add, skip), cast = _after_autocast(input, weight, bias, add, skip)
    own = operator_arguments(
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        add,
        add_order,
        activation,
        negative_slope,
        precision,
    )
    problem = Problem.create(*own)
    out = problem.empty_output("meta")
    y = None
    if skip is not None:
        _cat.described((*own, skip, skip_first))
        out = _cat.empty_result(problem, skip, "meta")
        y, _ = _cat.parts(out, problem.out_channels, skip_first)
    # A tensor without memory stands for one on a GPU.
    device_type = "cuda" if problem.device.type == "meta" else problem.device.type
    resolved = resolve_precision(problem.precision, device_type)
    path, refused, note, workspace = _path(problem, resolved, input, weight, bias, add, y)
    if bandwidth is None:
        bandwidth = _nominal_bandwidth(problem.device)
        if bandwidth is not None:
            note = "; ".join(text for text in (note, "the bandwidth is nominal") if text)
    tensors = [t for t in (input, weight, bias, add, skip) if t is not None]
    mode = mode_of(problem.dtype, resolved == "tf32", path) if problem.dtype.is_floating_point else None
    return Explanation(
        path=path,
        refused=refused,
        note="; ".join(text for text in (cast, note) if text),
        output_shape=tuple(int(extent) for extent in out.shape),
        output_stride=tuple(int(extent) for extent in out.stride()),
        dtype=problem.dtype,
        precision=_precision_text(problem, resolved),
        error_factor=None if mode is None else C[mode] * 2.0**-22,
        rounds_operands=mode == "tf32",
        bytes=(sum(map(_distinct_elements, tensors)) + int(out.numel())) * problem.dtype.itemsize,
        flops=live_flops(problem),
        workspace_bytes=workspace,
        bandwidth=bandwidth,
    )


def _after_autocast(input: Tensor, *others: Tensor | None) -> tuple[tuple[Any, ...], str]:
    """The tensors as the operator would get them, those of another type now without memory, and a note."""
    device_type = "cuda" if not isinstance(input, Tensor) or input.is_meta else input.device.type
    if device_type not in AUTOCAST_KEYS or not torch.is_autocast_enabled(device_type):
        return (input, *others), ""
    note = ""

    def cast(tensor: Any) -> Any:
        nonlocal note
        if not isinstance(tensor, Tensor) or tensor.device != input.device:
            return tensor
        dtype = autocast_dtype(tensor, device_type)
        if dtype == tensor.dtype:
            return tensor
        note = f"autocast casts to {_name(dtype)} first"
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            tensor = FakeTensorMode().from_tensor(tensor.detach())
        return tensor.to(dtype)

    return (cast(input), *map(cast, others)), note


def live_flops(problem: Problem) -> int:
    """FLOPs, two per multiply-add, over the live pairs of an output and a tap.

    Tap k is live at output o where ``(o + padding - k * dilation) % stride == 0``.
    Taps that fall beside the input count: a kernel multiplies them by zero.
    """
    pairs = 1
    for out, kernel, stride, padding, dilation in zip(
        problem.out_size, problem.kernel, problem.stride, problem.padding, problem.dilation, strict=True
    ):
        first = [(k * dilation - padding) % stride for k in range(kernel)]
        pairs *= sum((int(out) - f + stride - 1) // stride for f in first if f < out)
    return 2 * int(problem.batch) * (problem.in_channels // problem.groups) * problem.out_channels * pairs


def _distinct_elements(tensor: Tensor) -> int:
    """Elements in memory: an expanded dimension is read once."""
    sizes = (int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) if tensor.numel() else 0


def _nominal_bandwidth(device: torch.device) -> float | None:
    """Bytes per second: two transfers per clock of the memory; None where torch does not tell."""
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return None
    index = device.index if device.type == "cuda" else None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return 2e3 * kilohertz * bits / 8 or None


def _precision_text(problem: Problem, resolved: str) -> str:
    if problem.is_sixteen_bit:
        return f"exact {_name(problem.dtype)} products, fp32 sums and epilogue, one rounding"
    return resolved if problem.dtype == torch.float32 else _name(problem.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _path(
    problem: Problem,
    precision: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    y: Tensor | None,
) -> tuple[str, dict[str, str], str, int]:
    """(path, refused, note, workspace bytes)."""
    if problem.device.type == "cpu":
        return "cpu", dict.fromkeys(_kernel_query.KERNELS, "the tensors are on a CPU"), "", 0
    aten = "aten + tail"
    nowhere = "" if torch.cuda.is_available() else "there is no GPU here: this is the answer for CUDA"
    if problem.device.type not in ("cuda", "meta"):
        reason = f"the tensors are on {problem.device.type}"
        return aten, dict.fromkeys(_kernel_query.KERNELS, reason), "", 0
    kernel = _native.requested_kernel()
    if kernel == _native.USE_ATEN:
        return aten, dict.fromkeys(_kernel_query.KERNELS, f"{_native.KERNEL_ENV}=aten"), nowhere, 0
    if problem.batch == 0 or 0 in problem.out_size:
        note = "; ".join(text for text in (nowhere, "nothing is launched") if text)
        return aten, dict.fromkeys(_kernel_query.KERNELS, "the output is empty"), note, 0
    if _kernel_query.library() is None:
        note = "this install has no kernels, so CUDA tensors would run through ATen"
        return aten, dict.fromkeys(_kernel_query.KERNELS, _kernel_query.why_no_library()), note, 0
    note = ""
    if torch.cuda.is_available():
        index = problem.device.index if problem.device.type == "cuda" else None
        native = _native.native()
        if not native.available:
            return aten, dict.fromkeys(_kernel_query.KERNELS, native.reason), "", 0
        usable, reason = _kernel_query.current_device()
        if usable is None:
            return aten, dict.fromkeys(_kernel_query.KERNELS, reason), "", 0
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        device = _kernel_query.Device(
            10 * properties.major + properties.minor, properties.multi_processor_count
        )
    else:
        device = _ASSUMED_DEVICE
        note = f"{nowhere} on an SM90 GPU"
    answer = _kernel_query.ask(problem, precision, input, weight, bias, add, device, kernel, y)
    if not answer.kernel:
        return aten, answer.refused, note, 0
    names = list(_kernel_query.KERNELS)
    faster = names[: names.index(answer.kernel)]
    otherwise = f"it takes the call, but {answer.kernel} is likely to be faster"
    if kernel:
        otherwise = f"{_native.KERNEL_ENV} asks for {answer.kernel}"
    refused = {name: answer.refused.get(name, otherwise) for name in faster}
    return answer.kernel, refused, note, answer.workspace_bytes
