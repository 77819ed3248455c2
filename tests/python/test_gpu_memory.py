# SPDX-License-Identifier: Apache-2.0
"""Memory on a GPU: what a call takes, where there is not enough, and tensors beyond 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accuracy import assert_accurate
from cases import Case
from convt3d import conv_transpose3d
from families import Family, own_families

pytestmark = pytest.mark.gpu

CASE = Case(batch=4, cin=32, cout=64, size=(8, 8, 8), activation="x_hardswish", precision="ieee")


def case_for(family: Family) -> Case:
    return replace(CASE, precision="tf32") if family.name == "sm90" else CASE


@own_families
def test_memory_of_a_call(family: Family) -> None:
    """The output and one workspace, and nothing that grows."""
    case = case_for(family)
    tensors = case.make("cuda")
    family.require(case, tensors)
    workspace = case.explain(tensors).workspace_bytes
    with torch.no_grad():
        out = family.call(case, tensors)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(1000):
            out = case.call(tensors)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    slack = 2**21  # the allocator rounds up
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + workspace + slack


def test_out_of_memory_leaves_everything_usable() -> None:
    x = torch.zeros(1, 8, 128, 128, 128, device="cuda").expand(256, -1, -1, -1, -1)
    w = torch.zeros(8, 64, 2, 2, 2, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        conv_transpose3d(x, w, stride=2)  # 1 TiB
    tensors = CASE.make("cuda")
    assert_accurate(CASE, tensors, CASE.call(tensors))


@pytest.mark.parametrize("family", ["sm80"], indirect=True)
def test_a_workspace_that_does_not_fit_raises(family: Family) -> None:
    """It does not send the call to ATen: that would be another arithmetic, chosen by the free memory."""
    case = replace(CASE, batch=16, size=(32, 32, 32), add="none", dtype=torch.float16)
    tensors = case.make("cuda")
    out_bytes, workspace = 2 * 16 * 64 * 64**3, case.explain(tensors).workspace_bytes
    assert workspace >= 2**25  # NCDHW: the prepared x is in it
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    allowed = torch.cuda.memory_reserved() + out_bytes + 2**23
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            case.call(tensors)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    tensors = CASE.make("cuda")
    assert_accurate(CASE, tensors, family.call(CASE, tensors))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm80"], indirect=True)
def test_samples_too_far_apart_for_one_launch(family: Family) -> None:
    """sm80 reads this x in place, and addresses 2^31 elements in one launch: it needs one launch a sample."""
    distance = 2**30
    # Of stride 3, so that one sample alone is computed by the same kernel and not by that for small problems.
    case = replace(CASE, batch=3, stride=(3, 3, 3), input_channels_last=True, dtype=torch.float16)
    t = case.make("cuda")
    _, c, d, h, w = t.input.shape
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of GPU memory")
    buffer = torch.empty(2 * distance + c * d * h * w, dtype=torch.float16, device="cuda")
    x = buffer.as_strided(t.input.shape, (distance, 1, h * w * c, w * c, c)).copy_(t.input)
    far = replace(t, input=x)
    e = case.explain(far)
    assert e.path == "sm80" and e.output_stride[1] == 1
    assert e.workspace_bytes < t.weight.nbytes + x.nbytes, "x is not read in place"
    out = family.call(case, far)
    assert_accurate(case, far, out)
    for i in range(3):
        one = replace(case, batch=1)
        assert t.add is not None
        alone = family.call(one, replace(t, input=x[i : i + 1], add=t.add[i : i + 1]))
        assert torch.equal(out[i : i + 1], alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "channels_last", "dtype"),
    [("sm80", False, torch.float16), ("sm80", True, torch.float16), ("sm90", False, torch.float32)],
    ids=["sm80-nchw", "sm80-nhwc", "sm90-nchw"],
    indirect=["family"],
)
def test_report_09_more_than_2_to_31_elements(
    family: Family, channels_last: bool, dtype: torch.dtype
) -> None:
    """2^31 + outputs: the ends are compared with the same samples alone."""
    batch = 1025  # of 64 channels of 32^3: 2^21 outputs a sample
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    case = replace(case_for(family), add="one", dtype=dtype, size=(16, 16, 16))
    small = replace(case, batch=3, input_channels_last=channels_last)
    t = small.make("cuda")
    x = torch.zeros((batch, 32, 16, 16, 16), dtype=dtype, device="cuda")
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    places = (0, 512, batch - 1)
    for place, sample in zip(places, t.input, strict=True):
        x[place] = sample
    torch.cuda.empty_cache()
    large, tensors = replace(small, batch=batch), replace(t, input=x)
    family.require(large, tensors)
    out = family.call(large, tensors)
    assert out.numel() > 2**31
    assert_accurate(small, t, torch.stack([out[place] for place in places]))
    silent = replace(t, input=torch.zeros_like(t.input))
    assert_accurate(small, silent, torch.stack([out[place] for place in (1, 511, batch - 2)]))
