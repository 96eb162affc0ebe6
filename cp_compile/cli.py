"""The command line: ``cp-compile demo``, ``explain``, ``plan``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cp_compile.errors import CPError, OptionError

__all__ = ["main"]

_TARGET = (
    "module:factory, a function that is called with the sequence length (or nothing) and gives (model, args), "
    "(model, kwargs) or (model, args, kwargs); or the config.json of a model of transformers"
)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def _length(text: str) -> int:
    """``8K``, ``1M``, ``1000``."""
    found = re.fullmatch(r"(\d+)([KM]?)", text, re.IGNORECASE)
    if not found or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no length; it takes 8192, 8K or 1M")
    return int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2].upper()]


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="cp-compile",
        description='Context parallelism as a compiler pass: torch.compile(model, backend="cp_ulysses").',
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_explain(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: Any) -> None:
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
    demo.set_defaults(run=_demo)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show the rewritten graph of a model, or draw it",
        description="Rewrites a model for one of N ranks, on fake tensors, and prints the graph as Python: shapes are "
        "those of the whole; each line has its layout, and each move what is sent and why. Layers that are equal stand "
        "there once.",
    )
    explain.add_argument("target", metavar="TARGET", help=_TARGET)
    explain.add_argument("--cp", type=_positive, default=2, help="ranks that share each sequence (default: 2)")
    explain.add_argument("--sequence-length", type=_length, default=2048, help="tokens, as in 8K (default: 2048)")
    explain.add_argument("--full", action="store_true", help="every layer, and every op of each move")
    explain.add_argument("--diff", action="store_true", help="only what differs from the plain graph")
    explain.add_argument("--report", action="store_true", help="exchanges, bytes, saved activations and the peak too")
    explain.add_argument("--draw", metavar="FILE", help="write a picture: .html, or .svg of one layer")
    _add_options(explain)
    explain.set_defaults(run=_explain)


def _add_plan(commands: Any) -> None:
    from cp_compile.plan import CP_SIZES, LENGTHS

    plan = commands.add_parser(
        "plan",
        help="what fits in a device's memory, by length and ranks",
        description="Memory and exchanges of a rank for each length, number of ranks and recompute policy, counted in "
        "the rewritten graph on fake tensors; no GPU is needed.",
    )
    plan.add_argument("target", metavar="TARGET", help=_TARGET)
    plan.add_argument("--memory", type=_above_zero, required=True, metavar="GIB", help="memory of a device in GiB")
    plan.add_argument("--cp", type=_positive, nargs="+", default=list(CP_SIZES), help="ranks (default: 1 to 64)")
    plan.add_argument(
        "--lengths", type=_length, nargs="+", default=list(LENGTHS), help="tokens (default: 8K to 4M, doubling)"
    )
    plan.add_argument(
        "--sharding",
        choices=("ddp", "zero1", "fsdp"),
        default="fsdp",
        help="of parameters, gradients and optimizer (default: fsdp, FSDP2 on the root)",
    )
    plan.add_argument("--replicas", type=_positive, default=1, help="data-parallel groups of ranks (default: 1)")
    plan.add_argument("--dtype", default="bfloat16", help="of the parameters (default: bfloat16)")
    plan.add_argument("--optimizer", default="AdamW", help="of torch.optim (default: AdamW)")
    plan.add_argument("--rates", metavar="FILE", help="rates of machines (default: plan/rates.ini of the package)")
    plan.add_argument("--device", metavar="NAME", help="a section of the rates (default: the first one)")
    plan.add_argument("--draw", metavar="FILE", help="write the curves as an SVG")
    plan.add_argument("--json", metavar="FILE", help="write all figures")
    _add_options(plan)
    plan.set_defaults(run=_plan)


def _add_options(command: Any) -> None:
    command.add_argument("--fallback", choices=("refuse", "gather"), default="refuse", help="(default: refuse)")
    command.add_argument("--sequence", metavar="NAME[:DIM]", help="the input that holds the sequence")


def _options(given: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"fallback": given.fallback}
    if given.sequence:
        name, mark, dim = given.sequence.partition(":")
        if mark and not re.fullmatch(r"-?\d+", dim):
            raise OptionError(f"--sequence is {given.sequence!r}; it takes a name, or a name and a dim as in ids:1")
        found["sequence"] = (name, int(dim)) if dim else name
    return found


def _demo(given: Any) -> int:
    from cp_compile.demo import Demo, demo

    settings = Demo(given.ranks, given.steps, given.sequence_length, given.text, given.compiler)
    return 0 if demo(settings) else 1


def _explain(given: Any) -> int:
    import torch

    from cp_compile.export import export
    from cp_compile.factory import find_factory

    with torch.device("meta"):
        example = find_factory(given.target)(given.sequence_length)
    program = export(example.model, example.args, example.kwargs, cp_size=given.cp, **_options(given))
    if given.draw:
        program.draw(given.draw)
        print(f"wrote {given.draw}")
    else:
        print(program.explain(full=given.full, diff=given.diff), end="")
    if given.report:
        from rich.console import Console

        Console().print(program.report())
    return 0


def _plan(given: Any) -> int:
    import torch
    from rich.console import Console

    from cp_compile.factory import Example, find_factory
    from cp_compile.plan import plan
    from cp_compile.plan.rates import read_rates
    from cp_compile.progress import progress

    dtype, optimizer = getattr(torch, given.dtype, None), getattr(torch.optim, given.optimizer, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"--dtype is {given.dtype!r}; it takes a floating dtype of torch, as in bfloat16")
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise OptionError(f"--optimizer is {given.optimizer!r}; it takes an optimizer of torch.optim, as in AdamW")
    factory = find_factory(given.target)

    def make(length: int) -> Example:
        example = factory(length)
        return Example(example.model.to(dtype), example.args, example.kwargs)

    with progress() as say:
        found = plan(
            make,
            memory=int(given.memory * 2**30),
            lengths=sorted(given.lengths),
            cp_sizes=sorted(given.cp),
            sharding=given.sharding,
            replicas=given.replicas,
            optimizer=optimizer,
            rates=read_rates(given.rates, given.device),
            progress=say,
            **_options(given),
        )
    Console().print(found)
    if given.draw:
        found.draw(given.draw)
    if given.json:
        Path(given.json).write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    given = parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except (CPError, OSError) as error:
        print(f"cp-compile: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
