# SPDX-License-Identifier: Apache-2.0
"""A fused model is still the user's model: hooks, copies, pickles, replicas, parameters."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

from convt3d import FusedConvTranspose3d, fuse, fuse_report, unfuse
from fuse_nets import (
    LocalNetLike,
    Residual,
    StereoLike,
    assert_close,
    calibrated,
    check_same,
    inputs,
    inside,
    spiced,
    up,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_same_object_and_back() -> None:
    model = spiced(StereoLike())
    modules = dict(model.named_modules())
    before = {name: (type(m), set(m.__dict__)) for name, m in modules.items()}
    text = repr(model)
    for _ in range(2):  # idempotent
        assert fuse(model) is model
        conv = model.conv5[0]
        assert isinstance(conv, FusedConvTranspose3d) and type(conv).__mro__.count(nn.ConvTranspose3d) == 1
        assert dict(model.named_modules()) == modules
        assert fuse_report(model)["conv5.0"].fused == ("batch_norm", "add", "relu")
    assert unfuse(model) is model
    assert {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()} == before
    assert repr(model) == text
    with pytest.raises(ValueError, match="not passed to"):
        fuse_report(model)
    assert unfuse(nn.ReLU()) is not None


def test_signature_of_the_module_stays() -> None:
    """The second positional argument is output_size, as before."""
    conv = nn.ConvTranspose3d(6, 6, 3, 2, 1)
    x = inputs()[0]
    wanted = conv(x, (6, 7, 10))
    fuse(conv)
    assert_close(conv(x, (6, 7, 10)), wanted)
    assert_close(conv(x, output_size=[6, 7, 10]), wanted)
    with pytest.raises(ValueError, match="output size"):
        conv(x, (9, 9, 9))


def test_output_size_in_a_chain(deferred: list[str]) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose3d(6, 6, 3, 2, 1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.up(x, skip.shape[2:]) + skip

    x, skip = inputs()
    for args in ((x, skip), (x, skip[..., :-1])):
        assert check_same(Sized(), args)["up"].fused == ("add",)
    assert deferred


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match="model"):
        fuse(F.relu)  # type: ignore[type-var]


def test_report_reads_well() -> None:
    class Own(nn.ConvTranspose3d):
        pass

    model = nn.ModuleDict(
        {
            "fused": Residual(),
            "alone": nn.Sequential(up(), nn.InstanceNorm3d(6)),
            "own": Own(6, 6, 2),
            "ours": FusedConvTranspose3d(6, 6, 2),
            "lazy": nn.LazyConvTranspose3d(6, 2),
            "patched": up(),
        }
    )
    model["patched"].forward = lambda x: x  # type: ignore[method-assign]
    kinds = [type(m) for m in model.values()]
    fuse(model)
    report = fuse_report(model)
    assert str(report).splitlines() == [
        "convt3d.fuse: 2 of 6 transposed convolutions replaced, 1 with what follows "
        "(in inference, from about 64 MiB on)",
        "  fused.up: conv + add + relu; then the output of 'fused'",
        "  alone.0: conv; then InstanceNorm3d '1'",
        "  own: left as it is: is a subclass, Own, which may compute something else",
        "  ours: left as it is: is a FusedConvTranspose3d already",
        "  lazy: left as it is: is lazy and has no shape yet: run the model once first",
        "  patched: left as it is: has a forward of its own",
    ]
    assert [e.name for e in report.left] == ["own", "ours", "lazy", "patched"]
    assert [e.name for e in report.fused] == ["fused.up"]
    unfuse(model)
    assert [type(m) for m in model.values()] == kinds
    with pytest.raises(KeyError):
        report["nobody"]


def test_other_upsamplings_are_not_touched() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 2), nn.Upsample(2))
    fuse(model)
    assert fuse_report(model).entries == () and type(model[0]) is nn.ConvTranspose2d


# --- hooks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["conv5.0", "conv5", "conv5.1"])
@pytest.mark.parametrize("when", ["before fuse", "after fuse"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_see_what_they_saw(where: str, when: str, kind: str) -> None:
    model = spiced(StereoLike()).eval()
    twin = copy.deepcopy(model)
    seen: dict[str, list[Tensor]] = {"model": [], "twin": []}

    def register(net: nn.Module, name: str) -> None:
        module = net.get_submodule(where)
        if kind == "forward":
            module.register_forward_hook(lambda m, args, out: seen[name].append(out * 1))
        elif kind == "forward_pre":
            module.register_forward_pre_hook(lambda m, args: seen[name].append(args[0] * 1))
        else:
            module.register_full_backward_hook(lambda m, gi, go: seen[name].append(go[0]))

    if when == "before fuse":
        register(model, "model")
    fuse(model)
    if when == "after fuse":
        register(model, "model")
    register(twin, "twin")
    grads = []
    for net in (model, twin):
        x, skip = (t.requires_grad_() for t in inputs())
        out = net(x, skip)
        grads.append(torch.autograd.grad(out.square().sum(), [x, skip, *net.parameters()]))
    assert_close(seen["model"], seen["twin"], 1e-5)
    assert_close(grads[0], grads[1], 1e-5)
    assert len(seen["model"]) == 1


@pytest.mark.parametrize("where", ["conv5", "conv5.1"])
@torch.no_grad()
def test_hooks_after_fuse_see_a_tensor(where: str, deferred: list[str]) -> None:
    """A module that the result passes has hooks now, such as fully_shard's. So in a copy of the model."""
    model = fuse(spiced(StereoLike()).eval())
    copied = copy.deepcopy(model)
    kept: list[Any] = []
    for net in (model, copied):
        handle = net.get_submodule(where).register_forward_hook(lambda m, args, out: kept.append((args, out)))
        net(*inputs())
        assert deferred == []
        (args, out), *rest = kept
        assert rest == [] and type(args[0]) is Tensor and type(out) is Tensor
        handle.remove()
        kept.clear()
        net(*inputs())
        assert deferred == ["relu"] and kept == []
        deferred.clear()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@torch.no_grad()
