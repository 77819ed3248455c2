# SPDX-License-Identifier: Apache-2.0
"""The floor of a row: the time that no implementation can beat, from ceilings measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reached in this run.

    Attributes:
        copy: bytes per second, read and written together, of a large device-to-device copy.
        fp16, bf16, tf32: FLOPs per second of a large matrix product of random values.
    """

    copy: float
    fp16: float
    bf16: float
    tf32: float


@dataclass(frozen=True)
class Floor:
    """Attributes: seconds; bound: "bytes" or "FLOPs", whichever takes longer."""

    seconds: float
    bound: str


def multiply_rate(mode: str, ceilings: Ceilings) -> float:
    """FLOPs per second at which the tensor cores can do the operator's own FLOPs in ``mode``.

    tf32 takes one product at the tf32 rate, fp16 and bf16 one at the fp16 rate. fp32 accuracy (ieee) takes
    three products, of fp16 or of tf32 parts, whichever is faster.
    """
    if mode == "tf32":
        return ceilings.tf32
    if mode == "ieee":
        return max(ceilings.fp16, ceilings.tf32) / 3
    return ceilings.fp16


def floor(byte_count: int, flops: int, mode: str, ceilings: Ceilings) -> Floor:
    """The larger of the bytes at the copy bandwidth and the FLOPs at the matrix rate."""
    moving = byte_count / ceilings.copy
    multiplying = flops / multiply_rate(mode, ceilings)
    return Floor(moving, "bytes") if moving >= multiplying else Floor(multiplying, "FLOPs")
