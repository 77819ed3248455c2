#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training a small fused network, with batch norm, checkpoints and evaluation, beside the same one unfused.

    python examples/training_loop.py [--steps 30]

Fused and unfused start from the same weights and see the same data: their losses agree to rounding. In
training each transposed convolution runs through convt3d by itself; in evaluation, without gradients, batch
norm is folded into it, in each call.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d


class TinyUNet(nn.Module):
    """One level down, one level up; the skip is added."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(inplace=True)
        )
        self.down = nn.Sequential(
            nn.Conv3d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm3d(2 * width),
            nn.ReLU(inplace=True),
        )
        self.up = nn.ConvTranspose3d(2 * width, width, 3, 2, 1, 1, bias=False)
        self.norm = nn.BatchNorm3d(width)
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        return self.head(F.relu(self.norm(self.up(self.down(skip))) + skip))


def batch(generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Noisy volumes, and where the smooth volume beneath was positive."""
    coarse = torch.randn(2, 1, 4, 4, 4, generator=generator).to(device)
    clean = F.interpolate(coarse, scale_factor=4, mode="trilinear")
    noise = torch.randn(clean.shape, generator=generator).to(device)
    return clean + 0.3 * noise, (clean > 0).float()


def train(model: nn.Module, steps: int, device: str) -> list[float]:
    """The losses of ``steps`` steps, and at the end that of an evaluation."""
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps):
        x, y = batch(generator, device)
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    model.eval()
    with torch.inference_mode():
        x, y = batch(generator, device)
        losses.append(F.binary_cross_entropy_with_logits(model(x), y).item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    plain = TinyUNet().to(device)
    fused = convt3d.fuse(copy.deepcopy(plain))
    print(convt3d.fuse_report(fused))

    losses = {"unfused": train(plain, steps, device), "fused": train(fused, steps, device)}
    for name, values in losses.items():
        print(f"{name:8} first {values[0]:.4f}  last {values[-2]:.4f}  evaluation {values[-1]:.4f}")

    # A checkpoint of the fused network is one of the network: it loads into either.
    fresh = TinyUNet().to(device)
    fresh.load_state_dict(fused.state_dict())
    print("the fused network's state dict loads into a new, unfused one")


if __name__ == "__main__":
    main()
