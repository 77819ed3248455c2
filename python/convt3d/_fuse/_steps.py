# SPDX-License-Identifier: Apache-2.0
"""What may follow a transposed convolution, recognised from the function that is called and its arguments.

The planner (on a graph) and the modules (on live calls) read the same table, so that what is planned is what
is taken at run time. Modules such as ``nn.ReLU`` need no entry: they call these functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BATCH_NORM, DROPOUT, ADD, MUL, CAT = "batch_norm", "dropout", "add", "mul", "cat"
X_HARDSWISH = "x_hardswish"


@dataclass(slots=True)  # frozen ones take three times as long to make
class Step:
    """One call that follows.

    Attributes:
        name: "batch_norm", "dropout", "add", "mul", "cat", or an activation of the table.
        operands: the tensor arguments that matter: one, or two for add, mul and cat.
        negative_slope: of leaky_relu.
        inplace: whether the call changes its first operand.
        arguments: all arguments by name, for batch_norm, dropout and cat.
    """

    name: str
    operands: tuple[Any, ...]
    negative_slope: float = 0.01
    inplace: bool = False
    arguments: Mapping[str, Any] | None = None

    @property
    def is_activation(self) -> bool:
        return self.name not in (BATCH_NORM, DROPOUT, ADD, MUL, CAT)


@dataclass(frozen=True)
class _Signature:
    name: str
    parameters: tuple[str, ...]
    inplace: bool = False


_Table = dict[Any, _Signature]
_BINARY = ("input", "other")


def _table() -> _Table:
    table: _Table = {}

    def enter(name: str, parameters: Sequence[str], *functions: Callable[..., Any]) -> None:
        for function in functions:
            table[function] = _Signature(name, tuple(parameters))

    def enter_inplace(name: str, parameters: Sequence[str], *functions: Callable[..., Any]) -> None:
        for function in functions:
            table[function] = _Signature(name, tuple(parameters), inplace=True)

    T = torch.Tensor
    flag = ("input", "inplace")
    enter("relu", flag, F.relu)
    enter("relu", ("input",), torch.relu, T.relu)
    enter_inplace("relu", ("input",), torch.relu_, T.relu_)
    enter("leaky_relu", ("input", "negative_slope", "inplace"), F.leaky_relu)
    enter_inplace("leaky_relu", ("input", "negative_slope"), F.leaky_relu_)
    enter("elu", ("input", "alpha", "inplace"), F.elu)
    enter_inplace("elu", ("input", "alpha"), F.elu_)
    enter("gelu", ("input", "approximate"), F.gelu)
    enter("silu", flag, F.silu)
    enter("sigmoid", ("input",), torch.sigmoid, T.sigmoid, F.sigmoid)
    enter_inplace("sigmoid", ("input",), torch.sigmoid_, T.sigmoid_)
    enter("tanh", ("input",), torch.tanh, T.tanh, F.tanh)
    enter_inplace("tanh", ("input",), torch.tanh_, T.tanh_)
    enter("hardswish", flag, F.hardswish)
    enter(DROPOUT, ("input", "p", "training", "inplace"), F.dropout, F.dropout3d)
    enter(
        BATCH_NORM,
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        F.batch_norm,
    )
    enter(ADD, _BINARY, torch.add, T.add, T.__add__, T.__radd__, operator.add)
    enter_inplace(ADD, _BINARY, T.add_, T.__iadd__, operator.iadd)
    enter(MUL, _BINARY, torch.mul, T.mul, T.__mul__, T.__rmul__, operator.mul)
    enter_inplace(MUL, _BINARY, T.mul_, T.__imul__, operator.imul)
    enter(CAT, ("tensors", "dim"), torch.cat, torch.concat, torch.concatenate)
    return table


_TABLE = _table()

# Questions about a tensor that its values do not answer. None counts as a use of the tensor.
METADATA = frozenset(
    {
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_sparse")
    }
    | {
        getattr(torch.Tensor, name)
        for name in (
            "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point",
            "is_complex", "element_size", "get_device", "__len__",
        )
    }
)  # fmt: skip
# What asks for a tensor's memory itself.
MEMORY = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in ("data", "__cuda_array_interface__")}
    | {torch.Tensor.data.__set__}  # type: ignore[attr-defined]
    | {
        getattr(torch.Tensor, name)
        for name in (
            "numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage",
            "__dlpack__", "__reduce_ex__", "__deepcopy__", "share_memory_", "is_shared", "__repr__",
            "__format__",
        )
    }
)  # fmt: skip
METADATA_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"})
METADATA_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point"}
)


def classify(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    """The step that a call makes, or None where no kernel or folding knows it.

    Operands are returned as they stand in the arguments, tensors or stand-ins for tensors alike.
    """
    try:
        signature = _TABLE.get(function)
    except TypeError:  # not hashable
        return None
    if signature is None or len(args) > len(signature.parameters):
        return None
    arguments = dict(zip(signature.parameters, args, strict=False))
    for key, value in kwargs.items():
        if key == "axis" and signature.name == CAT:
            key = "dim"
        if key == "alpha" and signature.name == ADD and value == 1:
            continue
        if key not in signature.parameters or key in arguments:
            return None  # out=, alpha= and the like
        arguments[key] = value
    inplace = signature.inplace or arguments.get("inplace") is True
    name = signature.name
    if name in (ADD, MUL):
        if len(arguments) != 2:
            return None
        return Step(name, (arguments["input"], arguments["other"]), inplace=inplace)
    if name == CAT:
        parts = arguments.get("tensors")
        if not isinstance(parts, (list, tuple)) or len(parts) != 2:
            return None
        return Step(CAT, tuple(parts), arguments=arguments)
    if "input" not in arguments:
        return None
    operands = (arguments["input"],)
    if name in (BATCH_NORM, DROPOUT):
        return Step(name, operands, inplace=inplace, arguments=arguments)
    if name == "elu" and arguments.get("alpha", 1.0) != 1:
        return None
    slope = 0.01
    if name == "leaky_relu":
        slope = arguments.get("negative_slope", 0.01)
        if not isinstance(slope, (int, float)):
            return None
    if name == "gelu":
        approximate = arguments.get("approximate", "none")
        if approximate not in ("none", "tanh"):
            return None
        name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return Step(name, operands, float(slope), inplace)


def cat_dim(step: Step) -> Any:
    """The dimension along which a cat call joins its operands."""
    assert step.arguments is not None
    return step.arguments.get("dim", 0)


def is_eval_dropout(step: Step) -> bool:
    """Whether a live dropout call returns its input."""
    return step.arguments is not None and step.arguments.get("training", True) is False
