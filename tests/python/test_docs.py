# SPDX-License-Identifier: Apache-2.0
"""The documentation: its code runs, its figures draw, its pages are all in the navigation."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import convt3d
from load_file import load_file

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["index.md", "tutorial.md", "../README.md"])
def test_code_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after the other, as a reader would; compiled models are not called."""
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    code = blocks(DOCS / name)
    assert code
    try:
        for block in code:
            exec(compile(block, name, "exec"), namespace)
    finally:
        convt3d.disable_inductor()


def test_what_the_tutorial_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The report that the page shows is the report."""
    text = (DOCS / "tutorial.md").read_text()
    test_code_runs("tutorial.md", pytest.MonkeyPatch())
    shown = re.search(r"^```\n(convt3d\.fuse:.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown is not None and shown[1] in capsys.readouterr().out


def test_figures_draw_and_are_there() -> None:
    pytest.importorskip("matplotlib")
    figures = load_file(ROOT / "scripts" / "make_figures.py")
    # The taps of kernel 3, stride 2, padding 1, as the pages tell them.
    assert [len(figures.live_taps(o, 3, 2, 1)) for o in (2, 3)] == [1, 2]
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name, make in figures.FIGURES.items():
        assert figures.draw(make).startswith("<?xml")
        assert (DOCS / "figures" / f"{name}.svg").is_file() and f"figures/{name}.svg" in text


def test_the_picture_of_the_results_is_of_the_table() -> None:
    """`python scripts/make_figures.py` draws it anew."""
    section = (ROOT / "README.md").read_text().partition("\n## Results\n")[2]
    results = section[section.index("\n|") + 1 :].partition("\n\n")[0]
    picture = (DOCS / "figures" / "speed.svg").read_text()
    ours = re.findall(r"^\|[^|]*\|[^|]*\| *\**(\d[\d.]*) ms", results, re.MULTILINE)
    assert len(ours) >= 4
    for number in ours:
        assert f">{float(number):g} ms<" in picture, number


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert set(re.findall(r"\w[\w-]*\.md", navigation)) == {page.name for page in DOCS.glob("*.md")}


def test_every_public_name_is_on_the_api_page() -> None:
    documented = set(re.findall(r"^::: convt3d\.(\w+)", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert documented == {name for name in convt3d.__all__ if not name.startswith("__")}


def test_named_files_are_there() -> None:
    """Every path into the repository that a page names."""
    folders = "python|tests|scripts|benchmarks|cutlass_kernels|examples|docs|third_party"
    named = re.compile(rf"`((?:{folders})/[\w./-]+\.\w+)`")
    pages = (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    found = {(page.name, path) for page in pages for path in named.findall(page.read_text())}
    assert len(found) > 20
    assert [item for item in sorted(found) if not (ROOT / item[1]).exists()] == []


def test_citation_has_the_version() -> None:
    assert f"\nversion: {convt3d.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_options_of_the_command_line_are_real() -> None:
    """Every `python -m convt3d ...` of the pages parses."""
    text = "".join(page.read_text() for page in (*DOCS.glob("*.md"), ROOT / "README.md"))
    calls = {call.strip() for call in re.findall(r"python -m convt3d ([^`#|\n]*)", text)}
    from convt3d.cli import _parser

    for call in calls:
        arguments = re.sub(r"(--[\w-]+ )?\.\.\.", "", call).split()
        if arguments:
            _parser().parse_args(arguments)
    assert len(calls) >= 3


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_site_builds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
