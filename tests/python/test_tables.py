# SPDX-License-Identifier: Apache-2.0
"""The tables of the README and the documentation are what the stored results say."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from load_file import load_file

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "date": "2031-02-03T04:05:06+00:00", "gpu": "A GPU", "torch": "2.11.0", "cudnn": 91900, "commit": "abc",
    "ceilings": {"copy": 4.2e12, "fp16": 1e15, "bf16": 1e15, "tf32": 4e14},
}  # fmt: skip


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/make_tables.py, on pages and a store of its own."""
    module = load_file(ROOT / "scripts" / "make_tables.py")
    monkeypatch.setattr(module, "STORE", tmp_path / "results")
    return module


def row(name: str, ours: float, eager: float, floor: float = 0.5, shard: int = 0) -> dict[str, Any]:
    def timing(ms: float) -> dict[str, Any]:
        return {"runs_ms": [ms * 1.1, ms, ms * 0.9], "calls": 3, "host_us": None, "failure": ""}

    failed = {"runs_ms": [], "calls": 0, "host_us": None, "failure": "no Triton"}
    return {
        "name": name, "shard": shard, "path": "sm90", "floor_ms": floor, "bound_share": 0.25,
        "times": {"convt3d": timing(ours), "eager": timing(eager), "compile": failed},
    }  # fmt: skip


def benchmark(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "gpu": "A GPU", "kernel": "auto", "shards": [MACHINE], "rows": list(rows)}


def test_pages_are_what_the_results_give() -> None:
    module = load_file(ROOT / "scripts" / "make_tables.py")
    pages = {page: page.read_text() for page in module.PAGES}
    for page, text in pages.items():
        assert module.filled(text) == text, f"{page}: python scripts/make_tables.py writes it anew"
    for name in module.TABLES:
        assert sum(module.BEGIN.format(name) in text for text in pages.values()) == 1, name
    begun = sum(text.count("<!-- table: ") for text in pages.values())
    assert begun == sum(text.count(module.END) for text in pages.values()) == len(module.TABLES)


def test_reference_and_steps(tables: Any) -> None:
    data = benchmark(
        row("reference/fp16/ndhwc", 0.3, 2.0, 0.25),
        row("reference/tf32/ncdhw", 0.55, 3.9),
        row("nnunet-64-32-d64/fp16/ncdhw", 0.2, 1.3, 0.1),
        row("nnunet-64-32-d64/tf32/ncdhw", 0.06, 0.05, 0.03),
        row("vqvae-192-96-d32/tf32/ncdhw", 0.3, 0.6),  # without the other mode: no line
    )
    lines = tables.reference(data).splitlines()
    assert lines[0].startswith("A GPU, 2031-02-03, commit abc, PyTorch 2.11.0, cuDNN 9.19; `make bench")
    assert lines[0].endswith("A copy reached 4.20 TB/s.")
    assert lines[-2] == "| fp32, TF32 (PyTorch's default) | NCDHW | **0.550 ms** | 1.10 | sm90 | 3.900 | |"
    assert lines[-1] == "| fp16 | NDHWC | **0.300 ms** | 1.20 | sm90 | 2.000 | |"
    steps = tables.steps(data).splitlines()
    wanted = (
        "| nnU-Net, k2 s2, 64 -> 32, batch 2, 64^3 | 0.0600 (2.0) | 0.0500 | | **0.200** (2.0) | 1.300 | |"
    )
    assert steps[-1] == wanted and len(steps) == 5
    assert len(tables.every_row(data).splitlines()) == 4 + 5


