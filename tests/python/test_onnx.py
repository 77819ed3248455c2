# SPDX-License-Identifier: Apache-2.0
"""ONNX knows PyTorch's operators and not ours: networks are exported as they were before fuse()."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from convt3d import FusedConvTranspose3d, _functional, conv_transpose3d, conv_transpose3d_cat, fuse
from convt3d._activations import ACTIVATIONS

CALL: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}


class Net(nn.Module):
    """A fused chain, a module of ours, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 6, 3, 2, 1, 1)
        self.ours = FusedConvTranspose3d(6, 3, 2, 2, activation="x_hardswish", precision="ieee")

    def forward(self, x: Tensor, skip: Tensor, wide: Tensor) -> Tensor:
        y = self.ours(torch.relu(self.up(x) + skip), wide)
        return conv_transpose3d_cat(y, self.ours.weight[:3], None, 2, skip=y.repeat(1, 1, 2, 2, 2))


@pytest.mark.parametrize("dynamo", [False, True])
def test_export(dynamo: bool) -> None:
    onnx = pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    x, skip, wide = torch.randn(1, 4, 2, 2, 2), torch.randn(1, 6, 4, 4, 4), torch.randn(1, 3, 8, 8, 8)
    model = fuse(Net().eval(), (x, skip, wide))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own
        torch.onnx.export(model, (x, skip, wide), file, dynamo=dynamo)
    nodes = onnx.load_from_string(file.getvalue()).graph.node
    assert [node.op_type for node in nodes].count("ConvTranspose") == 3
    assert all(node.domain in ("", "ai.onnx") for node in nodes)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_exported(activation: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, 3, 3, 3), torch.randn(6)
    add, skip = torch.randn(6, 1, 1, 1), torch.randn(2, 3, 6, 8, 10)
    own: dict[str, Any] = {
        **CALL,
        "add": add,
        "add_order": order,
        "activation": activation,
        "negative_slope": 0.3,
    }

    def call(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = conv_transpose3d_cat(x, w, b, skip=skip, skip_first=True, **own)
        return conv_transpose3d(x, w, b, **own), first, conv_transpose3d_cat(x[0], w, b, skip=skip[0], **own)

    expected = call(x, w, b)
    monkeypatch.setattr(_functional, "_is_in_onnx_export", lambda: True)
    graph = make_fx(call)(x, w, b)
    assert not any("convt3d" in str(node.target) for node in graph.graph.nodes)
    for got, true in zip(graph(x, w, b), expected, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The type is the convolution's, as without ONNX."""
    x, w, add = torch.randn(1, 4, 2, 2, 2), torch.randn(4, 6, 2, 2, 2), torch.randn(1, 6, 4, 4, 4)
    monkeypatch.setattr(_functional, "_is_in_onnx_export", lambda: True)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv_transpose3d(x, w, None, 2, add=add).dtype == torch.bfloat16
        assert conv_transpose3d_cat(x, w, None, 2, skip=add).dtype == torch.bfloat16
