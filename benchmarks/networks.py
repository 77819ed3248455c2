# SPDX-License-Identifier: Apache-2.0
"""Published networks at real patch sizes, before and after convt3d.fuse() and convt3d.enable_inductor().

    python benchmarks/networks.py                           # all; JSON in out/benchmarks/networks.json
    python benchmarks/networks.py --networks 'nnunet*,vqvae' --modes fp16,fp32
    python benchmarks/networks.py --resume                  # those that the JSON does not have yet

Needs third_party/requirements/networks.txt. For each network, in inference: the share of its time in
transposed convolutions (eager, by GPU events around the modules), and times in four modes: fp32 and fp16
autocast, eager and compiled. Outputs are compared before anything is timed: fp32 in ieee mode within 1e-4 of
the output's scale; the errors of autocast and of the compiled models against that are recorded without and
with convt3d.

Times are of pairs of passes (pairs.py), on the clock, on the host and on the GPU; the JSON has each gain with
its standard error.

To compile is most of the work. Several processes do it side by side and time one after another with --lock,
each with an --output of its own; scripts/make_tables.py puts their files together.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

import _paths  # noqa: F401 (finds convt3d)
import convt3d
import report
from convt3d import _inductor_pass
from gpu import Gpu
from pairs import time_pairs

MODES = ("fp32", "fp16", "fp32-compiled", "fp16-compiled")
COLUMNS = (
    "network",
    "fused",
    "share of time",
    *(f"{m} before → after ms (×)" for m in MODES),
    "fp32 difference",
)


@dataclass(frozen=True)
class Network:
    """``args`` gives the positional arguments on a device; ``example`` whether fuse() has to watch a run."""

    make: Callable[[], nn.Module]
    args: Callable[[str], tuple[Any, ...]]
    example: bool = False


def _patch(batch: int, channels: int, *size: int) -> Callable[[str], tuple[Tensor]]:
    return lambda device: (torch.randn(batch, channels, *size, device=device),)


def _monai(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import monai.networks.nets as nets

        model: nn.Module = getattr(nets, name)(*args, **kwargs)
        return model

    return make


def _nnunet(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from dynamic_network_architectures.architectures import unet

        model: nn.Module = getattr(unet, name)(
            input_channels=1,
            n_stages=6,
            features_per_stage=[32, 64, 128, 256, 320, 320],
            conv_op=nn.Conv3d,
            kernel_sizes=[[3, 3, 3]] * 6,
            strides=[[1, 1, 1], *[[2, 2, 2]] * 5],
            num_classes=14,
            n_conv_per_stage_decoder=kwargs.pop("decoder", 2),
            conv_bias=True,
            norm_op=nn.InstanceNorm3d,
            norm_op_kwargs={"affine": True},
            nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
            **kwargs,
        )
        return model

    return make


class _Reconstructs(nn.Module):
    """AutoencoderKL without its random sampling."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        mean, _ = self.net.encode(x)
        return self.net.decode(mean)  # type: ignore[no-any-return]


def _autoencoder() -> nn.Module:
    return _Reconstructs(
        _monai(
            "AutoencoderKL", 3, 1, 1, (2, 2, 2), (32, 64, 64), (False, False, False), 4, norm_num_groups=16,
            use_convtranspose=True, with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False,
        )()
    )  # fmt: skip


def _class_prompt(device: str) -> tuple[Any, ...]:
    """VISTA3D's image, no patch, no points, and one class."""
    return (*_patch(1, 1, 128, 128, 128)(device), None, None, None, torch.tensor([[1]], device=device))


