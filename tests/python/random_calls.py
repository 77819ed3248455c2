# SPDX-License-Identifier: Apache-2.0
"""Random calls for the differential test: each is made of one seed, so that one case can be run again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from cases import Case, Tensors, random_case, random_hopper_case

LONGEST_SUM = 96  # products of one sign that every kernel family adds up exactly enough
FLOATS = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Call:
    """One call and how it is made.

    Attributes:
        case: the valid call; ``defect`` is what is done to it, if anything.
        batched: False: 4-D input, and an add without a batch.
        layouts: of input, weight, bias, add: (order of dimensions in memory, gap between elements, offset);
            None for a dense tensor.
        wants: which of input, weight, bias, add get a gradient.
        form: of forms.FORMS.
        context: "", no_grad, inference, or autocast.
        autocast: its type.
        kernel: CONVT3D_KERNEL, on CUDA.
        switch: PyTorch's fp32_precision for convolutions, on CUDA.
        poison: whether uninitialised memory holds nan.
        one_sign: whether input and weight have no negative values.
    """

    seed: str
    case: Case
    batched: bool = True
    layouts: tuple[tuple[tuple[int, ...], int, int] | None, ...] = (None,) * 4
    wants: tuple[bool, ...] = (False,) * 4
    form: str = "eager"
    context: str = ""
    autocast: torch.dtype = torch.bfloat16
    kernel: str = "auto"
    switch: str = "tf32"
    poison: bool = True
    defect: str = ""
    one_sign: bool = False

    def make(self, device: str) -> Tensors:
        made = self.case.make(device, seed=random.Random(self.seed).getrandbits(31))
        if self.one_sign:
            made = replace(made, input=made.input.abs(), weight=made.weight.abs())
        tensors = [made.input, made.weight, made.bias, made.add]
        if not self.batched:
            tensors[0] = tensors[0][0]  # type: ignore[index]
            if tensors[3] is not None and tensors[3].dim() == 5:
                tensors[3] = tensors[3][0]
        placed = [
            None if t is None else t if layout is None else _place(t, *layout)
            for t, layout in zip(tensors, self.layouts, strict=True)
        ]
        return Tensors(*placed)  # type: ignore[arg-type]


def _place(tensor: Tensor, order: tuple[int, ...], gap: int, offset: int) -> Tensor:
    """The same values in memory of another order, with gaps that hold what no result may contain."""
    strides, step = [0] * tensor.dim(), gap
    for dim in (d for d in order if d < tensor.dim()):
        strides[dim] = step
        step *= max(tensor.shape[dim], 1)
    spoilt: Any = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 10**6
    buffer = torch.full((step + offset,), spoilt, dtype=tensor.dtype, device=tensor.device)
    return buffer.as_strided(tensor.shape, strides, offset).copy_(tensor)


def random_call(seed: str, device: str) -> Call:
    """The call of this seed; what is random is the same on every machine, not on every device."""
    rng = random.Random(seed)
    on_cuda = device == "cuda"
    case = _random_case(rng, on_cuda)
    batched = case.add == "plane" or case.batch == 0 or rng.random() >= 0.12
    if not batched:
        case = replace(case, batch=1, name="")
    call = Call(
        seed=seed,
        case=case,
        batched=batched,
        layouts=tuple(_random_layout(rng) if rng.random() < 0.25 else None for _ in range(4)),
        wants=tuple(rng.random() < 0.6 for _ in range(4)) if rng.random() < 0.3 else (False,) * 4,
        form=rng.choices(("eager", "operator", "exported", "compiled", "dynamic"), (162, 28, 6, 2, 2))[0],
        context=rng.choices(("", "no_grad", "inference", "autocast"), (75, 8, 7, 10))[0],
        autocast=rng.choice((torch.float16, torch.bfloat16)),
        kernel=rng.choices(("auto", "sm80", "sm90", "aten"), (45, 22, 22, 11))[0],
        switch=rng.choice(("tf32", "ieee")),
        poison=rng.random() < 0.5,
        defect=rng.choice(tuple(DEFECTS)) if rng.random() < 0.15 else "",
    )
    if call.form == "exported":
        call = replace(call, wants=(False,) * 4)  # an exported program of constants has no leaves
    if case.dtype not in (torch.float32, torch.float16, torch.bfloat16) or call.defect:
        call = replace(call, context="" if call.context == "autocast" else call.context)
    if call.defect == "input-empty" and case.batch == 0:
        call = replace(call, defect="padding")  # an empty batch of empty images is valid
    if not case.dtype.is_floating_point or call.defect:
        call = replace(call, wants=(False,) * 4)
    if call.form in ("compiled", "dynamic", "exported"):
        # torch.export fails where PyTorch's switches for convolutions and for RNNs differ.
        call = replace(call, poison=False, switch="tf32")
        call = replace(call, context="" if call.context == "inference" else call.context)
    if call.case.dtype.is_floating_point and _products(call.case) <= LONGEST_SUM:
        call = replace(call, one_sign=rng.random() < 0.2)
    return call


def _products(case: Case) -> float:
    """Of an output, at most."""
    taps = (ceil(k / s) for k, s in zip(case.kernel, case.stride, strict=True))
    return case.cin / case.groups * prod(taps)


def _random_case(rng: random.Random, on_cuda: bool) -> Case:
    if rng.random() < (0.45 if on_cuda else 0.2):
        case = random_hopper_case(rng)
        case = replace(
            case,
            # Wide enough for many tiles on a GPU; a CPU takes too long for that.
            cin=case.cin if on_cuda else 8,
            cout=case.cout if on_cuda else 16,
            size=case.size if on_cuda else (2, 3, case.size[2]),
            dtype=rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)),
            input_channels_last=rng.random() < 0.4,
            precision=rng.choice((None, "ieee", "tf32", "tf32")),
            name="",
        )
        if min(case.out_size()) > 0:
            return case
    case = random_case(rng, FLOATS)
    kind = rng.random()
    if kind < 0.04:
        case = replace(case, batch=0, add=rng.choice(("none", "full", "channel")))
    elif kind < 0.08:
        # Complex convolutions run as several of the real type, under PyTorch's switch unless told.
        case = replace(case, dtype=torch.complex64, activation=rng.choice(("none", "silu", "tanh")))
        case = replace(case, precision="ieee")
    elif kind < 0.11 and not on_cuda:
        case = replace(case, dtype=torch.int64, activation=rng.choice(("none", "relu")), precision=None)
    return replace(case, name="")


def _random_layout(rng: random.Random) -> tuple[tuple[int, ...], int, int]:
    order = list(range(5))
    rng.shuffle(order)
    return tuple(order), rng.choice((1, 1, 2)), rng.choice((0, 0, 1, 3, 8))


# --- what is wrong with an invalid call ---

Arguments = dict[str, Any]
Defect = Callable[[Arguments, random.Random], None]


def _set(name: str, *values: Any) -> Defect:
    def change(arguments: Arguments, rng: random.Random) -> None:
        value = rng.choice(values)
        place = rng.randrange(3)
        if rng.random() < 0.5 or not isinstance(value, int):
            arguments[name] = value
        else:  # in one dimension alone
            arguments[name] = tuple(value if i == place else v for i, v in enumerate(arguments[name]))

    return change


def _replace_tensor(name: str, make: Callable[[Tensor, Arguments], Tensor]) -> Defect:
    def change(arguments: Arguments, rng: random.Random) -> None:
        arguments[name] = make(arguments[name], arguments)

    return change


def _out_channels(arguments: Arguments) -> int:
    return int(arguments["weight"].shape[1] * arguments["groups"])


def _bias_of(extra: int) -> Callable[[Tensor, Arguments], Tensor]:
    return lambda _, a: a["weight"].new_zeros(_out_channels(a) + extra)


def _another_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype != torch.float64 else torch.float32


def _mixed_bias(_: Tensor, arguments: Arguments) -> Tensor:
    weight = arguments["weight"]
    return torch.zeros(_out_channels(arguments), dtype=_another_dtype(weight.dtype), device=weight.device)


def _large_output_padding(arguments: Arguments, rng: random.Random) -> None:
    place = rng.randrange(3)
    limit = max(arguments["stride"][place], arguments["dilation"][place])
    arguments["output_padding"] = tuple(
        limit + rng.randint(0, 2) if i == place else v for i, v in enumerate(arguments["output_padding"])
    )


def _negative_size(arguments: Arguments, rng: random.Random) -> None:
    arguments["padding"] = tuple(p + 60 if i == 1 else p for i, p in enumerate(arguments["padding"]))


def _zeros(*shape: int) -> Callable[[Tensor, Arguments], Tensor]:
    return lambda _, a: a["weight"].new_zeros(shape)


def _zeros_like(arguments: Arguments, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=arguments["weight"].device)


# By name: the change, and the class of the error where PyTorch has no such argument or accepts the call.
DEFECTS: dict[str, tuple[Defect, type[Exception]]] = {
    "stride": (_set("stride", 0, -1, -(2**40)), RuntimeError),
    "padding": (_set("padding", -1, -5), RuntimeError),
    "output_padding": (_set("output_padding", -1), RuntimeError),
    "dilation": (_set("dilation", 0, -2), RuntimeError),
    "output_padding-large": (_large_output_padding, RuntimeError),
    "padding-large": (_negative_size, RuntimeError),
    "stride-type": (_set("stride", 1.5, "2", None), TypeError),
    "dilation-length": (_set("dilation", (1, 1), (1, 1, 1, 1)), RuntimeError),
    "padding-overflow": (_set("padding", 2**62), RuntimeError),
    "groups-zero": (lambda a, r: a.update(groups=r.choice((0, -1, -(2**31)))), RuntimeError),
    "groups-indivisible": (lambda a, r: a.update(groups=a["weight"].shape[0] + 1), RuntimeError),
    "input-rank": (_replace_tensor("input", lambda t, _: t[..., 0, 0]), RuntimeError),
    "input-channels": (_replace_tensor("input", lambda t, _: torch.cat((t, t), t.dim() - 4)), RuntimeError),
    "input-empty": (_replace_tensor("input", lambda t, _: t[..., :0, :]), RuntimeError),
    "weight-rank": (_replace_tensor("weight", lambda t, _: t[0]), RuntimeError),
    "weight-empty": (_replace_tensor("weight", lambda t, _: t[..., :0]), RuntimeError),
    "weight-type": (_replace_tensor("weight", lambda t, _: t.to(_another_dtype(t.dtype))), RuntimeError),
    "weight-sparse": (_replace_tensor("weight", lambda t, _: t.to_sparse()), RuntimeError),
    "bias-length": (_replace_tensor("bias", _bias_of(1)), RuntimeError),
    "bias-short": (_replace_tensor("bias", _bias_of(-1)), RuntimeError),
    "bias-rank": (_replace_tensor("bias", _zeros(1, 1)), RuntimeError),
    "bias-type": (_replace_tensor("bias", _mixed_bias), RuntimeError),
    "bias-device": (_replace_tensor("bias", lambda t, a: _bias_of(0)(t, a).to("meta")), RuntimeError),
    "add-shape": (_replace_tensor("add", _zeros(1, 1, 1, 977)), RuntimeError),
    "add-rank": (_replace_tensor("add", _zeros(1, 1, 1, 1, 1, 1)), RuntimeError),
    "add-type": (_replace_tensor("add", lambda _, a: _zeros_like(a, torch.int32)), RuntimeError),
    "input-is-none": (lambda a, r: a.update(input=None), TypeError),
    "activation": (lambda a, r: a.update(activation=r.choice(("swish", "", "RELU"))), ValueError),
    "activation-type": (lambda a, r: a.update(activation=r.choice((None, 3, ["relu"]))), TypeError),
    "add_order": (lambda a, r: a.update(add_order="first"), ValueError),
    "precision": (lambda a, r: a.update(precision=r.choice(("fp32", "default", ""))), ValueError),
    "negative_slope": (lambda a, r: a.update(negative_slope="0.1"), TypeError),
}


def broken_arguments(call: Call, tensors: Tensors) -> Arguments:
    """The arguments of the invalid call, by name."""
    arguments: Arguments = {**vars(tensors), **call.case.arguments()}
    DEFECTS[call.defect][0](arguments, random.Random(call.seed + "defect"))
    return arguments
