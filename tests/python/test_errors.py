# SPDX-License-Identifier: Apache-2.0
"""One table of bad calls: PyTorch's class, a message with argument and value; eager, fake, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from convt3d import FusedConvTranspose3d, conv_transpose3d, explain, fuse

X, W = (2, 4, 3, 3, 3), (4, 6, 3, 3, 3)
OUT = (2, 6, 5, 5, 5)


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(
    x: tuple[int, ...] = X,
    w: tuple[int, ...] = W,
    b: tuple[int, ...] | None = None,
    add: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 4,
    **kw: Any,
) -> Callable[[], torch.Tensor]:
    return lambda: conv_transpose3d(
        tensor(x, dtypes[0]),
        tensor(w, dtypes[1]),
        None if b is None else tensor(b, dtypes[2]),
        add=None if add is None else tensor(add, dtypes[3]),
        **kw,
    )


f32, f16, f64 = torch.float32, torch.float16, torch.float64
Row = tuple[str, Callable[[], torch.Tensor], type[Exception], str]
BAD: list[Row] = [
    ("input-rank-3", call(x=(4, 3, 3)), RuntimeError, r"input must be 5-D .* got shape \(4, 3, 3\)"),
    ("input-rank-6", call(x=(1, *X)), RuntimeError, "input must be 5-D"),
    ("weight-rank-4", call(w=(4, 6, 3, 3)), RuntimeError, r"weight must be 5-D .* got shape \(4, 6, 3, 3\)"),
    ("channels", call(x=(2, 5, 3, 3, 3)), RuntimeError, "the weight's 4 in_channels, got 5 channels"),
    ("bias-length", call(b=(5,)), RuntimeError, r"bias must be 1-D with 6 elements .*got shape \(5,\)"),
    ("bias-rank", call(b=(6, 1)), RuntimeError, r"bias must be 1-D with 6 elements"),
    ("bias-length-groups", call(b=(6,), groups=2), RuntimeError, "bias must be 1-D with 12 elements"),
    (
        "add-shape",
        call(add=(2, 6, 5, 5, 4)),
        RuntimeError,
        r"add must have the output's shape \(2, 6, 5, 5, 5\)",
    ),
    ("add-channels", call(add=(3, 1, 1, 1)), RuntimeError, r"broadcast to it, got shape \(3, 1, 1, 1\)"),
    ("add-rank", call(add=(1, *OUT)), RuntimeError, "add must have the output's shape"),
    ("add-larger", call(x=(1, *X[1:]), add=OUT), RuntimeError, "add must have the output's shape"),
    ("add-unbatched", call(x=X[1:], add=OUT[:1] + OUT[1:]), RuntimeError, r"shape \(6, 5, 5, 5\)"),
    (
        "report-28-mixed-weight",
        call(dtypes=(f32, f64, f32, f32)),
        RuntimeError,
        "input is torch.float32 and weight is torch.float64",
    ),
    (
        "report-28-mixed-bias",
        call(b=(6,), dtypes=(f32, f32, f16, f32)),
        RuntimeError,
        "bias is torch.float16",
    ),
    ("report-28-mixed-add", call(add=OUT, dtypes=(f16, f16, f16, f32)), RuntimeError, "add is torch.float32"),
    (
        "mixed-device",
        lambda: conv_transpose3d(tensor(X), tensor(W).to("meta")),
        RuntimeError,
        "weight is on meta",
    ),
    (
        "output_padding-1",
        call(output_padding=1),
        RuntimeError,
        "output_padding must be smaller than either stride or dilation",
    ),
    (
        "report-11-per-dimension",
        call(stride=(2, 1, 1), output_padding=1),
        RuntimeError,
        r"output_padding \(1, 1, 1\), stride \(2, 1, 1\)",
    ),
    (
        "report-05-with-activation",
        call(output_padding=1, activation="relu"),
        RuntimeError,
        "output_padding must be smaller",
    ),
    (
        "report-12-negative-output_padding",
        call(stride=2, output_padding=-1),
        RuntimeError,
        r"output_padding must be at least 0",
    ),
    (
        "negative-padding",
        call(padding=(0, -1, 0)),
        RuntimeError,
        r"padding must be at least 0 .*got \(0, -1, 0\)",
    ),
    ("zero-stride", call(stride=0), RuntimeError, r"stride must be at least 1 .*got \(0, 0, 0\)"),
    ("negative-stride", call(stride=-2), RuntimeError, "stride must be at least 1"),
    ("zero-dilation", call(dilation=0), RuntimeError, "dilation must be at least 1"),
    ("negative-dilation", call(dilation=(1, 1, -3)), RuntimeError, "dilation must be at least 1"),
    ("report-14-zero-groups", call(groups=0), RuntimeError, "groups must be positive .*got 0"),
    ("report-14-negative-groups", call(groups=-1), RuntimeError, "groups must be positive"),
    (
        "groups-do-not-divide",
        call(groups=3),
        RuntimeError,
        "groups must divide the weight's in_channels, got groups 3",
    ),
    ("report-14-huge-groups", call(groups=2**62), RuntimeError, "groups must divide"),
    (
        "report-06-negative-output",
        call(padding=9),
        RuntimeError,
        r"output size would be negative, \(-13, -13, -13\)",
    ),
    ("report-15-dilation", call(dilation=1879048192), RuntimeError, "overflow 64-bit"),
    ("report-15-stride", call(stride=2**62), RuntimeError, "overflow 64-bit"),
    ("report-15-padding", call(padding=2**62), RuntimeError, "overflow 64-bit"),
    (
        "report-15-beyond-32-bit",
        call(stride=2**31 - 1, padding=2**32 - 3, dilation=2**31),
        RuntimeError,
        r"padding must be less than 2\^31 in every dimension, got \(4294967293, ",
    ),
    (
        "report-15-cut-to-32-bit",  # to stride 1 and padding 0 that would be, in silence
        call(stride=2**32 + 1, padding=2**32),
        RuntimeError,
        r"stride must be less than 2\^31",
    ),
    (
        "report-15-one-voxel",
        call(x=(2, 4, 1, 1, 1), stride=2**31),
        RuntimeError,
        r"stride must be less than 2\^31",
    ),
    ("beyond-64-bit", call(stride=2**63), ValueError, "stride must fit a 64-bit integer"),
    ("empty-spatial", call(x=(2, 4, 0, 3, 3)), RuntimeError, "depth, height and width must be at least 1"),
    ("no-channels", call(x=(2, 0, 3, 3, 3), w=(0, 6, 3, 3, 3)), RuntimeError, "in_channels of at least 1"),
    ("no-out-channels", call(w=(4, 0, 3, 3, 3)), RuntimeError, "out_channels of at least 1"),
    ("empty-kernel", call(w=(4, 6, 3, 0, 3)), RuntimeError, "height of at least 1"),
    ("stride-float", call(stride=1.5), TypeError, "stride must be an int .*got 1.5"),
    ("stride-bool", call(stride=True), TypeError, "stride must be an int"),
    ("stride-string", call(stride="2"), TypeError, "stride must be an int"),
    ("stride-none", call(stride=None), TypeError, "stride must be an int"),
    ("stride-floats", call(stride=(1, 2.0, 1)), TypeError, "stride must be an int"),
    (
        "padding-two",
        call(padding=(1, 1)),
        RuntimeError,
        r"padding must be an int or a sequence of 3 ints .*got \(1, 1\)",
    ),
    (
        "dilation-four",
        call(dilation=(1, 1, 1, 1)),
        RuntimeError,
        "dilation must be an int or a sequence of 3 ints",
    ),
    ("groups-float", call(groups=1.0), TypeError, "groups must be an int, got 1.0"),
    ("groups-tuple", call(groups=(1,)), TypeError, "groups must be an int"),
    (
        "activation-unknown",
        call(activation="swish"),
        ValueError,
        "activation must be one of none, relu, .*got 'swish'",
    ),
    ("activation-none", call(activation=None), TypeError, "activation must be a string"),
    (
        "add_order-unknown",
        call(add_order="first"),
        ValueError,
        "add_order must be 'before' or 'after', got 'first'",
    ),
    (
        "precision-unknown",
        call(precision="fp32"),
        ValueError,
        "precision must be None, 'ieee' or 'tf32', got 'fp32'",
    ),
    ("precision-bool", call(precision=True), TypeError, "precision must be a string"),
    ("negative_slope-string", call(negative_slope="0.1"), TypeError, "negative_slope must be a number"),
    ("int32", call(dtypes=(torch.int32,) * 4), NotImplementedError, "got torch.int32"),
    ("bool", call(dtypes=(torch.bool,) * 4), NotImplementedError, "got torch.bool"),
    (
        "complex-relu",
        call(dtypes=(torch.complex64,) * 4, activation="relu"),
        NotImplementedError,
        "'relu' is not defined for torch.complex64",
    ),
    (
        "int64-sigmoid",
        call(dtypes=(torch.int64,) * 4, activation="sigmoid"),
        NotImplementedError,
        "'sigmoid' is not defined for torch.int64",
    ),
    (
        "input-not-a-tensor",
        lambda: conv_transpose3d(1, tensor(W)),
        TypeError,
        "input must be a Tensor, got int",
    ),  # type: ignore[arg-type]
    (
        "weight-none",
        lambda: conv_transpose3d(tensor(X), None),
        TypeError,
        "weight must be a Tensor, got NoneType",
    ),  # type: ignore[arg-type]
    (
        "add-not-a-tensor",
        lambda: conv_transpose3d(tensor(X), tensor(W), add=1.0),
        TypeError,
        "add must be a Tensor, got float",
    ),  # type: ignore[arg-type]
]

rows = pytest.mark.parametrize(
    ("bad", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)


@rows
def test_eager(bad: Callable[[], torch.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bad()


@rows
def test_report_04_fake(bad: Callable[[], torch.Tensor], error: type[Exception], message: str) -> None:
    with FakeTensorMode(), pytest.raises(error, match=message):
        bad()


# PyTorch itself, for the calls that it can be given: the class of the error is the same.
PYTORCH = [
    ({"stride": 0}, RuntimeError),
    ({"padding": -1}, RuntimeError),
    ({"stride": 2, "output_padding": -1}, RuntimeError),
    ({"output_padding": 1}, RuntimeError),
    ({"groups": 0}, RuntimeError),
    ({"groups": 3}, RuntimeError),
    ({"dilation": -1}, RuntimeError),
    ({"padding": 9}, RuntimeError),
    ({"stride": 1.5}, TypeError),
    ({"stride": True}, TypeError),
    ({"stride": (1, 2)}, RuntimeError),
    ({"stride": 2**63}, ValueError),
    ({"bias": torch.zeros(5)}, RuntimeError),
]


@pytest.mark.parametrize(("arguments", "error"), PYTORCH, ids=str)
def test_class_is_pytorchs(arguments: dict[str, Any], error: type[Exception]) -> None:
    for function in (torch.nn.functional.conv_transpose3d, conv_transpose3d):
        with pytest.raises(error):
            function(tensor(X), tensor(W), **arguments)


@rows
def test_report_05_compiled(bad: Callable[[], torch.Tensor], error: type[Exception], message: str) -> None:
    """Around what it cannot trace torch.compile raises what eager raises; in one graph, its own about it."""
    torch._dynamo.reset()
    with pytest.raises(error, match=message):
        torch.compile(bad, backend="eager")()
    torch._dynamo.reset()
    with pytest.raises((error, torch._dynamo.exc.TorchDynamoException), match=message):
        torch.compile(bad, backend="eager", fullgraph=True)()


def test_the_operator_itself_checks() -> None:
    """Called directly, past the Python function."""
    op = torch.ops.convt3d.conv_transpose3d
    good = [
        tensor(X),
        tensor(W),
        None,
        [1] * 3,
        [0] * 3,
        [0] * 3,
        1,
        [1] * 3,
        None,
        "before",
        "none",
        0.01,
        "default",
    ]
    assert op(*good).shape == OUT
    for position, value, error in [
        (3, [1, 1], RuntimeError),
        (3, [0, 1, 1], RuntimeError),
        (6, 0, RuntimeError),
        (9, "later", ValueError),
        (10, "swish", ValueError),
        (12, "tf16", ValueError),
    ]:
        bad = list(good)
        bad[position] = value
        with pytest.raises(error):
            op(*bad)
    with pytest.raises(RuntimeError, match="mask must have 4 entries"):
        torch.ops.convt3d.conv_transpose3d_backward(tensor(OUT), *good, [True])


def test_what_describes_a_call_checks_types() -> None:
    """The description is made by Python code too, where no schema has looked at the arguments."""
    from convt3d._problem import Problem, single_int

    x, w, ones, zeros = tensor(X), tensor(W), (1, 1, 1), (0, 0, 0)
    good = (x, w, None, ones, zeros, zeros, 1, ones, None, "before", "none", 0.01, "default")
    assert Problem.create(*good).output_shape == OUT
    for position, value, message in [
        (0, 1, "input must be a Tensor, got int"),
        (2, 1.0, "bias must be a Tensor, got float"),
        (6, True, "groups must be an int, got True"),
        (6, 1.0, "groups must be an int, got 1.0"),
        (10, None, "activation must be a string, got None"),
        (11, "1", "negative_slope must be a number, got '1'"),
    ]:
        bad = list(good)
        bad[position] = value
        with pytest.raises(TypeError, match=message):
            Problem.create(*bad)  # type: ignore[arg-type]
    for huge in (2**63, -(2**63)):
        with pytest.raises(ValueError, match="groups must fit a 64-bit integer"):
            single_int(huge, "groups")


def test_module_arguments() -> None:
    for arguments, message in [
        ({"activation": "swish"}, "activation must be one of"),
        ({"add_order": "first"}, "add_order must be"),
        ({"precision": "fp32"}, "precision must be"),
        ({"groups": 3}, "divisible by groups"),
        ({"padding_mode": "reflect"}, "Only"),
    ]:
        with pytest.raises(ValueError, match=message):
            FusedConvTranspose3d(4, 4, 3, **arguments)  # type: ignore[arg-type]


def test_unknown_kernel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from convt3d._native import requested_kernel

    monkeypatch.setenv("CONVT3D_KERNEL", "sm70")
    with pytest.raises(ValueError, match="must be one of auto, sm80, sm90, aten, got 'sm70'"):
        requested_kernel()


@pytest.mark.parametrize(
    "number", [np.int64(2), np.uint8(2), torch.tensor(2)], ids=["int64", "uint8", "tensor"]
)
def test_integers_of_other_libraries(number: Any) -> None:
    x, w = torch.randn(1, 4, 2, 2, 2), torch.randn(4, 3, 2, 2, 2)
    for give in (number, (number, 2, number)):
        out = conv_transpose3d(x, w, None, give, groups=number)
        assert torch.equal(out, conv_transpose3d(x, w, None, 2, groups=2))
    assert explain(x, w, None, number, groups=number).output_shape == out.shape


@pytest.mark.parametrize("slope", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25)], ids=str)
def test_slopes_of_other_libraries(slope: Any) -> None:
    x, w = torch.randn(1, 4, 2, 2, 2), torch.randn(4, 3, 2, 2, 2)
    for call in (conv_transpose3d, explain):
        call(x, w, activation="leaky_relu", negative_slope=slope)
    out = conv_transpose3d(x, w, activation="leaky_relu", negative_slope=slope)
    assert torch.equal(out, conv_transpose3d(x, w, activation="leaky_relu", negative_slope=0.25))
    assert conv_transpose3d(x, w, activation="leaky_relu", negative_slope=1).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride": np.array([2, 2, 2])}, "stride must be an int or a sequence"),
        ({"stride": np.bool_(True)}, "stride must be an int or a sequence"),
        ({"stride": np.float32(2)}, "stride must be an int or a sequence"),
        ({"groups": True}, "groups must be an int, got True"),
        ({"groups": np.float32(2)}, "groups must be an int"),
        ({"groups": None}, "groups must be an int, got None"),
        ({"negative_slope": None}, "negative_slope must be a number, got None"),
        ({"negative_slope": 1j}, "negative_slope must be a number"),
        ({"negative_slope": "1"}, "negative_slope must be a number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [conv_transpose3d, explain])
def test_what_is_no_number(arguments: dict[str, Any], message: str, function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=message):
        function(torch.zeros(X), torch.zeros(W), **arguments)


def test_what_looks_like_the_wrong_number_of_ints() -> None:
    """PyTorch's module makes a tuple of any iterable: its kinds are wrong before their number is."""
    module = FusedConvTranspose3d(4, 6, 3, padding="same")
    with pytest.raises(TypeError, match="padding must be an int or a sequence of 3 ints"):
        module(torch.zeros(X))


@pytest.mark.parametrize("groups", [2**63, -(2**70)])
def test_groups_beyond_64_bits(groups: int) -> None:
    with pytest.raises(ValueError, match="groups must fit a 64-bit integer"):
        conv_transpose3d(torch.zeros(X), torch.zeros(W), groups=groups)


@pytest.mark.parametrize("fused", [False, True])
def test_a_padding_mode_that_was_set_later(fused: bool) -> None:
    module = torch.nn.Sequential(torch.nn.ConvTranspose3d(4, 6, 3), torch.nn.ReLU())
    if fused:
        fuse(module)
    else:
        module[0] = FusedConvTranspose3d(4, 6, 3)
    module[0].padding_mode = "circular"
    with pytest.raises(ValueError, match="padding_mode must be 'zeros', got 'circular'"):
        module(torch.zeros(X))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": ["relu"]}, r"activation must be a string, got \['relu'\]"),
        ({"activation": None}, "activation must be a string, got None"),
        ({"add_order": ["before"]}, "add_order must be a string"),
        ({"negative_slope": "0.1"}, "negative_slope must be a number"),
    ],
    ids=str,
)
def test_a_module_names_what_is_of_the_wrong_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FusedConvTranspose3d(2, 2, 1, **arguments)
