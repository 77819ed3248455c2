# SPDX-License-Identifier: Apache-2.0
"""Tensors that are spread over processes: values and gradients are those of the whole ones."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from convt3d import conv_transpose3d, conv_transpose3d_cat, fuse

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")

GEOMETRY: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}
OUT = (6, 8, 10)


def _call(options: dict[str, Any], x: Tensor, w: Tensor, b: Tensor, add: Tensor, skip: Tensor) -> Tensor:
    if options["cat"]:
        return conv_transpose3d_cat(x, w, b, skip=skip, add=add, **options["own"])
    return conv_transpose3d(x, w, b, add=add, **options["own"])


def _check(mesh: Any, batch: int, input: Any, weight: Any, add: tuple[int, ...], **options: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.manual_seed(0)
    shapes = ((batch, 4, 3, 4, 5), (4, 6, 3, 3, 3), (6,), add, (batch, 3, *OUT))
    plain = [torch.randn(shape).requires_grad_() for shape in shapes]
    follows = input if len(add) == 5 and add[0] == batch else Replicate()
    placements = (input, weight, Replicate(), follows, Replicate())
    spread = [
        distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip(plain, placements, strict=True)
    ]
    expected, out = _call(options, *plain), _call(options, *spread)  # type: ignore[arg-type]
    assert out.shape == expected.shape and out.stride() == expected.stride()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
    expected.square().sum().backward()
    out.square().sum().backward()
    for got, true in zip(spread, plain, strict=True):
        if true.grad is not None:
            whole = got.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(whole, true.grad, rtol=1e-4, atol=1e-4 * true.grad.abs().max().item())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(_call(options, *spread).full_tensor(), out.full_tensor())  # type: ignore


def _check_second_derivatives(mesh: Any) -> None:
    """In ATen's operators, whose rules are DTensor's; with a precision of its own, in ours.

    Where a batch is split, torch 2.13's rule for the former gives a wrong gradient of the weight's gradient.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(1)
    x, w = torch.randn(3, 4, 3, 4, 5), torch.randn(4, 6, 3, 3, 3)
    for precision, place in ((None, Replicate()), ("ieee", Replicate()), ("ieee", Shard(0))):
        found = []
        for spread in (False, True):
            pair = [x.clone(), w.clone()]
            if spread:
                pair = [
                    distribute_tensor(t, mesh, [p]) for t, p in zip(pair, (place, Replicate()), strict=True)
                ]
            pair = [t.requires_grad_() for t in pair]
            out = conv_transpose3d(*pair, activation="tanh", precision=precision, **GEOMETRY)
            first = torch.autograd.grad(out.sum(), pair, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), pair)  # type: ignore[arg-type]
            found.append([g.full_tensor() if spread else g for g in (*first, *second)])  # type: ignore
        for true, got in zip(*found, strict=True):
            torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4 * true.abs().max().item())


def _cases() -> Iterator[dict[str, Any]]:
    from torch.distributed.tensor import Replicate, Shard

    own = [
        {"activation": "x_hardswish", **GEOMETRY},
        {"activation": "silu", "add_order": "after", "precision": "ieee", **GEOMETRY},
        {"precision": "tf32", **GEOMETRY},
    ]
    places = (Replicate(), Shard(0), Shard(1), Shard(4))
    for at, (place, cat, batch) in enumerate(itertools.product(places, (False, True), (3, 1))):
        adds = ((batch, 6, *OUT), (6, 1, 1, 1), (1, 6, 1, 8, 1))
        weight = Shard(1) if at % 2 else Replicate()
        yield {
            "batch": batch,
            "input": place,
            "weight": weight,
            "add": adds[at % 3],
            "cat": cat,
            "own": own[at % 3],
        }


def _process(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.tensor import (
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
        init_device_mesh,
    )

    try:
        mesh = init_device_mesh("cpu", (2,))
        # The first call is a compiled one: nothing has met a DTensor before.
        torch.manual_seed(0)  # as the parameters, the same in both processes
        x, w = torch.randn(2, 4, 3, 3, 3), torch.randn(4, 6, 2, 2, 2)
        model = nn.Sequential(nn.ConvTranspose3d(4, 6, 3, 2, 1, 1), nn.ReLU())
        expected = model(x)
        whole = distribute_tensor(x, mesh, [Replicate()])
        spread = whole.redistribute(placements=[Shard(0)])
        net = distribute_module(fuse(model), mesh)
        for run in (torch.compile(net, backend="aot_eager"), net):
            for given in (whole, spread):
                torch.testing.assert_close(run(given).full_tensor(), expected)

        for case in _cases():
            _check(mesh, **case)

        _check_second_derivatives(mesh)

        for given, weight in ((whole, w), (x, distribute_tensor(w, mesh, [Replicate()]))):
            with pytest.raises(RuntimeError, match="must all be DTensors of one device mesh"):
                conv_transpose3d(given, weight)
        with pytest.raises(RuntimeError, match="input must have the weight's 2 in_channels"):
            conv_transpose3d(whole, distribute_tensor(w[:2], mesh, [Replicate()]))
        with torch.autocast("cpu", torch.bfloat16):
            assert conv_transpose3d(spread, distribute_tensor(w, mesh, [Replicate()])).dtype == torch.bfloat16
    finally:
        distributed.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_process, (str(tmp_path / "store"),), 2)  # type: ignore[no-untyped-call]


FIRST_CALL = """
import sys, torch
from torch import distributed
distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=0, world_size=1)
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
import convt3d
mesh = init_device_mesh("cpu", (1,))
whole = torch.randn(1, 2, 3, 3, 3), torch.randn(2, 4, 2, 2, 2)
x, w = (distribute_tensor(t, mesh, [Replicate()]) for t in whole)
with torch.inference_mode():
    if sys.argv[2] == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            out = convt3d.conv_transpose3d(x, w, stride=2)
    else:
        out = torch.ops.convt3d.conv_transpose3d(
            x, w, None, (2, 2, 2), (0,) * 3, (0,) * 3, 1, (1,) * 3, None, "before", "none", 0.01, "default"
        )
expected = torch.nn.functional.conv_transpose3d(*whole, stride=2)
torch.testing.assert_close(out.full_tensor().float(), expected, rtol=0.02, atol=0.02)
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["autocast", "composite"])
def test_the_first_call_of_a_process(way: str, tmp_path: Path) -> None:
    """In inference mode, where nothing of autograd comes between."""
    command = [sys.executable, "-c", FIRST_CALL, str(tmp_path / "store"), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