def test_hooks_of_a_copy_see_a_tensor(how: str, deferred: list[str]) -> None:
    """Of a module behind the convolution and of one around it; of a copy of a copy, and of a part."""
    model = fuse(spiced(StereoLike()).eval())
    for _ in range(2):
        model = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    for module in (model.conv5, model.conv5[1]):  # type: ignore[index]
        handle = module.register_forward_pre_hook(lambda m, args: None)
        model(*inputs())
        assert deferred == []
        handle.remove()
    model(*inputs())
    assert deferred.pop() == "relu"
    part = copy.deepcopy(model.conv5)
    part[1].register_forward_pre_hook(lambda m, args: None)  # type: ignore[index]
    assert type(inside(lambda: part[0](inputs()[0]), part)) is Tensor  # type: ignore[index]
    assert type(inside(lambda: model.conv5[0](inputs()[0]), model, model.conv5)) is not Tensor  # type: ignore[index]


@torch.no_grad()
def test_hooks_in_a_new_dict_are_seen(deferred: list[str]) -> None:
    model = fuse(spiced(StereoLike()).eval())
    model.conv5._forward_hooks = OrderedDict()  # type: ignore[assignment]
    model.conv5.register_forward_hook(lambda m, args, out: None)
    model(*inputs())
    assert deferred == []
    model.conv5._forward_hooks = OrderedDict()  # type: ignore[assignment]
    model(*inputs())
    assert deferred == ["relu"]


@torch.no_grad()
def test_a_copy_of_the_convolution_alone() -> None:
    """It does not bring the network along, nor the hooks of what is not copied."""

    class Hooked(StereoLike):
        def hook(self, module: nn.Module, args: Any, out: Any) -> None:
            pass

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the network is copied")

    model = fuse(spiced(Hooked()).eval())
    model.conv5.register_forward_hook(model.hook)
    x = inputs()[0]
    assert type(inside(lambda: model.conv5[0](x), model, model.conv5)) is Tensor
    alone = copy.deepcopy(model.conv5[0])
    assert type(inside(lambda: alone(x), model, model.conv5)) is not Tensor


