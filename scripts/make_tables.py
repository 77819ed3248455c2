# SPDX-License-Identifier: Apache-2.0
"""Puts measured results into the README and the documentation: tables, their captions, and the picture.

    python scripts/make_tables.py out/benchmarks/*.json    # of run.py, cat.py, networks.py and training.py
    python scripts/make_tables.py --check                  # fails where a page is not what would be written

The files are kept in docs/results/, one of each kind; several of run.py's are put together, later rows in
place of earlier ones, and several of networks.py's, mode by mode. A table stands between
``<!-- table: NAME -->`` and ``<!-- end of table -->``; where there are no results of its kind it stays as it
is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402
from networks import MODES as NETWORK_MODES  # noqa: E402
from networks import before_and_after  # noqa: E402
from results import OK, Results, RowResult  # noqa: E402
from workloads import WORKLOADS, Workload  # noqa: E402

STORE = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BEGIN, END = "<!-- table: {} -->\n\n", "<!-- end of table -->"
MODES = {"tf32": "fp32, TF32", "ieee": "fp32, ieee", "fp16": "fp16", "bf16": "bf16"}
OF_NETWORKS = {"nnunet": "nnU-Net", "psmnet": "PSMNet", "vqvae": "VQVAE", "occupancy": "occupancy network"}
OF_NETWORKS |= {"unetrpp": "UNETR++", "segresnetds": "SegResNetDS", "odd": "odd output rows"}
Data = dict[str, Any]


def kind_of(data: Data) -> str | None:
    """Which program wrote a file of results; None for none of them."""
    if "networks" in data:
        return "networks"
    if "machine" in data and "rows" in data:
        return "training"
    if "shards" in data:
        return "benchmark"
    return "cat" if "rows" in data and all("into_slice" in row for row in data["rows"]) else None


# --- words -------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(lines)) + "\n"


def ms(value: float) -> str:
    return report.milliseconds(value)


def commit_of(machine: Data) -> str:
    return f"commit {machine['commit']}" if machine["commit"] else "commit unknown"


def caption(machines: Sequence[Data], command: str) -> str:
    """Where, when, what and how."""
    first = machines[0]
    dates = sorted({m["date"][:10] for m in machines})
    commits = sorted({commit_of(m) for m in machines})
    cudnn = first["cudnn"]
    versions = f"PyTorch {first['torch']}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}"
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{first['gpu']}, {when}, {', '.join(commits)}, {versions}; `{command}`."


def triple(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "({}, {}, {})".format(*values)


def described(w: Workload) -> str:
    """A workload in a few words: whose step, kernel and stride, channels, batch, input size."""
    network = OF_NETWORKS.get(w.name.split("-")[0])
    size = f"{w.size[0]}^3" if len(set(w.size)) == 1 else " x ".join(map(str, w.size))
    step = f"k{triple(w.kernel)} s{triple(w.stride)}, {w.cin} -> {w.cout}, batch {w.batch}, {size}"
    return f"{network}, {step}" if network else step


# --- tables ------------------------------------------------------------------------------------------------


def _parts(row: RowResult) -> tuple[str, str, str]:
    workload, mode, layout = row.name.split("/")
    return workload, mode, layout


def _time(row: RowResult, name: str) -> str:
    return ms(row.times[name].median_ms) if row.has(name) else ""


def _bold_where_fastest(row: RowResult, text: str) -> str:
    others = [row.speedup(other) for other in ("eager", "compile")]
    return f"**{text}**" if all(speedup is None or speedup > 1 for speedup in others) else text


def _measured(data: Data) -> tuple[Results, list[RowResult], list[Data]]:
    rows = {row["name"]: RowResult.from_json(row) for row in data["rows"]}
    results = Results(data["gpu"], data["kernel"], data["shards"], rows)
    timed = [row for row in results.ordered() if row.status == OK and row.has("convt3d")]
    return results, timed, [data["shards"][index] for index in sorted({row.shard for row in timed})]


def reference(data: Data) -> str:
    """Every mode and layout of the reference workload."""
    results, timed, _ = _measured(data)
    rows = [row for row in timed if _parts(row)[0] == "reference"]
    shards = sorted({row.shard for row in rows})
    cells = []
    for row in rows:
        _, mode, layout = _parts(row)
        label = MODES[mode] + (" (PyTorch's default)" if (mode, layout) == ("tf32", "ncdhw") else "")
        ours = _bold_where_fastest(row, f"{_time(row, 'convt3d')} ms")
        others = [_time(row, "eager"), _time(row, "compile")]
        cells.append([label, layout.upper(), ours, f"{row.floor_ratio:.2f}", row.path, *others])
    copies = [results.ceilings(index).copy / 1e12 for index in shards]
    made = caption([results.shards[index] for index in shards], "make bench BENCH='--rows reference'")
    rate = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(copies), max(copies))))
    header = ("", "layout", "convt3d", "of the floor", "kernel", "eager", "torch.compile")
    return f"{made} A copy reached {rate} TB/s.\n\n{table(header, cells)}"


def steps(data: Data) -> str:
    """What networks run, contiguous, in the two modes that they run in."""
    _, timed, machines = _measured(data)
    by_name = {row.name: row for row in timed}
    cells = []
    for workload in WORKLOADS:
        found = [by_name.get(f"{workload.name}/{mode}/ncdhw") for mode in ("tf32", "fp16")]
        if workload.name == "reference" or None in found:
            continue
        line = [described(workload)]
        for row in found:
            assert row is not None and row.floor_ratio is not None
            ours = _bold_where_fastest(row, _time(row, "convt3d"))
            line += [f"{ours} ({row.floor_ratio:.1f})", _time(row, "eager"), _time(row, "compile")]
        cells.append(line)
    header = ("step", "TF32: convt3d", "eager", "compile", "fp16: convt3d", "eager", "compile")
    return f"{caption(machines, 'make bench')}\n\n{table(header, cells)}"


def every_row(data: Data) -> str:
    """All of run.py's rows."""
    _, timed, machines = _measured(data)
    cells = [
        [
            row.name, row.path, _bold_where_fastest(row, _time(row, "convt3d")), f"{row.floor_ratio:.2f}",
            _time(row, "eager"), _time(row, "compile"),
            "" if row.bound_share is None else f"{row.bound_share:.2f}",
        ]
        for row in timed
    ]  # fmt: skip
    header = ("row", "kernel", "convt3d ms", "of the floor", "eager", "torch.compile", "of the error bound")
    return f"{caption(machines, 'make bench')}\n\n{table(header, cells)}"


