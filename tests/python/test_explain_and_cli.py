# SPDX-License-Identifier: Apache-2.0
"""explain() and the command line."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import convt3d
from cases import NAMED, Case, random_cases, random_hopper_case
from convt3d import _kernel_query, _native, explain
from convt3d.cli import main
from convt3d.cli.console import Console
from convt3d.cli.info import compiled_in
from families import is_hopper
from test_library import built


def meta_reference() -> convt3d.Explanation:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    return explain(
        empty(128, 32, 16, 16, 16),
        empty(32, 64, 3, 3, 3),
        empty(64),
        2,
        1,
        1,
        add=empty(128, 64, 32, 32, 32),
        activation="x_hardswish",
        bandwidth=4.24e12,
    )


def test_the_reference_workload() -> None:
    e = meta_reference()
    assert e.flops == 57_982_058_496  # 27 taps, not 8 times that
    assert e.bytes == 2_214_813_952
    assert e.floor_seconds == pytest.approx(0.522e-3, rel=1e-3)
    assert e.arithmetic_intensity == pytest.approx(26.18, rel=1e-3)
    assert e.output_shape == (128, 64, 32, 32, 32)
    assert e.output_stride == (2097152, 32768, 1024, 32, 1)
    text = str(e)
    for piece in ("path", "2,214,813,952", "57,982,058,496", "0.5224 ms at 4.24 TB/s"):
        assert piece in text


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_flops_are_counted_pair_by_pair(case: Case) -> None:
    pairs = 1
    for axis in range(3):
        pairs *= sum(
            (o + case.padding[axis] - k * case.dilation[axis]) % case.stride[axis] == 0
            for o in range(case.out_size()[axis])
            for k in range(case.kernel[axis])
        )
    tensors = case.make()
    e = case.explain(tensors)
    assert e.flops == 2 * case.batch * (case.cin // case.groups) * case.cout * pairs
    out = case.call(tensors)
    assert e.output_shape == out.shape and e.output_stride == out.stride()
    assert e.bytes == sum(t.nbytes for t in tensors.present()) + out.nbytes
    assert e.path == "cpu" and set(e.refused) == {"sm90", "sm80"}


def test_fake_and_meta_tensors_are_answered_for_a_gpu() -> None:
    case = Case(cin=16, cout=16)
    t = case.make()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in t.present()]
        cpu = explain(*fakes[:3], 2, 1, 1, add=fakes[3])
    assert cpu.path == "cpu"
    assert meta_reference().path != "cpu"


@pytest.fixture
def library() -> None:
    """The kernel library, with its CUDA kernels."""
    built("libconvt3d.so")
    assert compiled_in() == {"sm90": True, "sm80": True}


@pytest.mark.skipif(torch.cuda.is_available() and not is_hopper(), reason="the GPU here is not an SM90 one")
@pytest.mark.parametrize(("setting", "path"), [("tf32", "sm90"), ("ieee", "sm90")])
def test_the_path_of_the_reference_workload(setting: str, path: str, library: None) -> None:
    torch.backends.cudnn.conv.fp32_precision = setting
    e = meta_reference()
    assert (e.path, e.precision) == (path, setting)
    assert e.workspace_bytes > 0
    assert set(e.refused) == ({"sm90"} if path == "sm80" else set())
    assert ("no GPU" in e.note) == (not torch.cuda.is_available())


def test_the_path_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "KERNELS_LIBRARY", Path("/nowhere/libconvt3d.so"))
    e = meta_reference()
    assert e.path == "aten + tail"
    assert set(e.refused) == {"sm90", "sm80"}
    assert all("/nowhere/libconvt3d.so does not exist" in reason for reason in e.refused.values())
    monkeypatch.setattr(_native, "KERNELS_LIBRARY", _native.LIB_DIR / "another" / "libconvt3d.so")
    inside = meta_reference().refused["sm90"]
    assert "(convt3d/_lib/another/libconvt3d.so does not exist)" in inside
    monkeypatch.setattr(_native, "KERNELS_LIBRARY", Path("/nowhere/libconvt3d.so"))
    assert e.note == "this install has no kernels, so CUDA tensors would run through ATen"
    assert compiled_in() == {"sm90": False, "sm80": False}


LIBRARIES = {
    "corrupt": (None, "invalid ELF header"),
    "foreign": ("int another(void) { return 1; }", "convt3d_version"),
    "other-version": (
        'const char* convt3d_version(void) { return "9.9.9"; }',
        "is version 9.9.9, this package",
    ),
    "stub": (
        f'const char* convt3d_version(void) {{ return "{convt3d.__version__}"; }}',
        "convt3d_current_device",
    ),
}


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_library_that_is_not_ours(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said by explain, by info, and by the binding's loader; never an exception."""
    source, reason = LIBRARIES[kind]
    path = tmp_path / "libconvt3d.so"
    if source is None:
        path.write_bytes(b"not a library" * 100)
    else:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        (tmp_path / "stub.c").write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", path, tmp_path / "stub.c"], check=True)
    monkeypatch.setattr(_native, "KERNELS_LIBRARY", path)
    e = meta_reference()
    assert e.path == "aten + tail"
    assert all(reason in text for text in e.refused.values())
    assert main(["info", "--plain"]) == 0
    assert reason in capsys.readouterr().out
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if kind != "stub":  # which only its full list of functions gives away
        assert reason in _native._load().reason