def test_a_fused_model_is_freed_at_once() -> None:
    model = fuse(spiced(StereoLike()).eval())
    model(*inputs())
    gone = weakref.ref(model)
    gc.collect()  # what tracing has left
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_fully_shard_after_fuse(tmp_path: Path) -> None:
    """The stage frees its weights as soon as its forward ends."""
    x, skip = inputs()
    model = spiced(StereoLike()).eval()
    wanted = model(x, skip)
    wanted.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    model = fuse(copy.deepcopy(model))
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.conv5, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.zero_grad()
        found = model(x, skip)
        found.square().sum().backward()
        assert_close(found, wanted, 1e-5)
        assert_close([p.grad.to_local() for p in model.parameters()], grads, 1e-5)  # type: ignore[union-attr]
    finally:
        distributed.destroy_process_group()


def test_hooks_are_named_in_the_report() -> None:
    model = spiced(StereoLike())
    model.conv5.register_forward_hook(lambda m, args, out: None)
    fuse(model)
    entry = fuse_report(model)["conv5.0"]
    assert entry.fused == ("batch_norm",) and "hook of 'conv5'" in entry.reason


def test_a_hook_that_replaces_the_result() -> None:
    model = Residual()
    model.up.register_forward_hook(lambda m, args, out: out * 2)
    check_same(model, inputs())


def test_hooks_do_not_see_the_trace() -> None:
    seen: list[Any] = []
    model = Residual()
    model.register_forward_pre_hook(lambda m, args: seen.append(args))
    model.act.register_forward_hook(lambda m, args, out: seen.append(out))
    fuse(model)
    assert seen == []
    assert len(model._forward_pre_hooks) == 1 and len(model.act._forward_hooks) == 1


@torch.no_grad()
def test_global_hooks(deferred: list[str]) -> None:
    model = fuse(Residual())
    seen: list[Tensor] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(out))
    try:
        model(*inputs())
    finally:
        handle.remove()
    assert deferred == [] and [type(t) for t in seen] == [Tensor, Tensor, Tensor]
    model(*inputs())
    assert deferred == ["relu"]


# --- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@torch.no_grad()
def test_copies_are_fused_and_independent(how: str, deferred: list[str]) -> None:
    model = fuse(spiced(StereoLike()).eval())
    expected = model(*inputs())
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    deferred.clear()
    assert torch.equal(twin(*inputs()), expected)
    assert deferred == ["relu"]
    assert str(fuse_report(twin)) == str(fuse_report(model))
    assert_close(unfuse(twin)(*inputs()), expected)


def test_state_dict_goes_both_ways() -> None:
    plain, fused = spiced(StereoLike()).eval(), fuse(spiced(StereoLike()).eval())
    fused.load_state_dict(plain.state_dict())
    assert_close(fused(*inputs()), plain(*inputs()))
    buffer = io.BytesIO()
    torch.save(fused.state_dict(), buffer)
    buffer.seek(0)
    other = StereoLike().eval()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_close(other(*inputs()), plain(*inputs()))


def replicas(model: nn.Module, count: int) -> list[nn.Module]:
    """What ``DataParallel`` makes of a model, on one device: module by module, tensors as attributes."""
    made = []
    for _ in range(count):
        copies = {m: m._replicate_for_data_parallel() for m in model.modules()}
        for module, replica in copies.items():
            for name, child in module._modules.items():
                replica._modules[name] = None if child is None else copies[child]
            for name, parameter in module._parameters.items():
                if parameter is None:
                    replica._parameters[name] = None
                else:
                    setattr(replica, name, parameter * 1.0)
            for name, value in module._buffers.items():
                replica._buffers[name] = value
        made.append(copies[model])
    return made


