#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A MONAI network with convt3d.fuse(): what was replaced, the difference, and the time before and after.

    pip install --no-deps -r third_party/requirements/networks.txt
    python examples/monai_network.py [--network SegResNet|SegResNetDS|UNet|DynUNet] [--size 64] [--autocast]

`--size 128` is a usual patch on a GPU. On a CPU the convolutions are PyTorch's own before and after, so only
the difference is of interest there; results below 64 MiB run unfused (docs/fuse.md), and it is zero.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import convt3d


def build(name: str) -> nn.Module:
    try:
        from monai.networks import nets
    except ImportError:
        raise SystemExit(
            "this example needs MONAI: pip install --no-deps -r third_party/requirements/networks.txt"
        ) from None

    if name == "SegResNet":
        return nets.SegResNet(spatial_dims=3, init_filters=16, out_channels=3, upsample_mode="deconv")
    if name == "SegResNetDS":
        return nets.SegResNetDS(spatial_dims=3, init_filters=16, out_channels=3, upsample_mode="deconv")
    if name == "UNet":
        return nets.UNet(3, 1, 3, (16, 32, 64, 128), (2, 2, 2), num_res_units=2, norm="batch", act="relu")
    return nets.DynUNet(3, 1, 3, [3] * 4, [1, 2, 2, 2], [2, 2, 2])


def milliseconds(run: Callable[[], Tensor], repeats: int) -> float:
    """The median time of ``run``."""
    times = []
    for _ in range(repeats + 1):  # the first is a warm-up
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[1:])[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--network", choices=("SegResNet", "SegResNetDS", "UNet", "DynUNet"), default="SegResNet"
    )
    parser.add_argument("--size", type=int, default=64, help="voxels along each side of the patch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--autocast", action="store_true", help="fp16 on a GPU, bf16 on a CPU")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build(options.network).to(device).eval()
    x = torch.randn(1, 1, *[options.size] * 3, device=device)

    def run() -> Tensor:
        with torch.autocast(device) if options.autocast else contextlib.nullcontext():
            out = model(x)
        return out[0] if isinstance(out, (list, tuple)) else out

    with torch.inference_mode():
        before, time_before = run(), milliseconds(run, options.repeats)
        # The example input lets fuse() see into networks that torch.fx cannot trace, such as SegResNetDS.
        convt3d.fuse(model, x)
        after, time_after = run(), milliseconds(run, options.repeats)

    print(convt3d.fuse_report(model))
    difference = ((after - before).abs().max() / before.abs().max()).item()
    print(
        f"{options.network}, {options.size}^3 on {device}: difference {difference:.1e} of the largest value"
    )
    print(f"before {time_before:.1f} ms, after {time_after:.1f} ms")


if __name__ == "__main__":
    main()
