# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m convt3d info | demo | check | bench | explain``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:  # what there is, with a line on each, rather than that one is missing
        parser.print_help(sys.stderr)
        return 2
    from .console import Console

    console = Console(plain=arguments.plain)
    if arguments.command == "info":
        from .info import info

        return info(console)
    if arguments.command == "check":
        from .check import check

        return check(console, arguments.device, arguments.seed)
    if arguments.command in ("bench", "explain"):
        from .call import SHAPE, SHAPE_TIMED_ON_CPU, spec_of

        if arguments.command == "bench" and arguments.shape is None and _on_cpu(arguments.device):
            arguments.shape = SHAPE_TIMED_ON_CPU
            console.line(f"On a CPU a smaller call than on a GPU, where --shape is {' '.join(SHAPE)}.")
        try:
            spec = spec_of(arguments)
        except ValueError as error:
            parser.error(str(error))
        if arguments.command == "explain":
            from .explain import explain_call

            return explain_call(console, spec)
        from .bench import bench

        return bench(console, spec, arguments.output, arguments.device, arguments.compile)
    from .demo import demo

    return demo(
        console, output=arguments.output, device=arguments.device, batch=arguments.batch, seed=arguments.seed
    )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--plain", action="store_true", help="plain text, even where rich is installed")
    parser = argparse.ArgumentParser(
        prog="python -m convt3d", description="3D transposed convolution fused with bias, add and activation."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "info", parents=[common], help="versions, GPU, and which kernels are usable here, or why not"
    )
    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="run the reference network, compare with float64 and with PyTorch, save a picture",
    )
    demo.add_argument(
        "--output", type=Path, default=Path("out"), help="folder for the picture (default: out)"
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    demo.add_argument("--batch", type=_positive, help="batch size (default: 128 on a GPU, 2 on a CPU)")
    demo.add_argument("--seed", type=int, help="of weights and inputs (default: a new one, printed)")
    check = commands.add_parser(
        "check", parents=[common], help="run what networks run, in every type and layout, against float64"
    )
    check.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    check.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    bench = commands.add_parser(
        "bench", parents=[common], help="time a call of yours against eager PyTorch and torch.compile"
    )
    bench.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    bench.add_argument("--output", type=Path, default=Path("out"), help="folder for bench.json and bench.png")
    bench.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    explain = commands.add_parser(
        "explain", parents=[common], help="which kernel a call of yours runs on, and why not a faster one"
    )
    from .call import add_call_arguments

    for command in (bench, explain):
        add_call_arguments(command)
    return parser


def _on_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
