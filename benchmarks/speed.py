"""How much work is a training step, beside the other ways to train on a sequence that two ranks share?

    python benchmarks/speed.py [--shapes comm-heavy-gqa,balanced-mha] [--arms hooks,single-1] [--rounds 9]
                               [--deepspeed-python PATH] [--json FILE] [--svg FILE] [--markdown FILE]

A step is forward and backward of one sequence through two layers, on two gloo ranks with one thread each. All arms have
the same weights and tokens. One pair of processes measures them in turn, and each round begins with another one. What
counts is the CPU time of all threads of both processes: a rank that waits in gloo sleeps (it costs 0.2 % of a core).
Ratios are an arm's CPU-seconds over ours in the same round: the median, and quartiles. Gradients are averaged over
ranks outside of the measurement, in all arms alike. Then each arm's loss and gradients are compared with those of the
plain model on the whole sequence.

    arm                 what
    ours                cp_compile (always measured)
    single-1, single-2  the model compiled for one rank that has the whole sequence, with 1 and 2 threads
    hooks               slices and four all-to-alls around the attention function, eager, as transformers does it
    hooks-compiled      the same, compiled
    ring, allgather     PyTorch's ring attention by its two rotations, load-balanced; also ring-compiled,
                        allgather-compiled (attention itself stays one opaque op)
    autosp              DeepSpeed AutoSP                       both in an environment of their own, whose interpreter
    alst                DeepSpeed ALST's UlyssesSPAttentionHF  --deepspeed-python names

    python -m venv DIR && DIR/bin/pip install torch==2.13.0 deepspeed==0.19.8 transformers==5.24.0 setuptools ninja

Shapes are comm-heavy (512 tokens of width 256), balanced (2,048 of 512) and attention-heavy (8,192 of 128), each with
-mha (8 key/value heads) and -gqa (2). Exit code 1 where our loss or a gradient is off by more than 1e-3 of its largest
element, or where the lower quartile against eager hooks is below 1; other goals are told, not asked for.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.arm import SHAPES
from peers.pair import ArmError, Pair, PairError, Start, other_environment, this_environment
from peers.rank import Check, Sample
from results import Bar, Quartiles, Result, argument_parser, bars, number, publish, quartiles
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

TOLERANCE = 1e-3
"""The largest error of a loss or gradient, of its largest element."""
SHORTEST = 0.2
"""CPU-seconds of a measurement, at the least."""

OURS, HOOKS = "ours", "hooks"
HERE = (
    OURS, "single-1", "single-2", HOOKS, "hooks-compiled", "ring", "ring-compiled", "allgather", "allgather-compiled",
)  # fmt: skip
DEEPSPEED = ("autosp", "alst")

GOALS: Mapping[tuple[str, str], float] = {
    (shape, arm): goal
    for shape in SHAPES
    for start, arm, goal in (
        ("", HOOKS, 1.3),
        ("", "hooks-compiled", 1.08),
        ("", "autosp", 1.2),
        ("comm-heavy", "ring", 1.35),
        ("balanced", "single-1", 0.97),
    )
    if shape.startswith(start) and shape != "tiny"
}
"""The least ratio that is wanted, by shape and arm."""


@dataclass
class Measured:
    """All of one arm under one shape: its samples, a round each, summed or the longest over ranks."""

    shape: str
    arm: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    check: Check | None = None
    failed: str = ""

    def add(self, samples: Sequence[Sample]) -> None:
        """What the ranks measured in a round."""
        self.cpu.append(sum(sample.cpu for sample in samples))
        self.wall.append(max(sample.wall for sample in samples))


def ratios(arm: Sequence[float], ours: Sequence[float]) -> Quartiles:
    """Quartiles of an arm's seconds over ours, round by round."""
    return quartiles([theirs / mine for theirs, mine in zip(arm, ours, strict=True)])


def steps_for(seconds: float) -> int:
    """Steps that make a measurement long enough, from the CPU-seconds of one."""
    return max(1, math.ceil(SHORTEST / seconds))


class Pairs:
    """The processes for one shape: a pair for all arms of this environment, and one for each arm of DeepSpeed.

    A process can hold one AutoSP engine, and both of DeepSpeed's ways change parts of torch or transformers for good.
    """

    def __init__(self, shape: str, compiler: str, deepspeed: Path | None) -> None:
        self._shape, self._compiler, self._deepspeed = shape, compiler, deepspeed
        self._running: dict[str, Pair] = {}

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._running.values():
            pair.stop()

    def of(self, arm: str) -> Pair:
        """The pair that measures an arm."""
        name = arm if arm in DEEPSPEED else OURS
        if name not in self._running:
            self._running[name] = Pair(self._start(name))
        return self._running[name]

    def _start(self, name: str) -> Start:
        if name == OURS:
            return this_environment("peers.arms", self._shape, self._compiler)
        assert self._deepspeed is not None, "arms that cannot run are left out"
        return other_environment(self._deepspeed, "peers.deepspeed_arms", self._shape, self._compiler)


def measure(shape: str, arms: Sequence[str], rounds: int, pairs: Pairs, say: Callable[[str], None]) -> list[Measured]:
    """All arms under one shape, ours among them; ``say`` gets a word in front of each preparation and measurement."""
    found = {arm: Measured(shape, arm) for arm in arms}
    for arm in arms:
        say(f"{shape}: {arm} compiles")
        try:
            pairs.of(arm).ask("prepare", arm)
        except ArmError as error:
            if arm == OURS or (isinstance(error, PairError) and arm not in DEEPSPEED):
                raise
            found[arm].failed = str(error)
    live = [arm for arm in arms if not found[arm].failed]
    steps = steps_for(sum(sample.cpu for sample in pairs.of(OURS).ask("measure", OURS, 1)))
    for turn in range(rounds):
        first = turn % len(live)
        for arm in live[first:] + live[:first]:
            say(f"{shape}: {arm}, round {turn + 1}")
            found[arm].add(pairs.of(arm).ask("measure", arm, steps))
    for arm in live:
        say(f"{shape}: {arm} is checked")
        checks = [check for check in pairs.of(arm).ask("check", arm) if check is not None]
        found[arm].check = max(checks, key=lambda check: check.worst)
    return list(found.values())