def concatenations(data: Data) -> str:
    """nnU-Net's steps into a concatenation."""
    cells = []
    workloads = {w.name: w for w in WORKLOADS}
    for row in data["rows"]:
        name, mode, layout = row["name"].split("/")
        times = {key: ms(value) for key, value in row["ms"].items()}
        if row["ms"]["fused"] == min(row["ms"].values()):
            times["fused"] = f"**{times['fused']}**"
        order = [times[key] for key in ("fused", "then_cat", "eager", "compile")]
        label = described(workloads[name]).partition(", ")[2]
        cells.append([label, MODES[mode], layout.upper(), *order, ms(row["floor_ms"])])
    header = (
        "step",
        "",
        "layout",
        "`conv_transpose3d_cat`",
        "convt3d, then cat",
        "eager",
        "compile",
        "floor",
    )
    return f"{caption([data], 'python benchmarks/cat.py')}\n\n{table(header, cells)}"


def networks(data: Data) -> str:
    """Published networks, before and after."""
    measured = {mode for r in data["networks"].values() for mode in r.get("ms", {})}
    modes = [mode for mode in NETWORK_MODES if mode in measured]
    cells = []
    for name, r in data["networks"].items():
        if "failure" in r or "wrong" in r:
            raise ValueError(f"networks.json: {name}: {r.get('failure') or r['wrong']}")
        line = [
            name,
            f"{r['fused']}, {r['replaced']} of {r['transposed_convolutions']}",
            f"{r['share'] * 100:.0f} %",
        ]
        line += [before_and_after(r, mode) for mode in modes]
        kind = "_rms" if "after_rms" in r["fp16_error"] else ""
        errors = [r["fp16_error"][key + kind] for key in ("before", "after")]
        cells.append([*line, f"{r['fp32_difference']:.0e}", "{:.1e} → {:.1e}".format(*errors)])
    titles = [mode.replace("-", ", ") for mode in modes]
    header = ("network", "fused, replaced", "share of time", *titles, "fp32 difference", "fp16 error")
    return f"{caption([data], 'python benchmarks/networks.py')}\n\n{table(header, cells)}"


