# SPDX-License-Identifier: Apache-2.0
"""fuse() on published networks, built from their own classes, on small patches.

Needs third_party/requirements/networks.txt; skipped where that is not installed.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convt3d
from convt3d._fuse import _call
from fuse_nets import assert_close, calibrated, check_same, one_pass


def _classes(module: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"networks are not installed (third_party/requirements/networks.txt): {error}")


@pytest.fixture(autouse=True)
def _quiet_and_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def monai(name: str, *args: Any, **kwargs: Any) -> nn.Module:
    model: nn.Module = getattr(_classes("monai.networks.nets"), name)(*args, **kwargs)
    return model


def nnunet(name: str, **kwargs: Any) -> nn.Module:
    model: nn.Module = getattr(_classes("dynamic_network_architectures.architectures.unet"), name)(
        input_channels=1,
        n_stages=3,
        features_per_stage=[4, 8, 16],
        conv_op=nn.Conv3d,
        kernel_sizes=[[1, 3, 3], [3, 3, 3], [3, 3, 3]],
        strides=[[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        num_classes=2,
        n_conv_per_stage_decoder=1,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU,
        **kwargs,
    )
    return model


def patch(size: int = 16, channels: int = 1, batch: int = 1) -> tuple[Tensor]:
    return (torch.randn(batch, channels, size, size, size, generator=torch.Generator().manual_seed(3)),)


class Reconstructs(nn.Module):
    """AutoencoderKL without its random sampling."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        mean, _ = self.net.encode(x)
        return self.net.decode(mean)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    args: Callable[[], Any]
    count: int  # transposed convolutions
    fused: int  # of them with what follows
    steps: tuple[str, ...] = ()
    example: bool = False  # needs example inputs
    reason: str = ""  # found in the report
    grads: bool = True