NETWORKS = {
    "nnunet-plain": Network(_nnunet("PlainConvUNet", n_conv_per_stage=2), _patch(2, 1, 128, 128, 128)),
    "nnunet-resenc": Network(
        _nnunet("ResidualEncoderUNet", n_blocks_per_stage=[1, 3, 4, 6, 6, 6], decoder=1),
        _patch(2, 1, 128, 128, 128),
    ),
    "segresnet": Network(
        _monai("SegResNet", 3, 32, 1, 14, upsample_mode="deconv"), _patch(1, 1, 160, 160, 128)
    ),
    "segresnet-ds": Network(
        _monai("SegResNetDS", 3, 32, 1, 14, upsample_mode="deconv", dsdepth=1),
        _patch(1, 1, 128, 128, 128),
        example=True,
    ),
    "unet": Network(
        _monai("UNet", 3, 1, 14, (16, 32, 64, 128, 256), (2,) * 4, num_res_units=2), _patch(4, 1, 96, 96, 96)
    ),
    "unet-batch-norm": Network(
        _monai("UNet", 3, 1, 14, (32, 64, 128, 256), (2,) * 3, norm="batch", act="leakyrelu"),
        _patch(2, 1, 128, 128, 128),
    ),
    "dynunet": Network(
        _monai("DynUNet", 3, 1, 14, [3] * 6, [1, *[2] * 5], [2] * 5, filters=[32, 64, 128, 256, 320, 320]),
        _patch(2, 1, 128, 128, 128),
    ),
    "unetr": Network(_monai("UNETR", 1, 14, (96,) * 3), _patch(2, 1, 96, 96, 96)),
    "swin-unetr": Network(
        _monai("SwinUNETR", 1, 14, feature_size=48), _patch(2, 1, 96, 96, 96), example=True
    ),
    "vqvae": Network(
        _monai(
            "VQVAE", 3, 1, 1, (96, 96, 192), num_res_layers=3, num_res_channels=(96, 96, 192),
            downsample_parameters=((2, 4, 1, 1),) * 3, upsample_parameters=((2, 4, 1, 1, 0),) * 3,
        ),
        _patch(1, 1, 128, 128, 128),
    ),
    "autoencoder-kl": Network(_autoencoder, _patch(1, 1, 96, 96, 96)),
    "vista3d": Network(
        _monai("vista3d132", encoder_embed_dim=48, in_channels=1),
        _class_prompt,
        example=True,
    ),
}  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor) and t.is_floating_point()]


def rms_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Root of the mean square of the differences, relative to the largest value of ``b``."""
    squares = sum(float((p.double() - q.double()).square().sum()) for p, q in zip(a, b, strict=True))
    return math.sqrt(squares / sum(t.numel() for t in b)) / _largest(b)


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest difference, relative to the largest value of ``b``."""
    return max(float((p.double() - q.double()).abs().max()) for p, q in zip(a, b, strict=True)) / _largest(b)


def _largest(values: list[Tensor]) -> float:
    return max(float(t.double().abs().max()) for t in values)


@contextmanager
def mode(name: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=name.startswith("fp16")):
        yield


def transposed_share(model: nn.Module, args: tuple[Any, ...]) -> float:
    """The share of an eager fp16 run's GPU time in transposed convolutions."""
    event: Any = torch.cuda.Event
    spans: list[tuple[Any, Any]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        spans.append((event(enable_timing=True), event(enable_timing=True)))
        spans[-1][0].record()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        spans[-1][1].record()

    handles = []
    for module in model.modules():
        if isinstance(module, nn.ConvTranspose3d):
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    with mode("fp16"):
        for _ in range(3):
            model(*args)
        del spans[:]
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        model(*args)
        end.record()
        torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    return sum(a.elapsed_time(b) for a, b in spans) / begin.elapsed_time(end)


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Waits until no other process with the same lock measures on this GPU."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(
    network: Network, gpu: Gpu, modes: tuple[str, ...], seconds: float, lock: Path | None = None
) -> dict[str, Any]:
    """Without eager modes among ``modes``, only what concerns the compiled ones."""
    torch.manual_seed(0)
    with torch.device("cuda"):  # parameters drawn there: on a CPU that takes longer than all measurements
        model = network.make()
    model.cuda().eval()
    args = network.args("cuda")
    with ieee(), mode("fp32"):
        exact = tensors(model(*args))
    result: dict[str, Any] = {"ms": {}, "host_ms": {}, "gpu_ms": {}, "gain": {}}
    for name in modes:
        if not name.endswith("compiled"):
            continue
        nets, result.setdefault("compiled_fused", {})[name] = _compiled(model, args, name)
        with mode(name):
            plain, ours = (difference(tensors(net(*args)), exact) for net in nets)
        result.setdefault("compiled_error", {})[name] = {"before": plain, "after": ours}
        if not ours <= max(2 * plain, 1e-5):  # nan, too
            result["wrong"] = f"{name} is off by {ours:.1e}, by {plain:.1e} without convt3d"
        with turn(lock):
            _time(result, name, gpu, nets, args, seconds)
    eager = [name for name in modes if not name.endswith("compiled")]
    if eager:
        fused = copy.deepcopy(model)
        with torch.no_grad():
            convt3d.fuse(fused, args if network.example else None)
        result |= _compared(model, fused, args, exact)
        result["fp16_error"] = _fp16_errors(network, (model, fused), [(args, exact)])
        with turn(lock):
            result["share"] = transposed_share(model, args)
            for name in eager:
                _time(result, name, gpu, (model, fused), args, seconds)
    return result


