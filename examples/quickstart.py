#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Five ways in: the function, the module, explain(), gradients, and fuse() on a network that exists already.

    python examples/quickstart.py

Runs anywhere; on a machine with an NVIDIA GPU the calls reach the CUDA kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(2, 32, 8, 8, 8, device=device)
skip = torch.randn(2, 64, 16, 16, 16, device=device)


class Decoder(nn.Module):
    """A decoder step as it is usually written."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(32, 64, 3, stride=2, padding=1, output_padding=1, bias=False)
        self.norm = nn.BatchNorm3d(64)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.relu(self.norm(self.up(x)) + skip)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


# 1. The function: torch.nn.functional.conv_transpose3d's arguments, then what is fused.
weight = torch.randn(32, 64, 3, 3, 3, device=device) / 30
y = convt3d.conv_transpose3d(
    x, weight, stride=2, padding=1, output_padding=1, add=skip, activation="relu", precision="ieee"
)
wanted = F.relu(F.conv_transpose3d(x.double(), weight.double(), None, 2, 1, 1) + skip)
print(f"function   max error {relative_error(y, wanted):.1e} of the largest value, against float64")

# 2. The module: an nn.ConvTranspose3d with the same parameters and state_dict keys.
up = convt3d.FusedConvTranspose3d(32, 64, 3, 2, 1, 1, activation="leaky_relu", negative_slope=0.1).to(device)
print(f"module     {up}")
print(f"           output {tuple(up(x, add=skip).shape)}")

# 3. Which kernel takes a call, and why not a faster one.
print(f"explain\n{convt3d.explain(x, weight, stride=2, padding=1, output_padding=1, add=skip)}")

# 4. Gradients.
up(x, add=skip).square().mean().backward()
assert up.weight.grad is not None
print(f"gradient   of the weight, norm {up.weight.grad.norm().item():.3f}")

# 5. An existing network: the same object, with what follows each transposed convolution taken in. Results
# below 64 MiB, such as these, do not wait for it (docs/fuse.md), so nothing differs here.
model = Decoder().to(device).eval()
with torch.inference_mode():
    before = model(x, skip)
    convt3d.fuse(model)
    after = model(x, skip)
print(convt3d.fuse_report(model))
print(f"fuse       max difference {relative_error(after, before):.1e} of the largest value")
convt3d.unfuse(model)
