# SPDX-License-Identifier: Apache-2.0
"""Values on a GPU, against float64, for each kernel family: the same calls as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import test_nonfinite
from accuracy import assert_accurate
from cases import ACTIVATIONS, NAMED, Case, Tensors, random_cases
from convt3d import conv_transpose3d
from convt3d._memory_format import as_memory_format, output_is_channels_last

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
families = pytest.mark.parametrize("family", ["sm80", "sm90", "aten"])
own_families = pytest.mark.parametrize("family", ["sm80", "sm90"])

Force = Callable[[str], None]


def poison() -> None:
    """Leaves nan in the blocks that the allocator hands out next: reads of unwritten memory show."""
    blocks = [
        torch.full((size,), float("nan"), device="cuda") for size in (2**22, 2**20, 2**18, 2**14, 2**9, 2**7)
    ]
    del blocks


def skip_on_cudnn(case: Case, tensors: Tensors) -> None:
    """Skips what only our kernels promise."""
    e = case.explain(tensors)
    if e.path == "aten + tail":
        pytest.skip(f"runs on cuDNN here: {e.refused}")


def run(case: Case, seed: int = 0, scale: float = 1.0) -> Tensor:
    tensors = case.make("cuda", seed, scale)
    copies = [t.clone() for t in tensors.present()]
    poison()
    result = case.call(tensors)
    assert_accurate(case, tensors, result)
    memory_format = as_memory_format(output_is_channels_last(tensors.input, tensors.weight))
    assert result.stride() == torch.empty(result.shape, device="meta", memory_format=memory_format).stride()
    for tensor, copy in zip(tensors.present(), copies, strict=True):
        assert torch.equal(tensor, copy), "an input was written"
    return result


@families
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_what_networks_run_fp32(
    case: Case, channels_last: bool, precision: str, family: str, force_kernel: Force
) -> None:
    force_kernel(family)
    run(
        replace(
            case, precision=precision, input_channels_last=channels_last, weight_channels_last=channels_last
        )
    )


@families
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_what_networks_run_sixteen_bit(
    case: Case, channels_last: bool, dtype: torch.dtype, family: str, force_kernel: Force
) -> None:
    force_kernel(family)
    run(replace(case, dtype=dtype, input_channels_last=channels_last))


@families
@pytest.mark.parametrize("seed", range(5))
def test_random_calls(seed: int, family: str, force_kernel: Force) -> None:
    force_kernel(family)
    for index, case in enumerate(random_cases(1000 + seed, 60, (*DTYPES, torch.float32))):
        run(case, seed=index)


@families
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, order: str, family: str, force_kernel: Force) -> None:
    force_kernel(family)
    for dtype in DTYPES:
        case = Case(
            cin=8,
            cout=16,
            activation=activation,
            add_order=order,
            dtype=dtype,
            negative_slope=0.2,
            precision="ieee",
        )
        run(case, scale=2.0)


@families
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 7, 9, 12, 15, 17, 31, 33, 45, 63, 65])
def test_cutlass_651_channels_off_the_access_width(channels: int, family: str, force_kernel: Force) -> None:
    force_kernel(family)
    for dtype in DTYPES:
        for layout in (False, True):
            run(Case(cin=channels, cout=8, dtype=dtype, input_channels_last=layout, precision="ieee"))
            run(Case(cin=16, cout=channels, dtype=dtype, input_channels_last=layout, precision="tf32"))


@families
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 2, 3), (5, 7, 9), (2, 3, 17), (8, 8, 8), (3, 16, 16), (2, 33, 5)], ids=str
)
def test_sizes(size: tuple[int, int, int], family: str, force_kernel: Force) -> None:
    force_kernel(family)
    for output_padding in ((1, 1, 1), (0, 0, 0), (0, 1, 0)):
        for layout in (False, True):
            run(
                Case(
                    cin=32,
                    cout=64,
                    size=size,
                    output_padding=output_padding,
                    input_channels_last=layout,
                    activation="x_hardswish",
                    precision="ieee",
                )
            )


@families
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_many_samples(dtype: torch.dtype, family: str, force_kernel: Force) -> None:
    """More than any tile or split of the batch."""
    force_kernel(family)
    run(Case(batch=517, cin=8, cout=16, size=(2, 3, 2), dtype=dtype, activation="silu"))


@families
@pytest.mark.parametrize("channels", [(256, 128), (512, 40), (24, 320)], ids=str)
def test_many_channels(channels: tuple[int, int], family: str, force_kernel: Force) -> None:
    force_kernel(family)
    for dtype in DTYPES:
        for precision in ("ieee", "tf32"):
            run(Case(cin=channels[0], cout=channels[1], size=(3, 4, 3), dtype=dtype, precision=precision))


@own_families
@pytest.mark.parametrize("value", test_nonfinite.SPECIAL)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", test_nonfinite.CASES, ids=["k3", "k2", "odd-channels"])
def test_nonfinite_operands(
    case: Case, channels_last: bool, precision: str, value: float, family: str, force_kernel: Force
) -> None:
    force_kernel(family)
    case = replace(case, precision=precision, input_channels_last=channels_last)
    tensors = case.make("cuda")
    skip_on_cudnn(case, tensors)
    tensors.input[0, 1, 1, 1, 1] = value
    test_nonfinite.check(case, tensors)
    tensors = case.make("cuda")
    tensors.weight[2, 1, 0, 1, 0] = value
    test_nonfinite.check(case, tensors)


@own_families
def test_largest_finite_values(family: str, force_kernel: Force) -> None:
    force_kernel(family)
    for precision in ("ieee", "tf32"):
        case = Case(cin=8, cout=8, precision=precision, add="none", bias=False)
        tensors = case.make("cuda")
        skip_on_cudnn(case, tensors)
        tensors.input.fill_(torch.finfo(torch.float32).max)
        tensors.weight.fill_(2.0**-12)
        assert case.call(tensors).isfinite().all()


@own_families
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_ieee_operands_of_any_magnitude(scale: float, family: str, force_kernel: Force) -> None:
    force_kernel(family)
    case = Case(precision="ieee", cin=32, cout=16, add="none", bias=False)
    tensors = case.make("cuda")
    skip_on_cudnn(case, tensors)
    scaled = Tensors(tensors.input * scale, tensors.weight / scale, None, None)
    assert_accurate(case, scaled, case.call(scaled))


@own_families
def test_ieee_magnitudes_within_one_tensor(family: str, force_kernel: Force) -> None:
    """Columns from 1e-30 to 1e30 of the input: each output is as accurate as its own terms allow."""
    force_kernel(family)
    case = Case(precision="ieee", cin=16, cout=16, size=(4, 4, 16), add="none", bias=False)
    tensors = case.make("cuda")
    skip_on_cudnn(case, tensors)
    powers = 10.0 ** torch.linspace(-30, 30, 16, device="cuda")
    scaled = Tensors(tensors.input * powers, tensors.weight, None, None)
    assert_accurate(case, scaled, case.call(scaled))
    # and across output channels, through the weight
    powers = 10.0 ** torch.linspace(-30, 30, 16, device="cuda").view(1, 16, 1, 1, 1)
    scaled = Tensors(tensors.input, tensors.weight * powers, None, None)
    assert_accurate(case, scaled, case.call(scaled))


@families
def test_pr_153276_fp16_does_not_overflow_inside(family: str, force_kernel: Force) -> None:
    force_kernel(family)
    x = torch.full((1, 8, 4, 4, 4), 200.0, dtype=torch.float16, device="cuda")
    w = torch.zeros(8, 8, 2, 2, 2, dtype=torch.float16, device="cuda")
    for c in range(8):
        w[c, c] = 1
    assert (conv_transpose3d(x, w, stride=2, activation="x_hardswish") == 40000.0).all()
    big = torch.full_like(x, 60000.0)
    add = torch.full((1, 8, 8, 8, 8), -60000.0, dtype=torch.float16, device="cuda")
    assert (conv_transpose3d(big, 2 * w, stride=2, add=add) == 60000.0).all()


@families
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_views(channels_last: bool, dtype: torch.dtype, family: str, force_kernel: Force) -> None:
    """cutlass 1323: offsets that break alignment, gaps, permutations, for every operand."""
    force_kernel(family)
    case = Case(
        cin=8,
        cout=16,
        dtype=dtype,
        input_channels_last=channels_last,
        activation="hardswish",
        precision="ieee",
    )
    t = case.make("cuda")
    assert t.bias is not None and t.add is not None

    def offset(tensor: Tensor) -> Tensor:
        flat = torch.full((tensor.numel() + 1,), float("nan"), dtype=dtype, device="cuda")[1:]
        out = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
        return out.copy_(tensor)

    def gaps(tensor: Tensor) -> Tensor:
        wide = torch.full(
            (*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), dtype=dtype, device="cuda"
        )
        return wide[..., ::2].copy_(tensor)

    def channel_slice(tensor: Tensor) -> Tensor:
        n, c, *rest = tensor.shape
        wide = torch.full((n, c + 5, *rest), float("nan"), dtype=dtype, device="cuda")
        if tensor.dim() == 5 and not tensor.is_contiguous():
            wide = wide.contiguous(memory_format=torch.channels_last_3d)
        return wide[:, 3 : 3 + c].copy_(tensor)

    def permuted(tensor: Tensor) -> Tensor:
        return tensor.permute(4, 2, 0, 1, 3).contiguous().permute(2, 3, 1, 4, 0)

    for change in (offset, gaps, channel_slice, permuted):
        for which in ("input", "weight", "add"):
            changed = replace(t, **{which: change(getattr(t, which))})
            poison()
            assert_accurate(case, changed, case.call(changed))
    bias = torch.full((32,), float("nan"), dtype=dtype, device="cuda")[1::2].copy_(t.bias)
    assert_accurate(case, replace(t, bias=bias), case.call(replace(t, bias=bias)))
    expanded = replace(t, input=t.input[:1].expand(2, -1, -1, -1, -1))
    assert_accurate(case, expanded, case.call(expanded))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=["double", "complex"])
def test_other_types_fall_back(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 3, 3, 3, dtype=dtype, device="cuda")
    w = torch.randn(4, 6, 3, 3, 3, dtype=dtype, device="cuda")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    out = conv_transpose3d(x, w, None, 2, 1, 1, activation="tanh")
    expected = conv_transpose3d(x.cpu(), w.cpu(), None, 2, 1, 1, activation="tanh")
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_integers_follow_eager() -> None:
    x = torch.ones(1, 2, 2, 2, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(NotImplementedError):
        conv_transpose3d(x, x)


def test_devices_must_agree() -> None:
    x, w = torch.zeros(1, 2, 2, 2, 2, device="cuda"), torch.zeros(2, 2, 2, 2, 2)
    with pytest.raises(RuntimeError, match="weight is on cpu"):
        conv_transpose3d(x, w)
    with pytest.raises(RuntimeError, match="add is on cpu"):
        conv_transpose3d(x, w.cuda(), add=torch.zeros(1))


def test_bad_calls_raise_what_they_raise_on_a_cpu(force_kernel: Force) -> None:
    from test_errors import BAD

    for name, bad, error, message in BAD:
        if "device" in name or "int64" in name:
            continue
        with torch.device("cuda"), pytest.raises(error, match=message):
            bad()


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_each_family_takes_the_reference(family: str, force_kernel: Force) -> None:
    """Otherwise the tests above would check ATen under another name."""
    force_kernel(family)
    case = replace(NAMED[0], size=(16, 16, 16), batch=2)
    e = case.explain(case.make("cuda"))
    if e.path != family:
        reason = e.refused.get(family, e.path)
        if family == "sm80":
            pytest.fail(f"sm80 does not take the reference workload: {reason}")
        pytest.skip(f"{family} does not take the reference workload here: {reason}")