def test_the_loaders_own_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str) -> None:
        try:
            raise OSError("undefined symbol: aoti_torch_what")
        except OSError as error:
            raise OSError(f"Could not load this library: {path}") from error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    built("libconvt3d.so")
    monkeypatch.setattr(_native, "_load_library", load)
    assert "undefined symbol: aoti_torch_what" in _native._load().reason


@pytest.mark.skipif(torch.cuda.is_available() and not is_hopper(), reason="the GPU here is not an SM90 one")
def test_what_the_gpu_tests_expect_of_each_family(library: None, force_kernel: Callable[[str], None]) -> None:
    """Their calls, answered for an SM90 GPU: sm80 takes all, sm90 most of its own."""
    rng = random.Random(0)
    calls = [random_hopper_case(rng) for _ in range(40)]
    force_kernel("sm90")
    assert sum(case.explain(case.make("meta")).path == "sm90" for case in calls) >= 20
    force_kernel("sm80")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for case in (*calls, *NAMED, *random_cases(1000, 60, dtypes)):
        assert case.explain(case.make("meta")).path == "sm80", case


def test_explain_raises_what_the_call_raises() -> None:
    with pytest.raises(RuntimeError, match="groups must be positive"):
        explain(torch.zeros(1, 2, 3, 3, 3), torch.zeros(2, 2, 3, 3, 3), groups=0)


def test_the_environment_is_respected(force_kernel: object) -> None:
    assert callable(force_kernel)
    force_kernel("aten")
    e = meta_reference()
    assert e.path == "aten + tail"
    assert set(e.refused.values()) == {"CONVT3D_KERNEL=aten"}


def test_precision_and_empty_outputs() -> None:
    x, w = torch.zeros(1, 2, 3, 3, 3), torch.zeros(2, 2, 3, 3, 3)
    assert explain(x, w, precision="tf32").precision == "tf32"
    assert "one rounding" in explain(x.half(), w.half()).precision
    assert explain(x.double(), w.double()).precision == "float64"
    assert explain(x[:0], w).flops == 0


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_under_autocast(weight_dtype: torch.dtype, channels_last: bool) -> None:
    case = Case(input_channels_last=channels_last, activation="relu")
    t = case.make()
    weight = torch.nn.Parameter(t.weight.to(weight_dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        e = explain(t.input, weight, t.bias, 2, 1, 1, add=t.add)
        out = convt3d.conv_transpose3d(t.input, weight, t.bias, 2, 1, 1, add=t.add)
    assert (e.dtype, e.output_shape, e.output_stride) == (out.dtype, out.shape, out.stride())
    assert "bfloat16" in e.precision and "autocast casts to bfloat16" in e.note
    assert e.bytes == 2 * (sum(t.numel() for t in t.present()) + out.numel())
    assert case.explain(t).dtype == torch.float32 and case.explain(t).note == ""


def test_meta_tensors_under_the_gpus_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU torch does not enable it.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: torch.float16)
    assert meta_reference().dtype == torch.float16


@pytest.mark.parametrize("plain", [False, True], ids=["rich", "plain"])
def test_info(capsys: pytest.CaptureFixture[str], plain: bool) -> None:
    assert main(["info", *(["--plain"] if plain else [])]) == 0
    out = capsys.readouterr().out
    for piece in (convt3d.__version__, torch.__version__, "sm80", "sm90", "usable"):
        assert piece in out


def test_info_says_what_is_compiled_in(capsys: pytest.CaptureFixture[str], library: None) -> None:
    """Also where there is no GPU that could run it."""
    assert main(["info", "--plain"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["kernel"][:4] == ["compiled", "in", "usable", "here"]
    assert rows["sm80"][0] == rows["sm90"][0] == "yes"
    if not torch.cuda.is_available():
        assert rows["sm80"][1] == rows["sm90"][1] == "no"
    if not _kernel_query.has_driver():  # CUDA's own words are of a driver that is too old
        assert " ".join(rows["sm90"][2:]) == _kernel_query.NO_DRIVER


def test_demo_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["demo", "--device", "cpu", "--batch", "1", "--seed", "1", "--plain"]
    assert main([*arguments, "--output", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    for piece in ("PyTorch", "convt3d", "max abs error", "Results agree", "Skipped for want of a GPU"):
        assert piece in out
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "No picture" in out
    else:
        picture = tmp_path / "new" / "demo.png"
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    Console(plain=True).table("numbers", ("name", "value"), [("a", "1.5"), ("bcd", "10.25")])
    assert capsys.readouterr().out == "\nnumbers\nname  value\n----  -----\na       1.5\nbcd   10.25\n"


def test_module_entry_point() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "convt3d", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == convt3d.__version__


def test_no_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr().err
    for command in ("info", "demo", "check", "bench", "explain"):
        assert f"    {command} " in told


def test_unknown_commands_fail() -> None:
    for arguments in (["fly"], ["demo", "--batch", "0"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2


def test_cuda_demo_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["demo", "--device", "cuda", "--plain", "--output", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_demo_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--device", "cuda", "--batch", "4", "--plain", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for piece in ("Results agree", "byte floor", "PyTorch eager, tf32", "torch.compile, ieee"):
        assert piece in out
    for precision, path in (("tf32", "sm90" if is_hopper() else "sm80"), ("ieee", "sm")):
        (row,) = [line for line in out.splitlines() if line.startswith(f"convt3d, {precision}")]
        assert row.split()[2].startswith(path), row
