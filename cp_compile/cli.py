"""The command line: ``cp-compile demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="cp-compile",
        description='Context parallelism as a compiler pass: torch.compile(model, backend="cp_ulysses").',
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small model on CPU ranks and in one process, and compare",
        description="Trains a small Llama on real text, once on ranks that share each sequence and once in one "
        "process, and compares the losses. Exit code 0: equal within 1e-4. Takes 1 to 3 minutes, compilation included.",
    )
    demo.add_argument("--ranks", type=_positive, default=2, help="processes that share each sequence (default: 2)")
    demo.add_argument("--steps", type=_positive, default=20, help="optimizer steps (default: 20)")
    demo.add_argument(
        "--sequence-length",
        type=_positive,
        default=2048,
        help="tokens of a sequence; ranks need not divide it (default: 2048)",
    )
    demo.add_argument("--text", metavar="FILE", help="train on this file (default: the standard library's sources)")
    demo.add_argument(
        "--compiler", choices=("inductor", "aot_eager", "eager"), default="inductor", help="(default: inductor)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    from cp_compile.demo import Demo, demo
    from cp_compile.errors import CPError

    options = parser().parse_args(arguments)
    settings = Demo(options.ranks, options.steps, options.sequence_length, options.text, options.compiler)
    try:
        return 0 if demo(settings) else 1
    except (CPError, OSError) as error:
        print(f"cp-compile: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
