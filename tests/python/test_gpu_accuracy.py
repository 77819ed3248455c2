# SPDX-License-Identifier: Apache-2.0
"""Values on a GPU, against float64, for each kernel family: the same calls as on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from accuracy import assert_accurate, judge
from cases import ACTIVATIONS, K4S2, NAMED, Case, Tensors, random_cases, random_hopper_case
from convt3d import conv_transpose3d
from convt3d._activations import ACTIVATIONS as ACTIVATION_TABLE
from convt3d._memory_format import as_memory_format, output_is_channels_last
from families import ATEN, Family, families, is_hopper, own_families

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def poison() -> None:
    """Leaves nan in the blocks that the allocator hands out next: reads of unwritten memory show."""
    blocks = [
        torch.full((size,), float("nan"), device="cuda") for size in (2**22, 2**20, 2**18, 2**14, 2**9, 2**7)
    ]
    del blocks


def run(case: Case, family: Family, seed: int = 0, scale: float = 1.0) -> bool:
    """One call by ``family``, judged in every respect; False where the family does not take it."""
    tensors = case.make("cuda", seed, scale)
    if not family.takes(case, tensors):
        return False
    copies = [t.clone() for t in tensors.present()]
    poison()
    result = family.call(case, tensors)
    assert_accurate(case, tensors, result)
    memory_format = as_memory_format(output_is_channels_last(tensors.input, tensors.weight))
    assert result.stride() == torch.empty(result.shape, device="meta", memory_format=memory_format).stride()
    for tensor, copy in zip(tensors.present(), copies, strict=True):
        assert torch.equal(tensor, copy), "an input was written"
    return True


def run_all(cases: Iterable[Case], family: Family, scale: float = 1.0) -> int:
    """Those of ``cases`` that the family takes, and how many these are; a skip where there are none."""
    ran = sum(run(case, family, seed, scale) for seed, case in enumerate(cases))
    if not ran:
        pytest.skip(f"{family} takes none of these calls; the last: {family.refusal}")
    return ran


@families
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_what_networks_run_fp32(case: Case, channels_last: bool, precision: str, family: Family) -> None:
    layout = {"input_channels_last": channels_last, "weight_channels_last": channels_last}
    run_all([replace(case, precision=precision, **layout)], family)


@families
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_what_networks_run_sixteen_bit(
    case: Case, channels_last: bool, dtype: torch.dtype, family: Family
) -> None:
    run_all([replace(case, dtype=dtype, input_channels_last=channels_last)], family)


@families
@pytest.mark.parametrize("seed", range(5))
def test_random_calls(seed: int, family: Family) -> None:
    run_all(random_cases(1000 + seed, 60, (*DTYPES, torch.float32)), family)


@pytest.mark.parametrize("family", ["sm90"], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_near_what_sm90_takes(seed: int, family: Family) -> None:
    rng = random.Random(seed)
    ran = run_all((random_hopper_case(rng) for _ in range(40)), family)
    assert ran >= 20


@families
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, order: str, family: Family) -> None:
    case = Case(cin=8, cout=16, size=(3, 4, 6), activation=activation, add_order=order, negative_slope=0.2)
    kinds = [{"precision": "ieee"}, {"precision": "tf32"}, *({"dtype": dtype} for dtype in DTYPES[1:])]
    layouts = [{"input_channels_last": last} for last in (False, True)]
    run_all((replace(case, **kind, **layout) for kind in kinds for layout in layouts), family, scale=2.0)


@families
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 7, 9, 12, 15, 17, 31, 33, 45, 63, 65])
def test_report_24_channels_off_the_access_width(channels: int, family: Family) -> None:
    def calls() -> Iterator[Case]:
        for dtype in DTYPES:
            for layout in (False, True):
                yield Case(cin=channels, cout=8, dtype=dtype, input_channels_last=layout, precision="ieee")
                yield Case(cin=16, cout=channels, dtype=dtype, input_channels_last=layout, precision="tf32")

    run_all(calls(), family)


@families
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 2, 3), (5, 7, 9), (2, 3, 17), (8, 8, 8), (3, 16, 16), (2, 33, 5)], ids=str
)
def test_sizes(size: tuple[int, int, int], family: Family) -> None:
    case = Case(cin=32, cout=64, size=size, activation="x_hardswish")
    run_all(
        (
            replace(case, output_padding=output_padding, input_channels_last=layout, precision=precision)
            for output_padding in ((1, 1, 1), (0, 0, 0), (0, 1, 0))
            for layout, precision in ((False, "ieee"), (True, "ieee"), (False, "tf32"))
        ),
        family,
    )


@families
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_many_samples(dtype: torch.dtype, family: Family) -> None:
    """Tiles that span many samples, and more samples than a tile has rows."""
    case = Case(batch=517, cin=8, cout=16, size=(2, 3, 2), dtype=dtype, activation="silu")
    run_all((replace(case, precision=precision) for precision in ("ieee", "tf32")), family)


@families
@pytest.mark.parametrize("channels", [(256, 128), (512, 40), (24, 320), (32, 512)], ids=str)
def test_many_channels(channels: tuple[int, int], family: Family) -> None:
    cin, cout = channels
    run_all(
        (
            Case(cin=cin, cout=cout, size=(3, 4, 4), dtype=dtype, precision=precision)
            for dtype in DTYPES
            for precision in ("ieee", "tf32")
        ),
        family,
    )


@own_families
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_ieee_operands_of_any_magnitude(scale: float, family: Family) -> None:
    case = Case(precision="ieee", cin=32, cout=16, add="none", bias=False)
    tensors = case.make("cuda")
    family.require(case, tensors)
    scaled = Tensors(tensors.input * scale, tensors.weight / scale, None, None)
    assert_accurate(case, scaled, family.call(case, scaled))


@own_families
def test_ieee_magnitudes_within_one_tensor(family: Family) -> None:
    """Columns from 1e-30 to 1e30 of the input: each output is as accurate as its own terms allow."""
    case = Case(precision="ieee", cin=16, cout=16, size=(4, 4, 16), add="none", bias=False)
    tensors = case.make("cuda")
    family.require(case, tensors)
    powers = 10.0 ** torch.linspace(-30, 30, 16, device="cuda")
    scaled = Tensors(tensors.input * powers, tensors.weight, None, None)
    assert_accurate(case, scaled, family.call(case, scaled))
    # and across output channels, through the weight
    powers = 10.0 ** torch.linspace(-30, 30, 16, device="cuda").view(1, 16, 1, 1, 1)
    scaled = Tensors(tensors.input, tensors.weight * powers, None, None)
    assert_accurate(case, scaled, family.call(case, scaled))


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("kind", ["few small", "many small", "zeros", "half"])
@pytest.mark.parametrize("cin", [32, 96])
def test_ieee_values_far_below_the_largest(cin: int, kind: str, channels_last: bool, family: Family) -> None:
    """Each output is as accurate as its own terms allow, whichever kernel does it; and repeatable."""
    case = Case(
        batch=4,
        cin=cin,
        cout=64,
        size=(8, 16, 16),
        precision="ieee",
        input_channels_last=channels_last,
        add="none",
    )
    tensors = case.make("cuda")
    family.require(case, tensors)
    x = tensors.input
    if kind == "few small":
        x[0, 3, 2, 5, 7] = 1e-20
        x[2, :, 4, 9, 1] = 3e-13
    elif kind == "many small":
        x[:, ::3] *= 1e-14
    elif kind == "zeros":
        x.zero_()
    else:
        x[2:] *= 1e-25
    result = family.call(case, tensors)
    assert_accurate(case, tensors, result)
    assert torch.equal(family.call(case, tensors), result)


@pytest.mark.parametrize("family", ["sm80", "aten"], indirect=True)
def test_report_16_fp16_does_not_overflow_inside(family: Family) -> None:
    x = torch.full((1, 8, 4, 4, 4), 200.0, dtype=torch.float16, device="cuda")
    w = torch.zeros(8, 8, 2, 2, 2, dtype=torch.float16, device="cuda")
    for c in range(8):
        w[c, c] = 1
    with family.runs():
        squares = conv_transpose3d(x, w, stride=2, activation="x_hardswish")
    assert (squares == 40000.0).all()
    big = torch.full_like(x, 60000.0)
    add = torch.full((1, 8, 8, 8, 8), -60000.0, dtype=torch.float16, device="cuda")
    with family.runs():
        sums = conv_transpose3d(big, 2 * w, stride=2, add=add)
    assert (sums == 60000.0).all()


@families
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_report_25_views(channels_last: bool, dtype: torch.dtype, family: Family) -> None:
    """cutlass 1323: offsets that break alignment, gaps, permutations, for every operand."""
    case = Case(
        cin=8,
        cout=16,
        size=(3, 4, 6),
        dtype=dtype,
        input_channels_last=channels_last,
        activation="hardswish",
        precision="ieee",
    )
    t = case.make("cuda")
    family.require(case, t)
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

    def judge(tensors: Tensors) -> bool:
        if not family.takes(case, tensors):
            return False
        poison()
        assert_accurate(case, tensors, family.call(case, tensors))
        return True

    taken = [
        judge(replace(t, **{which: change(getattr(t, which))}))
        for change in (offset, gaps, channel_slice, permuted)
        for which in ("input", "weight", "add")
    ]
    assert any(taken)
    bias = torch.full((32,), float("nan"), dtype=dtype, device="cuda")[1::2].copy_(t.bias)
    assert judge(replace(t, bias=bias))
    # An expanded batch does not suggest channels_last, so y is contiguous whatever x and add are.
    assert judge(replace(t, input=t.input[:1].expand(2, -1, -1, -1, -1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=["double", "complex"])
def test_report_29_other_types_fall_back(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 3, 3, 3, dtype=dtype, device="cuda")
    w = torch.randn(4, 6, 3, 3, 3, dtype=dtype, device="cuda")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    out = conv_transpose3d(x, w, None, 2, 1, 1, activation="tanh")
    expected = conv_transpose3d(x.cpu(), w.cpu(), None, 2, 1, 1, activation="tanh")
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_report_29_integers_follow_eager() -> None:
    x = torch.ones(1, 2, 2, 2, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(NotImplementedError):
        conv_transpose3d(x, x)


# Tensor cores cut every sum off, and this kernel keeps none short: the share of the bound that it may use
# (docs/numerics.md, at its end).
LONG_SUMS = {("sm80", "fp16", "joint"): 15.0, ("sm80", "bf16", "joint"): 6.0}


@own_families
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("length", ["reference", "long", "longer", "joint"])
@pytest.mark.parametrize("kind", ["ieee", "tf32", "fp16", "bf16"])
def test_operands_of_one_sign(kind: str, length: str, channels_last: bool, sign: int, family: Family) -> None:
    """Every sum only grows, so errors of one direction add up instead of cancelling."""
    case = Case(batch=2, cin=32, cout=64, size=(16, 16, 16), input_channels_last=channels_last)
    if length == "long":
        case = replace(case, cin=256, size=(4, 8, 16), name="")
    elif length == "longer":
        case = replace(case, cin=520, cout=72, size=(3, 7, 12), name="", **K4S2)
    elif length == "joint":
        if family.name != "sm80" or kind == "ieee":
            pytest.skip("the joint kernel is of the sm80 family and has no ieee mode")
        case = replace(case, batch=64, cin=256, size=(4, 4, 4), name="")
    if kind in ("ieee", "tf32"):
        case = replace(case, precision=kind)
    else:
        case = replace(case, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)
    tensors = case.make("cuda")
    family.require(case, tensors)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors.input.uniform_(0, 1, generator=generator)
    tensors.weight.uniform_(0, 0.1, generator=generator).mul_(sign)
    out = family.call_on("joint_kernel", case, tensors) if length == "joint" else family.call(case, tensors)
    most = LONG_SUMS.get((family.name, kind, length))
    if most is None:
        assert_accurate(case, tensors, out)
        return
    verdict = judge(case, tensors, out, "16-bit")
    assert verdict.failure, "it keeps the bound: take it out of LONG_SUMS and docs/numerics.md"
    assert verdict.share <= most, f"beyond what docs/numerics.md knows of: {verdict.failure}"
    pytest.xfail(f"sums are long: docs/numerics.md; {verdict.failure}")


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("cin", [16, 32])
def test_sums_of_whole_numbers_are_exact(cin: int, channels_last: bool, family: Family) -> None:
    """In tf32 mode nothing is given back to a sum that has lost nothing."""
    case = Case(batch=2, cin=cin, cout=64, size=(8, 16, 16), input_channels_last=channels_last)
    case = replace(case, precision="tf32")
    tensors = case.make("cuda")
    family.require(case, tensors)
    generator = torch.Generator("cuda").manual_seed(3)
    for tensor in tensors.present():
        tensor.copy_(torch.randint(0, 13, tensor.shape, generator=generator, device="cuda"))
    exact = case.call(Tensors(*(t.cpu().double() for t in tensors.present())))
    assert torch.equal(family.call(case, tensors).cpu().double(), exact)


@pytest.mark.parametrize("family", ["sm80"], indirect=True)
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("cout", [24, 48, 96])
@pytest.mark.parametrize("kind", ["ieee", "tf32", "fp16", "bf16"])
def test_sums_of_thousands_of_one_sign(kind: str, cout: int, channels_last: bool, family: Family) -> None:
    """3456 products for each output at stride 1, on tiles of each width."""
    case = Case(
        cin=128,
        cout=cout,
        size=(6, 12, 12),
        stride=(1, 1, 1),
        output_padding=(0, 0, 0),
        input_channels_last=channels_last,
        precision=kind if kind in ("ieee", "tf32") else None,
        dtype={"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32),
    )
    tensors = case.make("cuda")
    family.require(case, tensors)
    generator = torch.Generator("cuda").manual_seed(2)
    for tensor in tensors.present():
        tensor.uniform_(0, 1, generator=generator)
    assert_accurate(case, tensors, family.call(case, tensors))


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("kernel", [2, 3])
def test_ieee_long_sums_of_one_sign(kernel: int, channels_last: bool, family: Family) -> None:
    """320 input channels, so that the sm90 family streams weights."""
    case = Case(
        batch=2,
        cin=320,
        cout=96,
        size=(5, 16, 16),
        kernel=(kernel,) * 3,
        padding=(kernel - 2,) * 3,
        output_padding=(kernel - 2,) * 3,
        input_channels_last=channels_last,
        precision="ieee",
    )
    tensors = case.make("cuda")
    family.require(case, tensors)
    generator = torch.Generator("cuda").manual_seed(1)
    for tensor in tensors.present():
        tensor.uniform_(0, 1, generator=generator)
    assert_accurate(case, tensors, family.call(case, tensors))


@pytest.mark.parametrize("activation", ["hardswish", "x_hardswish"])
def test_hardswish_in_float64(activation: str) -> None:
    """ATen's own CUDA kernel is 5e-8 off there. Values, gradients, and the values of a decomposed call."""
    case = Case(dtype=torch.float64, activation=activation)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.requires_grad_() for t in case.make(device).present()]
        out = case.call(Tensors(*leaves))
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        mapped = torch.func.vmap(lambda x, leaves=leaves: case.call(Tensors(x, *leaves[1:])))(leaves[0][None])
        results.append([t.detach().cpu() for t in (out, *grads, mapped)])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("kink", [-3.0, 3.0])