def training(data: Data) -> str:
    """A training step."""
    cells = []
    for row in data["rows"]:
        if row["status"] != OK:
            raise ValueError(f"training.json: {row['name']}: {row['message']}")
        workload, mode, layout = row["name"].split("/")
        names = [name for name in ("convt3d", "eager", "compile") if name in row["times"]]
        times = [ms(row["times"][name]["median_ms"]) for name in names]
        peaks = ", ".join(f"{row['peak_bytes'][name] / 2**30:.2f}" for name in names)
        cells.append(
            [workload, MODES[mode], layout.upper(), f"**{times[0]} ms**", *times[1:], f"{peaks} GiB"]
        )
    header = (
        "",
        "",
        "layout",
        "convt3d",
        "eager",
        "torch.compile",
        "peak memory: convt3d, eager, torch.compile",
    )
    return f"{caption([data['machine']], 'python benchmarks/training.py')}\n\n{table(header, cells)}"


TABLES: dict[str, tuple[str, Callable[[Data], str]]] = {
    "reference": ("benchmark", reference),
    "steps": ("benchmark", steps),
    "every row": ("benchmark", every_row),
    "concatenations": ("cat", concatenations),
    "networks": ("networks", networks),
    "training": ("training", training),
}


# --- files -------------------------------------------------------------------------------------------------


def merged(old: Data, new: Data) -> Data:
    """Two of run.py's files, a row of the second in place of the first's.

    Raises:
        ValueError: they come from different GPUs or kernels.
    """
    if (old["gpu"], old["kernel"]) != (new["gpu"], new["kernel"]):
        raise ValueError(f"results of {old['gpu']} ({old['kernel']}) and of {new['gpu']} ({new['kernel']})")
    shift = len(old["shards"])
    rows = {row["name"]: row for row in old["rows"]}
    rows |= {row["name"]: {**row, "shard": row["shard"] + shift} for row in new["rows"]}
    return {**new, "shards": [*old["shards"], *new["shards"]], "rows": list(rows.values())}


def merged_networks(old: Data, new: Data) -> Data:
    """Two of networks.py's files, mode by mode.

    Raises:
        ValueError: they come from different GPUs, commits or versions of torch.
    """
    for what in ("gpu", "commit", "torch"):
        if old[what] != new[what]:
            raise ValueError(f"results of networks with {what} {old[what]} and {new[what]}")
    found = dict(old["networks"])
    for name, result in new["networks"].items():
        before = found.get(name, {})
        both = [key for key in result if isinstance(result[key], dict) and key in before]
        found[name] = {**before, **result, **{key: {**before[key], **result[key]} for key in both}}
    return {**new, "networks": found}


MERGE = {"benchmark": merged, "networks": merged_networks}


def store(files: Sequence[Path]) -> None:
    """Keeps results in docs/results/.

    Raises:
        ValueError, OSError: a file that is not one of results, or that does not go with the others.
    """
    kept: dict[str, Data] = {}
    for file in files:
        if file.name.endswith(".previous.json"):  # what run.py has put aside
            continue
        data = json.loads(file.read_text())
        kind = kind_of(data) if isinstance(data, dict) else None
        if kind is None:
            raise ValueError(f"{file} does not hold results of run.py, cat.py, networks.py or training.py")
        kept[kind] = MERGE[kind](kept[kind], data) if kind in MERGE and kind in kept else data
    STORE.mkdir(parents=True, exist_ok=True)
    for kind, data in kept.items():
        (STORE / f"{kind}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        print(STORE / f"{kind}.json")


def filled(page: str) -> str:
    """A page's text with every table of which there are results written anew."""
    for name, (kind, make) in TABLES.items():
        file = STORE / f"{kind}.json"
        before, begin, rest = page.partition(BEGIN.format(name))
        if begin and file.is_file():
            _, end, after = rest.partition(END)
            if not end:
                raise ValueError(f"the table {name!r} has no end")
            page = before + begin + make(json.loads(file.read_text())) + "\n" + end + after
    return page


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Puts measured results into the README and the documentation."
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="JSON of run.py, cat.py, networks.py or training.py"
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    try:
        if arguments.files and not arguments.check:
            store(arguments.files)
        pages = {page: filled(page.read_text()) for page in PAGES}
    except (ValueError, KeyError, OSError) as error:
        print(f"make_tables.py: {error!r}", file=sys.stderr)
        return 2
    changed = [page for page, text in pages.items() if page.read_text() != text]
    if arguments.check:
        for page in changed:
            print(f"{page.relative_to(ROOT)} is not what docs/results/ gives", file=sys.stderr)
        return int(bool(changed))
    for page in changed:
        page.write_text(pages[page])
        print(page)
    # In a process of its own: matplotlib may be missing, and the picture reads the README.
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "make_figures.py")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
