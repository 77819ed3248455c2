# SPDX-License-Identifier: Apache-2.0
"""The yardstick itself: its constants are fixed, in one value, wherever they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from accuracy import C, judge, ulp
from cases import Case

ROOT = Path(__file__).resolve().parents[2]

# From the measurements in docs/numerics.md. Not to be raised: a result that needs more is wrong.
FIXED = {"ieee": 4.0, "tf32": 8.0, "16-bit": 4.0}


def test_constants() -> None:
    assert {mode: C[mode] for mode in FIXED} == FIXED


def test_constants_of_the_cpp_tests() -> None:
    text = (ROOT / "tests" / "cpp" / "gpu_harness.hpp").read_text()
    found = dict(re.findall(r"constexpr double kErrorFactor(\w+) = ([\d.]+);", text))
    names = {"Ieee": "ieee", "Tf32": "tf32", "Half": "16-bit"}
    assert {names[name]: float(value) for name, value in found.items()} == FIXED
    assert "error_factor(p) * 0x1p-22" in text  # the unit that they count


def test_constants_of_the_documentation() -> None:
    rows = re.findall(
        r"^\| (ieee|tf32|fp16)\b[^|]*\| (\d+) \|", (ROOT / "docs" / "numerics.md").read_text(), re.M
    )
    assert dict(rows) == {"ieee": "4", "tf32": "8", "fp16": "4"}


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "16-bit")], ids=str
)
def test_a_single_output_beyond_the_bound_is_found(dtype: torch.dtype, mode: str) -> None:
    case = Case(dtype=dtype, precision="tf32" if mode == "tf32" else "ieee", add="none", bias=False)
    tensors = case.make()
    result = case.call(tensors)
    assert not judge(case, tensors, result, mode).failure
    wrong = result.clone()
    wrong[1, 2, 3, 4, 5] += 2.0**-7 if dtype == torch.bfloat16 else 2.0**-14
    failure = judge(case, tensors, wrong, mode).failure
    assert "1 of" in failure and "(1, 2, 3, 4, 5)" in failure
    wrong = result.clone()
    wrong[0, 0, 0, 0, 0] = float("nan")
    assert "(0, 0, 0, 0, 0)" in judge(case, tensors, wrong, mode).failure


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_ulp(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = torch.tensor([1.0, -1.5, 4.0, info.tiny, 0.0], dtype=torch.float64)
    expected = torch.tensor(
        [info.eps, info.eps, 4 * info.eps, *2 * [info.tiny * info.eps]], dtype=torch.float64
    )
    assert torch.equal(ulp(values, dtype), expected)