@torch.no_grad()
def test_replicas_use_their_own_parameters(deferred: list[str]) -> None:
    model = fuse(spiced(StereoLike()).eval())
    expected = model(*inputs())
    copies = replicas(model, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    results: list[Tensor] = []
    deferred.clear()

    def run(network: nn.Module) -> None:
        with torch.no_grad():  # each thread has its own mode
            results.append(network(*inputs()))

    threads = [threading.Thread(target=run, args=(network,)) for network in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results) and len(results) == 2
    assert deferred == ["relu", "relu"]


def test_functional_call() -> None:
    model = fuse(Residual())
    other = Residual()
    out = torch.func.functional_call(model, dict(other.named_parameters()), inputs())
    assert_close(out, other(*inputs()))


# --- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["parametrize", "hook"])
def test_weight_norm(style: str, deferred: list[str]) -> None:
    model = spiced(LocalNetLike())
    if style == "parametrize":
        parametrizations.weight_norm(model.deconv[0], dim=1)
    else:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model.deconv[0])
        # Weights made by the hook are no leaves, which deepcopy refuses: compare with the model itself.
        expected = model(*inputs())
        assert_close(fuse(model)(*inputs()), expected)
        return
    assert check_same(model, inputs())["deconv.0"].fused == ("batch_norm", "relu", "add")
    deferred.clear()
    with torch.no_grad():
        fused = model.eval()(*inputs())
    assert deferred == ["relu"]
    conv = model.deconv[0]
    assert isinstance(conv, FusedConvTranspose3d) and parametrize.is_parametrized(conv)
    assert_close(copy.deepcopy(model)(*inputs()), fused)
    unfuse(model)
    assert parametrize.is_parametrized(conv) and not isinstance(conv, FusedConvTranspose3d)
    parametrize.remove_parametrizations(conv, "weight")
    assert type(conv) is nn.ConvTranspose3d
    assert_close(model(*inputs()), fused)


def test_parametrized_after_fuse() -> None:
    model = fuse(Residual())
    parametrizations.weight_norm(model.up)
    expected = model(*inputs())
    unfuse(model)
    assert_close(model(*inputs()), expected)
    parametrize.remove_parametrizations(model.up, "weight")
    assert type(model.up) is nn.ConvTranspose3d


def test_frozen_parameters() -> None:
    model = spiced(StereoLike())
    model.conv5.requires_grad_(False)
    assert check_same(model, inputs())["conv5.0"].fused == ("batch_norm", "add", "relu")
    assert not model.conv5[0].weight.requires_grad
    model.requires_grad_(False)
    assert not model.eval()(*inputs()).requires_grad


def test_training_steps_are_the_same() -> None:
    models = [spiced(StereoLike()).double(), StereoLike().double()]
    models[1].load_state_dict(models[0].state_dict())
    fuse(models[0])
    x, skip = (t.double() for t in inputs())
    for model in models:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            model.train(step != 2)
            optimiser.zero_grad()
            model(x, skip).square().mean().backward()
            optimiser.step()
        model.eval()
    assert_close(list(models[0].state_dict().values()), list(models[1].state_dict().values()), 1e-12)
    assert_close(models[0](x, skip), models[1](x, skip), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_other_types(dtype: torch.dtype, deferred: list[str]) -> None:
    """16-bit results are about as far from float64 as the unfused chain's."""
    model = calibrated(StereoLike(), *inputs())
    exact = copy.deepcopy(model).to(dtype).double()(*(t.double() for t in inputs(dtype)))
    model.to(dtype)
    plain = model(*inputs(dtype))
    fused = fuse(model)(*inputs(dtype))
    assert deferred == ["relu"] and fused.dtype == dtype
    error, before = ((t.double() - exact).square().mean().sqrt().item() for t in (fused, plain))
    assert error <= 1.1 * before + 1e-13