def test_files_are_told_apart_kept_and_put_together(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "a.json", tmp_path / "b.json"
    old.write_text(
        json.dumps(benchmark(row("reference/tf32/ncdhw", 0.6, 4.0), row("reference/fp16/ncdhw", 0.3, 2.0)))
    )
    new.write_text(json.dumps(benchmark(row("reference/tf32/ncdhw", 0.5, 4.0))))
    page = tmp_path / "page.md"
    page.write_text("before\n" + tables.BEGIN.format("reference") + "old" + tables.END + "\nafter\n")
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables.subprocess, "run", lambda *a, **k: type("Done", (), {"returncode": 0}))
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    assert tables.main() == 0 and "old" in page.read_text()  # nothing is stored
    aside = tmp_path / "benchmark.previous.json"
    aside.write_text(json.dumps(benchmark(row("reference/tf32/ncdhw", 0.7, 4.0))))
    monkeypatch.setattr(sys, "argv", ["make_tables.py", *map(str, (old, new, aside))])
    assert tables.main() == 0
    text = page.read_text()
    assert "**0.500 ms**" in text and "**0.300 ms**" in text and "0.600" not in text and "old" not in text
    assert text.startswith("before\n<!-- table") and text.endswith("<!-- end of table -->\nafter\n")
    page.write_text(text.replace("0.500", "0.499"))
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    assert tables.main() == 1 and "page.md is not what" in capsys.readouterr().err
    new.write_text("[1]")
    monkeypatch.setattr(sys, "argv", ["make_tables.py", str(new)])
    assert tables.main() == 2 and "b.json does not hold results" in capsys.readouterr().err
    other = {**benchmark(), "gpu": "Another"}
    with pytest.raises(ValueError, match=r"A GPU .* and of Another"):
        tables.merged(benchmark(), other)


def test_the_other_kinds(tables: Any) -> None:
    cat = {**MACHINE, "rows": [{
        "name": "nnunet-320-320-d8/fp16/ndhwc", "into_slice": "sm90", "floor_ms": 0.0043,
        "ms": {"fused": 0.03, "then_cat": 0.04, "eager": 0.044, "compile": 0.02},
    }]}  # fmt: skip
    assert tables.kind_of(cat) == "cat"
    line = tables.concatenations(cat).splitlines()[-1]
    assert line == (
        "| k2 s2, 320 -> 320, batch 2, 8^3 | fp16 | NDHWC | 0.0300 | 0.0400 | 0.0440 | 0.0200 | 0.0043 |"
    )
    networks = {**MACHINE, "networks": {"unet": {
        "fused": 1, "replaced": 3, "transposed_convolutions": 4, "share": 0.125, "fp32_difference": 6.6e-7,
        "ms": {"fp16": [3.0, 2.0]}, "fp16_error": {"before": 1.6e-3, "after": 1.5e-3},
    }}}  # fmt: skip
    assert tables.kind_of(networks) == "networks"
    line = tables.networks(networks).splitlines()[-1]
    assert line == "| unet | 1, 3 of 4 | 12 % | 3.00 → 2.00 (1.50) | 7e-07 | 1.6e-03 → 1.5e-03 |"
    compiled = {**MACHINE, "networks": {"unet": {
        "ms": {"fp16-compiled": [1.0, 1.1]},
        "gain": {"fp16-compiled": {"pairs": 9, "wall": [0.2, 0.01], "host": [0.0, 0.01], "gpu": [0.2, 0.0]}},
        "compiled_error": {"fp16-compiled": {"before": 1e-3, "after": 1e-3}},
    }}}  # fmt: skip
    both = tables.merged_networks(networks, compiled)
    header, _, line = tables.networks(both).splitlines()[-3:]
    assert "| fp16 | fp16, compiled |" in header and "3.00 → 2.00 (1.50) | 1.00 → 0.80 (1.25) |" in line
    assert both["networks"]["unet"]["share"] == 0.125 and "compiled_error" in both["networks"]["unet"]
    with pytest.raises(ValueError, match="commit"):
        tables.merged_networks(networks, {**compiled, "commit": "another"})
    rms = copy.deepcopy(networks)
    rms["networks"]["unet"]["fp16_error"] |= {"before_rms": 2e-4, "after_rms": 1e-4}  # type: ignore[index]
    assert tables.networks(rms).endswith("| 2.0e-04 → 1.0e-04 |\n")
    wrong = copy.deepcopy(networks)
    wrong["networks"]["unet"]["wrong"] = "fp32 differs"  # type: ignore[index]
    with pytest.raises(ValueError, match="unet: fp32 differs"):
        tables.networks(wrong)
    step = {"machine": MACHINE, "rows": [{
        "name": "reference/tf32/ncdhw", "status": "ok", "times": {"convt3d": {"median_ms": 4.3}},
        "peak_bytes": {"convt3d": 2**30},
    }]}  # fmt: skip
    assert tables.kind_of(step) == "training" and "**4.300 ms** | 1.00 GiB |" in tables.training(step)
    assert tables.kind_of(benchmark()) == "benchmark" and tables.kind_of({}) is None