def wrong(measured: Sequence[Measured]) -> list[str]:
    """Why the exit code is 1: our errors, and a lower quartile against eager hooks below 1."""
    problems = []
    for one in measured:
        if one.arm == OURS and one.check is not None and not one.check.worst <= TOLERANCE:
            problems.append(f"{one.shape}: loss off by {one.check.loss:.1e}, {one.check.parameter} by "
                            f"{one.check.gradient:.1e}")  # fmt: skip
        if one.arm == HOOKS and one.cpu:
            ratio = ratio_of(one, measured)
            if ratio.low < 1.0:
                problems.append(f"{one.shape}: the lower quartile against eager hooks is {number(ratio.low)}, below 1")
    return problems


def ours_of(measured: Sequence[Measured], shape: str) -> Measured:
    """Our arm under a shape."""
    return next(one for one in measured if one.arm == OURS and one.shape == shape)


def ratio_of(one: Measured, measured: Sequence[Measured]) -> Quartiles:
    """Quartiles of an arm's seconds over ours, under its shape."""
    return ratios(one.cpu, ours_of(measured, one.shape).cpu)


COLUMNS = (
    "shape", "arm", "CPU-s a step", "wall-s a step", "CPU over ours", "goal", "verdict", "loss error", "gradient error",
)  # fmt: skip


def row(one: Measured, measured: Sequence[Measured]) -> list[Any]:
    """One arm in the table."""
    if one.failed or not one.cpu:
        reason = one.failed.strip().splitlines()[-1][:60] if one.failed else "not run (give --deepspeed-python)"
        return [one.shape, one.arm, None, None, None, None, reason, None, None]
    ratio = None if one.arm == OURS else ratio_of(one, measured)
    goal = GOALS.get((one.shape, one.arm))
    verdict = "" if goal is None or ratio is None else "reached" if ratio.median >= goal else "missed"
    cpu, wall = statistics.median(one.cpu), statistics.median(one.wall)
    assert one.check is not None, "what is measured is checked"
    return [one.shape, one.arm, cpu, wall, ratio, goal, verdict, one.check.loss, one.check.gradient]


def by_shape(measured: Sequence[Measured]) -> Result:
    """The ratios with a column a shape, for a README."""
    shapes = list(dict.fromkeys(one.shape for one in measured))
    found = {(one.arm, one.shape): one for one in measured if one.cpu}
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in found):
        mine = [found.get((arm, shape)) for shape in shapes]
        errors = [one.check.gradient for one in mine if one is not None and one.check is not None]
        rows.append([arm, *(_cell(one, measured) for one in mine), max(errors)])
    return Result("speed", ("CPU-seconds over ours (quartiles)", *shapes, "worst gradient error"), rows)


def _cell(one: Measured | None, measured: Sequence[Measured]) -> Any:
    if one is None:
        return None
    return f"{number(statistics.median(one.cpu))} s" if one.arm == OURS else ratio_of(one, measured)


def picture(measured: Sequence[Measured]) -> str:
    """Bars of the ratios, by shape."""
    groups: dict[str, list[Bar]] = {}
    for one in measured:
        if one.cpu and one.arm != OURS:
            ratio = ratio_of(one, measured)
            groups.setdefault(one.shape, []).append(Bar(one.arm, ratio, GOALS.get((one.shape, one.arm))))
    return bars("CPU time of a training step, over that of cp_compile", groups, unit="CPU-seconds over ours")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with ours among the arms."""
    parser = argument_parser(__doc__)
    parser.set_defaults(shapes=[shape for shape in SHAPES if shape != "tiny"], arms=[*HERE, *DEEPSPEED])
    parser.add_argument("--compiler", default="inductor", help="inductor, aot_eager or eager (default: %(default)s)")
    parser.add_argument("--deepspeed-python", type=Path, help="the interpreter of an environment with DeepSpeed")
    options = parser.parse_args(arguments)
    for kind, known in (("shapes", SHAPES), ("arms", (*HERE, *DEEPSPEED))):
        if unknown := [name for name in getattr(options, kind) if name not in known]:
            parser.error(f"--{kind}: no {', '.join(unknown)} among {', '.join(known)}")
    if options.deepspeed_python and not options.deepspeed_python.exists():
        parser.error(f"--deepspeed-python: there is no {options.deepspeed_python}")
    options.arms = [OURS, *(arm for arm in options.arms if arm != OURS)]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    running = [arm for arm in options.arms if arm not in DEEPSPEED or options.deepspeed_python]
    measured: list[Measured] = []
    steps = len(options.shapes) * len(running) * (options.rounds + 2)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps)
        say = lambda what: progress.update(task, description=what, advance=1)
        for shape in options.shapes:
            with Pairs(shape, options.compiler, options.deepspeed_python) as pairs:
                measured += measure(shape, running, options.rounds, pairs, say)
            measured += [Measured(shape, arm) for arm in options.arms if arm not in running]
    rows = [row(one, measured) for one in measured]
    settings = {"rounds": options.rounds, "compiler": options.compiler}
    result = Result("speed", COLUMNS, rows, settings, raw=measured)
    publish(result, options, picture(measured), by_shape(measured))
    for one in measured:
        if one.failed:
            print(f"{one.shape}: {one.arm} failed:\n{one.failed}")
    problems = wrong(measured)
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
