# SPDX-License-Identifier: Apache-2.0
"""Writes tests/cpp/torch_results.hpp: what PyTorch's conv_transpose3d gives on small integers.

The C++ tests, which know no torch, compare CUTLASS's definition of dgrad and the project's residue classes
with it; tests/python/test_torch_results.py makes it again and compares it with the file. Integers, so every
sum is exact, in any order and with any version of torch.

    python scripts/make_torch_results.py        # writes the file; --check: only says whether it is up to date
"""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

FILE = Path(__file__).resolve().parents[1] / "tests" / "cpp" / "torch_results.hpp"
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Sample:
    name: str
    in_size: Triple
    kernel: Triple
    stride: Triple
    padding: Triple = (0, 0, 0)
    output_padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    batch: int = 1
    in_channels: int = 2
    out_channels: int = 3


SAMPLES = (
    Sample("k3_s2_p1_op1", (2, 3, 2), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), batch=2),
    Sample("k2_s2", (2, 1, 3), (2, 2, 2), (2, 2, 2)),
    Sample("k4_s2_p1", (2, 2, 3), (4, 4, 4), (2, 2, 2), (1, 1, 1), in_channels=3, out_channels=2),
    Sample("anisotropic", (3, 2, 2), (1, 4, 3), (1, 3, 2), (0, 2, 1), (0, 2, 0)),
    Sample("dilated", (2, 3, 2), (3, 2, 3), (2, 2, 3), (2, 1, 0), (1, 0, 2), (2, 3, 2)),
    Sample("classes_without_taps", (2, 2, 1), (1, 1, 2), (3, 2, 4), (0, 0, 0), (2, 1, 3)),
)

HEADER = """\
// SPDX-License-Identifier: Apache-2.0
//
// What torch.nn.functional.conv_transpose3d gives. Written by scripts/make_torch_results.py: do not edit.
// Tensors are dense, in logical order: x (N, Cin, D, H, W), weight (Cin, Cout, kD, kH, kW) and
// y (N, Cout, D, H, W).
#pragma once

#include <cstdint>
#include <vector>

namespace convt3d::test {

struct TorchResult {
  char const* name;
  int64_t batch, in_channels, out_channels;
  int64_t in_size[3], kernel[3], stride[3], padding[3], output_padding[3], dilation[3];
  std::vector<double> x, weight, y;
};

// clang-format off
inline std::vector<TorchResult> const& torch_results() {
  static std::vector<TorchResult> const results = {
"""
FOOTER = """\
  };
  return results;
}
// clang-format on

}  // namespace convt3d::test
"""


def draw() -> Iterator[int]:
    """Integers from -9 to 9: a draw of its own, since torch's and Python's may change with their versions."""
    state = 29
    while True:
        state = (1103515245 * state + 12345) % 2**31
        yield (state >> 16) % 19 - 9


def integers(*shape: int, numbers: Iterator[int]) -> torch.Tensor:
    values = list(itertools.islice(numbers, math.prod(shape)))
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def braces(values: tuple[int, ...] | list[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


def entry(sample: Sample, numbers: Iterator[int]) -> str:
    s = sample
    x = integers(s.batch, s.in_channels, *s.in_size, numbers=numbers)
    weight = integers(s.in_channels, s.out_channels, *s.kernel, numbers=numbers)
    y = F.conv_transpose3d(x, weight, None, s.stride, s.padding, s.output_padding, 1, s.dilation)
    triples = (s.in_size, s.kernel, s.stride, s.padding, s.output_padding, s.dilation)
    lines = [f'    {{"{s.name}", {s.batch}, {s.in_channels}, {s.out_channels},']
    lines += ["     " + ", ".join(map(braces, triples)) + ","]
    for tensor, end in ((x, ","), (weight, ","), (y, "},")):
        values = braces([int(value) for value in tensor.flatten()]) + end
        lines += textwrap.wrap(values, 118, initial_indent="     ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def text() -> str:
    numbers = draw()
    return HEADER + "".join(entry(sample, numbers) for sample in SAMPLES) + FOOTER


def main() -> int:
    if "--check" in sys.argv[1:]:
        same = FILE.is_file() and FILE.read_text() == text()
        print(f"{FILE.name}: {'up to date' if same else 'DIFFERS from what torch gives'}")
        return 0 if same else 1
    FILE.write_text(text())
    print(f"{FILE.name}: written with torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