NETWORKS = {
    "SegResNet": Network(
        lambda: monai("SegResNet", 3, 8, 1, 2, upsample_mode="deconv"), patch, 3, 3, ("add",)
    ),
    "SegResNetDS": Network(
        lambda: monai("SegResNetDS", 3, 8, 1, 2, upsample_mode="deconv", blocks_down=(1, 1, 1), dsdepth=2),
        patch,
        2,
        2,
        ("add",),
        example=True,
    ),
    "SegResNetDS-anisotropic": Network(
        lambda: monai(
            "SegResNetDS", 3, 8, 1, 2, upsample_mode="deconv", blocks_down=(1, 1, 1), resolution=(1, 1, 4)
        ),
        patch,
        2,
        2,
        ("add",),
        example=True,
    ),
    "UNet": Network(
        lambda: monai("UNet", 3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1),
        patch,
        2,
        0,
        reason="then InstanceNorm3d",
    ),
    "UNet-batch_norm": Network(
        lambda: monai(
            "UNet", 3, 1, 2, (4, 8, 16), (2, 2), norm="batch", act=("LeakyReLU", {"inplace": True})
        ),
        patch,
        2,
        1,  # the last one is bare
        ("batch_norm", "leaky_relu", "cat"),
    ),
    "UNet-batch_norm-PReLU": Network(
        lambda: monai("UNet", 3, 1, 2, (4, 8, 16), (2, 2), norm="batch", dropout=0.1),
        patch,
        2,
        1,
        ("batch_norm",),
        reason="then PReLU",
    ),
    "DynUNet": Network(
        lambda: monai(
            "DynUNet",
            3,
            1,
            2,
            [3, 3, 3, [1, 3, 3]],
            [1, 2, 2, [1, 2, 2]],
            [2, 2, [1, 2, 2]],
            filters=[4, 8, 16, 16],
            deep_supervision=True,
            res_block=True,
        ),
        patch,
        3,
        3,
        ("cat",),
    ),
    "UNETR": Network(
        lambda: monai("UNETR", 1, 2, (16,) * 3, 4, 24, 32, 2, conv_block=False),
        patch,
        10,
        4,  # the others go into blocks of their own
        ("cat",),
    ),
    "SwinUNETR": Network(
        lambda: monai("SwinUNETR", 1, 2, feature_size=12, depths=(1,) * 4, num_heads=(1, 1, 2, 2)),
        lambda: (torch.randn(1, 1, 64, 32, 32),),
        5,
        5,
        ("cat",),
        example=True,
        grads=False,
    ),
    "VQVAE": Network(
        lambda: monai(
            "VQVAE",
            3,
            1,
            1,
            (8, 8),
            num_res_layers=1,
            num_res_channels=(8, 8),
            downsample_parameters=((2, 4, 1, 1),) * 2,
            upsample_parameters=((2, 4, 1, 1, 0),) * 2,
            num_embeddings=8,
            embedding_dim=4,
        ),
        patch,
        2,
        1,
        ("relu",),
        grads=False,  # its codebook is fp32 by force
    ),
    "AutoencoderKL": Network(
        lambda: Reconstructs(
            monai(
                "AutoencoderKL",
                3,
                1,
                1,
                (1, 1),
                (8, 8),
                (False, False),
                norm_num_groups=4,
                use_convtranspose=True,
                with_encoder_nonlocal_attn=False,
                with_decoder_nonlocal_attn=False,
            )
        ),
        patch,
        1,
        0,
        reason="used 2 times",
    ),
    "RegUNet": Network(
        lambda: monai("RegUNet", 3, 1, 4, 2, extract_levels=(0, 1, 2)),
        patch,
        2,
        2,
        ("batch_norm", "relu", "add"),
    ),
    "LocalNet": Network(
        lambda: monai("LocalNet", 3, 1, 4, [0, 1, 2]), patch, 2, 2, ("batch_norm", "relu", "add"), True
    ),
    "PlainConvUNet": Network(
        lambda: nnunet("PlainConvUNet", n_conv_per_stage=1, deep_supervision=True),
        patch,
        2,
        2,
        ("cat",),
    ),
    "ResidualEncoderUNet": Network(
        lambda: nnunet("ResidualEncoderUNet", n_blocks_per_stage=1), patch, 2, 2, ("cat",)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[name]
    model, args = network.make(), network.args()
    if any(isinstance(m, nn.BatchNorm3d) for m in model.modules()):
        model = calibrated(model, *args)
    example = args if network.example else None
    report = check_same(model, args, 1e-5, example, grads=network.grads)
    assert len(report.replaced) == len(report.entries) == network.count, report
    assert len(report.fused) == network.fused, report
    assert all(entry.fused == network.steps for entry in report.fused), report
    assert network.reason in str(report)
    # What is planned is what runs.
    ran = []

    def watch(name: str) -> None:
        real = getattr(_call, name)

        def spy(*args: Any, **kwargs: Any) -> Tensor:
            ran.append("skip" in kwargs or kwargs["add"] is not None or kwargs["activation"] != "none")
            return real(*args, **kwargs)  # type: ignore[no-any-return]

        monkeypatch.setattr(_call, name, spy)

    watch("conv_transpose3d")
    watch("conv_transpose3d_cat")
    one_pass(model, args, training=False)
    assert len(ran) == network.fused and (all(ran) or network.steps == ("batch_norm",))


def test_vista3d() -> None:
    """Two heads: what a run with a class prompt shows, and the point head by symbolic tracing."""
    nets = _classes("monai.networks.nets")
    model = nets.vista3d132(encoder_embed_dim=8, in_channels=1)
    x = {"input_images": patch(32)[0], "class_vector": torch.tensor([[1]])}
    report = check_same(model, x, 1e-5, example=x)
    assert len(report.replaced) == len(report.entries) == 9
    assert {e.name for e in report.fused} == {
        f"image_encoder.up_layers_auto.{i}.upsample.deconv" for i in range(4)
    }
    assert all(entry.fused == ("add",) for entry in report.fused)
    assert "then InstanceNorm3d" in report["point_head.output_upscaling.0"].reason
    # Points take the other branch, which the run did not see.
    points = {
        "input_images": x["input_images"],
        "point_coords": torch.tensor([[[8, 8, 8], [9, 9, 9]]]),
        "point_labels": torch.tensor([[1, 0]]),
    }
    fused = one_pass(model, points, training=False)
    assert_close(fused, one_pass(convt3d.unfuse(model), points, training=False), 1e-5)


def test_deep_supervision_may_be_switched_after_fuse() -> None:
    """nnU-Net trains with it and predicts without."""
    model = nnunet("PlainConvUNet", n_conv_per_stage=1, deep_supervision=True)
    convt3d.fuse(model)
    assert len(model(*patch())) == 2
    model.decoder.deep_supervision = False  # type: ignore[union-attr]
    out = model(*patch())
    assert_close(out, convt3d.unfuse(model)(*patch()))


@pytest.mark.parametrize("name", ["SegResNet", "UNet-batch_norm", "VQVAE", "PlainConvUNet"])
def test_autocast(name: str) -> None:
    """Within eager autocast's own error against float64, and of its type."""
    network = NETWORKS[name]
    model, args = network.make().eval(), network.args()
    if any(isinstance(m, nn.BatchNorm3d) for m in model.modules()):
        model = calibrated(model, *args)
    exact = one_pass(model, args, False)

    def error() -> tuple[torch.dtype, float]:
        with torch.autocast("cpu", torch.bfloat16):
            out = one_pass(model, args, False)
        total = sum((a.double() - b.double()).square().sum() for a, b in zip(out, exact, strict=True))
        return out[0].dtype, float(total) ** 0.5

    before = error()
    convt3d.fuse(model, args)
    after = error()
    assert after[0] == before[0] and after[1] <= 1.05 * before[1]
