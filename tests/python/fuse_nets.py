# SPDX-License-Identifier: Apache-2.0
"""Small networks in which a transposed convolution is followed by what real networks put behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import convt3d


def up(cin: int = 6, cout: int = 6, **options: Any) -> nn.ConvTranspose3d:
    return nn.ConvTranspose3d(cin, cout, 3, 2, 1, 1, **options)


def spiced(model: nn.Module) -> nn.Module:
    """``model`` with batch norm statistics and scales that are not the initial zeros and ones."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, -1.5, 1.5)
                nn.init.normal_(module.bias)
    return model


def calibrated(model: nn.Module, *args: Tensor) -> nn.Module:
    """``model`` in eval, with the batch norm statistics of ``args``, as after training."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    with torch.no_grad():
        model.train()(*args)
    return model.eval()


def inside(run: Callable[[], Any], *modules: nn.Module) -> Any:
    """What ``run`` returns where the stack looks like the forwards of ``modules``, from outside in."""

    def forward(self: nn.Module) -> Any:
        return inside(run, *modules[1:])

    if not modules:
        return run()
    real = type(modules[0]).forward.__code__
    forward.__code__ = forward.__code__.replace(
        co_filename=real.co_filename, co_firstlineno=real.co_firstlineno
    )
    return forward(modules[0])


class Residual(nn.Module):
    """relu(up(x) + skip), the plan that most tests use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = up()
        self.act = nn.ReLU()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.act(self.up(x) + skip)


class LocalNetLike(nn.Module):
    """BatchNorm and ReLU, then the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.deconv = nn.Sequential(up(bias=False), nn.BatchNorm3d(6), nn.ReLU(inplace=True))
        self.conv = nn.Conv3d(6, 6, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(self.deconv(x) + skip)


class StereoLike(nn.Module):
    """The hourglass of PSMNet and GwcNet: BatchNorm in a Sequential, + skip and ReLU outside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv5 = nn.Sequential(up(bias=False), nn.BatchNorm3d(6))
        self.redir = nn.Conv3d(6, 6, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        # The residual is computed after the convolution.
        return F.relu(self.conv5(x) + self.redir(skip), inplace=True)


class SumJoining(nn.Module):
    """pytorch-3dunet: the convolution's result is resized before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(6, 6, 3, 2, 1, bias=False)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.interpolate(self.up(x), size=skip.shape[2:]) + skip


class ZerosSkip(nn.Module):
    """SegResNetDS without a skip adds zeros of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up = up()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.up(x) + torch.zeros(1, device=x.device, dtype=x.dtype)


class Tail(nn.Module):
    """``tail(up(x), skip)``."""

    def __init__(self, tail: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.up = up(**options)
        self.tail = tail

    def forward(self, x: Tensor, skip: Tensor) -> Any:
        return self.tail(self.up(x), skip)


class Chain(nn.Sequential):
    """Modules one after the other; the second argument is not used."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        for module in self:
            x = module(x)
        return x


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 3, 4, 5, generator=generator).to(dtype)
    return x, torch.randn(2, 6, 6, 8, 10, generator=generator).to(dtype)


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """Every tensor within ``tolerance`` of the largest value of its counterpart, and of the same type."""
    ours, theirs = tensors(ours), tensors(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        scale = b.abs().max().item() if b.numel() else 0.0
        error = (a.double() - b.double()).abs().max().item() if b.numel() else 0.0
        assert error <= tolerance * max(scale, 1e-30), f"error {error} at scale {scale}"


def one_pass(model: nn.Module, args: Any, training: bool) -> list[Tensor]:
    """The outputs, without gradients."""
    model.train(training)
    torch.manual_seed(7)
    with torch.no_grad():
        return tensors(model(**args) if isinstance(args, dict) else model(*[a.clone() for a in args]))


def gradients(model: nn.Module, args: Any, training: bool) -> list[Tensor | None]:
    """Of floating-point inputs and parameters, in double, for a loss that weighs every output by its own."""
    model.double().train(training)
    leaves = [t.double().requires_grad_() if t.is_floating_point() else t for t in args]
    torch.manual_seed(7)
    out = [t for t in tensors(model(*(leaf.clone() for leaf in leaves))) if t.requires_grad]
    chosen = [t for t in (*leaves, *model.parameters()) if t.requires_grad]
    loss = sum(
        (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)).sum()
        for t in out
    )
    grads = torch.autograd.grad(loss, chosen, allow_unused=True)  # type: ignore[arg-type]
    model.float()
    return list(grads)


def check_same(
    model: nn.Module, args: Any, tolerance: float = 1e-6, example: Any = None, grads: bool = True
) -> convt3d.FuseReport:
    """Fuses ``model``; outputs, gradients and buffers are those of an unfused twin, in eval and in training.

    Args:
        args: positional arguments, or keyword arguments in a dict (then without gradients).
        tolerance: of outputs and buffers, relative to the largest value. Gradients are compared in double.

    Returns:
        The report. The model stays fused.
    """
    twin = copy.deepcopy(model)
    keys, kinds = list(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    parameters = dict(model.named_parameters())
    assert convt3d.fuse(model, example) is model
    assert list(model.state_dict()) == keys
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    for name, module in model.named_modules():
        if not isinstance(module, nn.ConvTranspose3d):
            assert type(module) is kinds[name]
    for training in (False, True):
        state = copy.deepcopy(twin.state_dict())
        assert_close(one_pass(model, args, training), one_pass(twin, args, training), tolerance)
        assert_close(list(model.buffers()), list(twin.buffers()), tolerance)
        if grads and not isinstance(args, dict):
            model.load_state_dict(state)
            twin.load_state_dict(state)
            ours, theirs = gradients(model, args, training), gradients(twin, args, training)
            scale = max((g.abs().max().item() for g in theirs if g is not None), default=1.0)
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a.shape == b.shape
                    assert (a - b).abs().max().item() <= 1e-10 * scale
        model.load_state_dict(state)
        twin.load_state_dict(state)
    return convt3d.fuse_report(model)