def test_hardswish_at_its_kinks_in_float64(kink: float) -> None:
    for name in ("hardswish", "x_hardswish"):
        slopes = []
        for dtype in (torch.float32, torch.float64):
            t = torch.full((1,), kink, dtype=dtype, device="cuda", requires_grad=True)
            slopes.append(torch.autograd.grad(ACTIVATION_TABLE[name].forward(t, 0.0), t)[0].item())
        assert slopes[0] == pytest.approx(slopes[1], abs=1e-6)


def test_devices_must_agree() -> None:
    x, w = torch.zeros(1, 2, 2, 2, 2, device="cuda"), torch.zeros(2, 2, 2, 2, 2)
    with pytest.raises(RuntimeError, match="weight is on cpu"):
        conv_transpose3d(x, w)
    with pytest.raises(RuntimeError, match="add is on cpu"):
        conv_transpose3d(x, w.cuda(), add=torch.zeros(1))


def test_report_14_bad_calls_raise_what_they_raise_on_a_cpu() -> None:
    from test_errors import BAD

    for name, bad, error, message in BAD:
        if "device" in name or "int64" in name:
            continue
        with torch.device("cuda"), pytest.raises(error, match=message):
            bad()


@own_families
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("kind", ["tf32", "ieee", torch.float16, torch.bfloat16], ids=str)
def test_the_reference_workload_is_taken(
    kind: str | torch.dtype, channels_last: bool, family: Family
) -> None:
    """Every kind by sm80, the default one by sm90 too: the rest of this file relies on it."""
    case = replace(NAMED[0], size=(16, 16, 16), input_channels_last=channels_last)
    case = replace(case, precision=kind) if isinstance(kind, str) else replace(case, dtype=kind)
    taken = run(case, family)
    if family.name == "sm80":
        assert taken
    elif not is_hopper():
        assert not taken
    elif kind == "tf32" and not channels_last:
        assert taken, family.refusal
    elif not taken:
        pytest.skip(f"sm90 does not take this kind: {family.refusal}")


def test_the_default_call_takes_the_fastest_family() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    case = replace(NAMED[0], size=(16, 16, 16))
    assert case.explain(case.make("cuda")).path == ("sm90" if is_hopper() else "sm80")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert case.explain(case.make("cuda")).path != ATEN