@contextmanager
def ieee() -> Iterator[None]:
    """Convolutions of fp32 at fp32 accuracy."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before


def _compared(
    model: nn.Module, fused: nn.Module, args: tuple[Any, ...], exact: list[Tensor]
) -> dict[str, Any]:
    """What fuse() did, and how far results are off."""
    report_ = convt3d.fuse_report(fused)
    with ieee(), mode("fp32"):
        off = difference(tensors(fused(*args)), exact)
    return {
        "transposed_convolutions": len(report_.entries),
        "replaced": len(report_.replaced),
        "fused": len(report_.fused),
        "report": str(report_),
        "fp32_difference": off,
        **({} if off <= 1e-4 else {"wrong": f"fp32 differs by {off:.1e}"}),  # nan, too
    }


def _fp16_errors(
    network: Network, nets: tuple[nn.Module, nn.Module], inputs: list[tuple[tuple[Any, ...], list[Tensor]]]
) -> dict[str, float]:
    """Of both networks under fp16 autocast, over ``inputs`` with their exact results and two more of these.

    The largest error of millions of outputs depends on a few roundings; the root of the mean square does not.
    """
    for _ in range(2):
        args = network.args("cuda")
        with ieee(), mode("fp32"):
            inputs = [*inputs, (args, tensors(nets[0](*args)))]
    errors: dict[str, float] = {}
    with mode("fp16"):
        for name, net in zip(("before", "after"), nets, strict=True):
            results = [(tensors(net(*args)), exact) for args, exact in inputs]
            errors[name] = max(difference(*pair) for pair in results)
            errors[f"{name}_rms"] = math.sqrt(
                sum(rms_difference(*pair) ** 2 for pair in results) / len(results)
            )
    return errors


def _time(
    result: dict[str, Any], name: str, gpu: Gpu, nets: tuple[Any, Any], args: tuple[Any, ...], seconds: float
) -> None:
    """Times of the model before and after, into the result."""
    before, after = (lambda net=net: net(*args) for net in nets)
    with mode(name):
        pairs = time_pairs(gpu, before, after, seconds)
    for key, times in (("ms", pairs.wall), ("host_ms", pairs.host), ("gpu_ms", pairs.gpu)):
        result[key][name] = [times.before, times.after]
    gains = {key: vars(pairs)[key].gain for key in ("wall", "host", "gpu")}
    result["gain"][name] = {"pairs": len(pairs.wall.pairs), **gains}


def _compiled(model: nn.Module, args: tuple[Any, ...], name: str) -> tuple[tuple[Any, Any], int]:
    """The model compiled without convt3d and with enable_inductor(), and how many calls that fused.

    A backend of its own for each: what is compiled for one object serves another of its class otherwise. And
    no graph from a cache, for which the pass would not be run again, so that there was nothing to count.
    """
    nets, graphs, fused = [], [], 0
    real = _inductor_pass.fuse_graph

    def counted(graph: fx.Graph, device_types: Collection[str]) -> int:
        nonlocal fused
        found = real(graph, device_types)
        fused += found
        return found

    torch._dynamo.reset()
    for enabled in (False, True):
        convt3d.enable_inductor() if enabled else convt3d.disable_inductor()
        backend = _CountingInductor()
        net = torch.compile(copy.deepcopy(model), dynamic=False, backend=backend)
        with (
            mode(name),
            mock.patch.object(_inductor_pass, "fuse_graph", counted),
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            net(*args)
        nets.append(net)
        graphs.append(backend.graphs)
    convt3d.disable_inductor()
    assert all(graphs), "one of them was not compiled"
    return (nets[0], nets[1]), fused


class _CountingInductor:
    """torch.compile's own backend."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        return compile_fx(graph, inputs)


