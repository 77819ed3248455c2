# SPDX-License-Identifier: Apache-2.0
"""Modules stand in for PyTorch's: parameters, state, copies, output_size."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from convt3d import FusedConvTranspose3d, Model, ModelNew, conv_transpose3d
from convt3d.reference import get_init_inputs, get_inputs

SMALL = (4, 6, 3, 2, 1, 1, (6, 1, 1, 1, 1))
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((4, 6, 3), {}),
    ((4, 6, 3, 2, 1, 1), {}),
    ((4, 6, (1, 2, 3), (1, 2, 2), (0, 1, 1), (0, 1, 1)), {"bias": False}),
    ((4, 6, 2, 2, 0, 0, 2, True, 1, "zeros", "cpu", torch.float64), {}),
    ((4, 8, 3), {"groups": 4, "dilation": 2, "dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_stands_in_for_pytorchs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.ConvTranspose3d(*args, **kwargs)
    torch.manual_seed(0)
    ours = FusedConvTranspose3d(*args, **kwargs)
    assert isinstance(ours, nn.ConvTranspose3d)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    x = torch.randn(2, 4, 3, 4, 5).to(theirs.weight.dtype)
    torch.testing.assert_close(
        ours(x), theirs(x), rtol=2e-2 if x.dtype == torch.bfloat16 else 1e-5, atol=1e-2
    )
    assert ours.extra_repr() == theirs.extra_repr()
    other = FusedConvTranspose3d(*args, **kwargs)
    other.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(other.state_dict())


def test_extra_repr_names_what_is_not_the_default() -> None:
    module = FusedConvTranspose3d(
        4, 6, 3, activation="leaky_relu", negative_slope=0.2, add_order="after", precision="ieee"
    )
    assert repr(module) == (
        "FusedConvTranspose3d(4, 6, kernel_size=(3, 3, 3), stride=(1, 1, 1), activation='leaky_relu', "
        "negative_slope=0.2, add_order='after', precision='ieee')"
    )


def test_module_arguments_reach_the_operator() -> None:
    module = FusedConvTranspose3d(
        4, 6, 3, 2, 1, 1, activation="leaky_relu", negative_slope=0.3, add_order="after", precision="tf32"
    )
    x, add = torch.randn(2, 4, 3, 3, 3), torch.randn(6, 1, 1, 1)
    expected = conv_transpose3d(
        x,
        module.weight,
        module.bias,
        2,
        1,
        1,
        add=add,
        activation="leaky_relu",
        negative_slope=0.3,
        add_order="after",
        precision="tf32",
    )
    assert torch.equal(module(x, add), expected)


@pytest.mark.parametrize("size", [(5, 7, 9), (6, 8, 10), (5, 8, 9)], ids=str)
def test_report_13_output_size(size: tuple[int, int, int]) -> None:
    theirs = nn.ConvTranspose3d(4, 6, 3, 2, 1)
    ours = FusedConvTranspose3d(4, 6, 3, 2, 1, activation="relu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 3, 4, 5)
    for output_size in (size, (2, 6, *size), torch.Size(size)):
        out = ours(x, output_size=output_size)
        assert out.shape[2:] == size
        torch.testing.assert_close(out, theirs(x, output_size=size).relu())
    add = torch.randn(2, 6, *size)
    assert ours(x, add, size).shape[2:] == size


def test_report_13_output_size_with_dilation() -> None:
    ours = FusedConvTranspose3d(4, 6, 3, 2, 1, dilation=2)
    theirs = nn.ConvTranspose3d(4, 6, 3, 2, 1, dilation=2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 4, 3, 3, 3)
    for extent in (7, 8):
        size = (extent,) * 3
        torch.testing.assert_close(ours(x, output_size=size), theirs(x, output_size=size))
        assert ours(x, output_size=size).shape[2:] == size


@pytest.mark.parametrize("size", [(4, 7, 9), (7, 7, 9), (5, 7)], ids=str)
def test_output_size_out_of_reach(size: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"output size|output_size"):
        FusedConvTranspose3d(4, 6, 3, 2, 1)(torch.randn(2, 4, 3, 4, 5), output_size=size)


def test_report_13_output_size_compiled() -> None:
    torch._dynamo.reset()
    module = FusedConvTranspose3d(4, 6, 3, 2, 1, activation="silu")
    x = torch.randn(2, 4, 3, 4, 5)
    compiled = torch.compile(lambda x: module(x, output_size=(6, 7, 10)), backend="aot_eager", fullgraph=True)
    assert compiled(x).shape[2:] == (6, 7, 10)
    assert torch.equal(compiled(x), module(x, output_size=(6, 7, 10)))


def test_report_33_k4_output_is_not_short() -> None:
    assert FusedConvTranspose3d(2, 3, 4, 2, 1)(torch.randn(1, 2, 5, 6, 7)).shape[2:] == (10, 12, 14)


@pytest.mark.parametrize("seed", range(3))
def test_model_new_is_the_reference(seed: int) -> None:
    torch.manual_seed(seed)
    reference = Model(*SMALL)
    torch.manual_seed(seed)
    model = ModelNew(*SMALL)
    assert (
        list(model.state_dict())
        == list(reference.state_dict())
        == [
            "bias",
            "conv_transpose.weight",
            "conv_transpose.bias",
        ]
    )
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    x, add = torch.randn(2, 4, 3, 4, 5), torch.randn(2, 6, 6, 8, 10)
    torch.testing.assert_close(model(x, add), reference(x, add), rtol=1e-6, atol=1e-6)
    model.load_state_dict(Model(*SMALL).state_dict())


def test_the_workload_is_the_references() -> None:
    x, add = get_inputs(batch=2)
    assert x.shape == (2, 32, 16, 16, 16) and add.shape == (2, 64, 32, 32, 32)
    assert x.min() >= 0 and x.max() < 1
    assert get_init_inputs() == [32, 64, 3, 2, 1, 1, (64, 1, 1, 1, 1)]
    assert ModelNew(*get_init_inputs())(x, add).shape == add.shape


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_report_30_copies(how: str) -> None:
    model = ModelNew(*SMALL)
    x, add = torch.randn(1, 4, 3, 3, 3), torch.randn(1, 6, 6, 6, 6)
    expected = model(x, add)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert torch.equal(twin(x, add), expected)
    assert repr(twin) == repr(model)


def test_report_34_every_kind_of_weight_update_is_seen() -> None:
    """Nothing is cached between calls."""
    model = ModelNew(*SMALL)
    x, add = torch.randn(1, 4, 3, 3, 3), torch.randn(1, 6, 6, 6, 6)

    def check() -> None:
        conv = model.conv_transpose
        t = torch.nn.functional.conv_transpose3d(x, conv.weight, conv.bias, 2, 1, 1) + add
        torch.testing.assert_close(model(x, add), t * nn.functional.hardswish(t))

    check()
    with torch.no_grad():
        model.conv_transpose.weight.mul_(1.5)
    check()
    model.conv_transpose.weight.data.add_(0.25)
    check()
    model.conv_transpose.weight.data = torch.randn_like(model.conv_transpose.weight)
    check()
    assert model.conv_transpose.bias is not None
    model.conv_transpose.bias.data.zero_()
    check()
    model.load_state_dict(Model(*SMALL).state_dict())
    check()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x, add).square().mean().backward()
    optimiser.step()
    check()
    x.mul_(2)
    add.zero_()
    check()


def test_parametrizations_and_weight_norm() -> None:
    module = FusedConvTranspose3d(4, 6, 3, 2, 1, 1, activation="relu")
    parametrizations.weight_norm(module)
    x = torch.randn(1, 4, 3, 3, 3)
    first = module(x)
    torch.testing.assert_close(first, conv_transpose3d(x, module.weight, module.bias, 2, 1, 1).relu())
    first.sum().backward()
    parametrize.remove_parametrizations(module, "weight")
    torch.testing.assert_close(module(x), first)


def test_meta_and_to_empty() -> None:
    with torch.device("meta"):
        model = ModelNew(*SMALL)
    out = model(torch.randn(2, 4, 3, 3, 3, device="meta"), torch.randn(2, 6, 6, 6, 6, device="meta"))
    assert out.is_meta and out.shape == (2, 6, 6, 6, 6)
    model = model.to_empty(device="cpu")
    model.load_state_dict(Model(*SMALL).state_dict())
    assert model(torch.randn(2, 4, 3, 3, 3), torch.randn(6, 1, 1, 1)).isfinite().all()


def test_share_memory_and_half() -> None:
    model = ModelNew(*SMALL).half()
    model.share_memory()
    assert model(torch.randn(1, 4, 3, 3, 3).half(), torch.randn(1).half()).dtype == torch.float16
