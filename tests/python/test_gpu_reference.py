# SPDX-License-Identifier: Apache-2.0
"""The whole reference workload on a GPU: KernelBench's own check, and the accuracy that is promised."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import Case, Tensors
from convt3d import Model, ModelNew
from convt3d._precision import round_to_tf32
from convt3d.reference import get_init_inputs, get_inputs
from families import Family, is_hopper

pytestmark = pytest.mark.gpu

families = pytest.mark.parametrize("family", ["sm80", "sm90", "auto"], indirect=True)


def models(seed: int) -> tuple[Model, ModelNew]:
    torch.manual_seed(seed)
    reference = Model(*get_init_inputs()).cuda()
    torch.manual_seed(seed)
    return reference, ModelNew(*get_init_inputs()).cuda()


def exact(model: Model, x: Tensor, add: Tensor, tf32: bool) -> Tensor:
    """float64, in tf32 mode of the rounded operands; a few samples at a time."""
    double = copy.deepcopy(model)
    if tf32:
        double.conv_transpose.weight.data = round_to_tf32(double.conv_transpose.weight.data)
        x = round_to_tf32(x)
    double = double.double()
    return torch.cat([double(a.double(), b.double()) for a, b in zip(x.split(8), add.split(8), strict=True)])


def require(family: Family, model: ModelNew, x: Tensor, add: Tensor, precision: str) -> None:
    """Skips where the family does not take the model's call; sm80 and, whichever it picks, "auto" have to."""
    conv = model.conv_transpose
    assert conv.bias is not None
    case = Case(batch=x.shape[0], cin=32, cout=64, size=(16, 16, 16), activation="x_hardswish")
    tensors = Tensors(x, conv.weight.detach(), conv.bias.detach(), add)
    taken = family.takes(replace(case, precision=precision), tensors)
    if not taken and (family.name == "auto" or (is_hopper() and precision == "tf32" and x.is_contiguous())):
        pytest.fail(f"{family} does not take the reference workload: {family.refusal}")
    if not taken:
        pytest.skip(f"{family} does not take this form: {family.refusal}")


@functools.cache
def workload(uniform: bool) -> tuple[Tensor, Tensor]:
    """One set of full inputs; drawing them takes longer than all that is done with them."""
    torch.manual_seed(2)
    x, add = get_inputs(uniform=uniform)
    return x.cuda(), add.cuda()


@functools.cache
def exact_workload(uniform: bool, tf32: bool) -> Tensor:
    with torch.no_grad():
        return exact(models(1)[0], *workload(uniform), tf32)


def test_kernelbench_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed for both models, inputs from the CPU generator, five trials, TF32 allowed, 1e-4."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.manual_seed(42)
    trial_seeds = [int(torch.randint(0, 2**32 - 1, (1,))) for _ in range(5)]
    reference, model = models(42)
    with torch.no_grad():
        for seed in trial_seeds:
            torch.manual_seed(seed)
            x, add = (t.cuda() for t in get_inputs())
            expected = reference(x, add)
            torch.cuda.synchronize()
            for name in ("sm80", "sm90", "auto") if is_hopper() else ("sm80", "auto"):
                with monkeypatch.context() as patch, Family(name, patch).runs():
                    result = model(x, add)
                torch.cuda.synchronize()
                assert result.shape == expected.shape and result.dtype == expected.dtype
                assert torch.allclose(result, expected, atol=1e-4, rtol=1e-4), (seed, name)


@families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "normal"])
def test_tf32_matches_pytorchs_default(uniform: bool, channels_last: bool, family: Family) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    reference, model = models(1)
    x, add = workload(uniform)
    if channels_last:
        x, add = (t.contiguous(memory_format=torch.channels_last_3d) for t in (x, add))
    require(family, model, x, add, "tf32")
    with torch.no_grad():
        with family.runs():
            result = model(x, add)
        assert (result - reference(x, add)).abs().max() <= 2e-5
        assert (result - exact_workload(uniform, tf32=True)).abs().max() <= 2e-5


@families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_ieee_against_float64(channels_last: bool, family: Family) -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    _, model = models(1)
    x, add = workload(uniform=False)
    if channels_last:
        x, add = (t.contiguous(memory_format=torch.channels_last_3d) for t in (x, add))
    require(family, model, x, add, "ieee")
    with torch.no_grad():
        with family.runs():
            result = model(x, add)
        error = (result - exact_workload(uniform=False, tf32=False)).abs().max().item()
    print(f"max abs error, ieee, {family}: {error:.2e}")
    assert error <= 2e-5


def test_report_31_default_precision_follows_the_switch_between_calls() -> None:
    _, model = models(5)
    torch.manual_seed(6)
    x, add = (t.cuda() for t in get_inputs(batch=2, uniform=False))
    with torch.no_grad():
        results = {}
        for setting in ("tf32", "ieee", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = setting
            result = model(x, add)
            if setting in results:
                assert torch.equal(result, results[setting])
            results[setting] = result
    assert not torch.equal(results["tf32"], results["ieee"])


def test_training_step_against_float64() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    reference, model = models(7)
    torch.manual_seed(8)
    x, add = (t.cuda() for t in get_inputs(batch=4, uniform=False))
    double = reference.double()
    ours = [x.clone().requires_grad_(), add.clone().requires_grad_()]
    exact64 = [x.double().requires_grad_(), add.double().requires_grad_()]
    model(*ours).mean().backward()
    double(*exact64).mean().backward()
    pairs = [
        *zip(ours, exact64, strict=True),
        (model.conv_transpose.weight, double.conv_transpose.weight),
        (model.conv_transpose.bias, double.conv_transpose.bias),
    ]
    for mine, true in pairs:
        assert mine is not None and mine.grad is not None
        assert true is not None and true.grad is not None
        assert (mine.grad - true.grad).abs().max() <= 1e-5 * true.grad.abs().max()