def before_and_after(result: dict[str, Any], mode_name: str) -> str:
    """Milliseconds before, and after: before less the median of what pairs of passes gain; their ratio.

    Medians of each by itself differ by more, where a host's speed drifts (pairs.py). Empty where nothing was
    measured.
    """
    before, after = result.get("ms", {}).get(mode_name, (0.0, 0.0))
    if mode_name in result.get("gain", {}):
        after = before - result["gain"][mode_name]["wall"][0]
    return f"{before:.2f} → {after:.2f} ({before / after:.2f})" if before else ""


def cells(name: str, result: dict[str, Any]) -> list[str]:
    if "failure" in result:
        return [name, result["failure"], *[""] * (len(COLUMNS) - 2)]
    times = []
    for mode_name in MODES:
        times.append(before_and_after(result, mode_name))
    compared = "fp32_difference" in result
    fused = f"{result['fused']} of {result['transposed_convolutions']}" if compared else ""
    share = f"{result['share'] * 100:.0f} %" if compared else ""
    verdict = f"{result['fp32_difference']:.1e}" if compared else ""
    return [name, fused, share, *times, result.get("wrong", verdict)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--networks", default="*", help="names or globs, by commas: " + ", ".join(NETWORKS))
    parser.add_argument("--modes", default=",".join(MODES), help="by commas (all)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="by the clock, and as many of GPU time (%(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what the JSON has already")
    parser.add_argument("--time-limit", type=float, help="seconds; start no network after that")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"), help="default: %(default)s")
    parser.add_argument(
        "--lock", type=Path, help="a file that processes on one GPU share: one measures at a time"
    )
    parser.add_argument("--list", action="store_true", help="print the names; needs no GPU")
    arguments = parser.parse_args()
    patterns = arguments.networks.split(",")
    chosen = [name for name in NETWORKS if any(fnmatchcase(name, pattern) for pattern in patterns)]
    modes = tuple(name for name in MODES if name in arguments.modes.split(","))
    if not chosen or not modes:
        parser.error("nothing is called so; --list prints the names")
    if arguments.list:
        print("\n".join(chosen))
        return 0
    if not torch.cuda.is_available():
        print("networks.py: there is no NVIDIA GPU that torch can use: nothing to measure", file=sys.stderr)
        return 2
    start, gpu, console = time.monotonic(), Gpu(), report.console()
    file = arguments.output / "networks.json"
    results = json.loads(file.read_text())["networks"] if arguments.resume and file.is_file() else {}
    arguments.output.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in chosen:
        if name in results:
            continue
        if arguments.time_limit is not None and time.monotonic() - start > arguments.time_limit:
            console.line("the time limit is reached: --resume goes on")
            break
        try:
            results[name] = measure(NETWORKS[name], gpu, modes, arguments.seconds, arguments.lock)
        except Exception as error:
            results[name] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        console.step(", ".join(cells(name, results[name])))
        file.write_text(json.dumps({**gpu.describe(), "networks": results}, indent=1) + "\n")
        gpu.release()
    console.table(
        f"{gpu.name}: inference", COLUMNS, [cells(name, result) for name, result in results.items()]
    )
    return int(any("failure" in r or "wrong" in r for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
