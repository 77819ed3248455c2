# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m convt3d info`` and ``python -m convt3d demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    from .console import Console

    console = Console(plain=arguments.plain)
    if arguments.command == "info":
        from .info import info

        return info(console)
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
    commands = parser.add_subparsers(dest="command", required=True)
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
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
