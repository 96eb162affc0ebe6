"""What does cp_ulysses add to the time that torch.compile takes?

    python benchmarks/compile_time.py [--rounds 5] [--shapes small] [--arms ours,stock-local,stock] [--json FILE]

The first step, forward and backward, of a small Llama on the CPU, without caches: ``ours`` is one of 8 ranks, whose
exchanges return at once; ``stock`` is torch's inductor on the same model and the whole sequence, and ``stock-local`` on
the tokens of one rank. Arms take turns in each round, and ratios are of one round. Two figures:

- *Dynamo to code*: CPU seconds of this process. All of torch.compile runs in it but g++, which has processes of its
  own, and the step itself, which is timed once more and taken off.
- *first step*: seconds on the clock, g++ and all.

``parts`` are from torch's own timers (``torch._dynamo.utils.compile_times``), on the clock.

Besides: how often the backend is called for 5 lengths; what capture and each pass cost in milliseconds per 1,000 nodes,
beside Dynamo's tracing; and CPU seconds of all passes on 32 layers at 1,024 ranks over those at 8.

Exit code 1: 5 lengths were compiled more than twice.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from one_rank import Shape, llama, one_rank, parsed
from results import Bar, Quartiles, Result, argument_parser, bars, publish, quartiles
from torch.fx import GraphModule

from cp_compile.backend import cp_ulysses
from cp_compile.capture import capture
from cp_compile.export import captured, rewritten
from cp_compile.options import Options
from cp_compile.passes import Context, rewrite

__all__ = ["ARMS", "CASES", "Case", "First", "compilations", "first_step", "main", "parts_of", "ratios"]

ARMS = ("ours", "stock-local", "stock")
MOST = 2
"""Compilations over all lengths: one for the first, and one with the length as a symbol."""


@dataclass(frozen=True)
class Case:
    """What is compiled.

    Attributes:
        shape: the model.
        cp_size: ranks.
        length: tokens of the sequence.
        lengths: further calls of one compiled function.
        deep: a model of many layers, whose heads both numbers of ranks divide.
        ranks: few and many.
        compiler: of both arms.
    """

    shape: Shape
    cp_size: int
    length: int
    lengths: tuple[int, ...]
    deep: Shape
    ranks: tuple[int, int]
    compiler: str = "inductor"


_LENGTHS = (256, 384, 512, 640, 160)
CASES = {
    "tiny": Case(Shape(64, 192, 1, 8, 8, 256), 8, 64, _LENGTHS, Shape(64, 64, 2, 32, 32, 64), (2, 32), "aot_eager"),
    "small": Case(Shape(128, 448, 4, 8, 8, 512), 8, 512, _LENGTHS, Shape(2048, 2048, 32, 1024, 1024, 64), (8, 1024)),
    "one layer": Case(Shape(128, 448, 1, 8, 8, 512), 8, 512, _LENGTHS, Shape(2048, 2048, 8, 1024, 1024, 64), (8, 1024)),
}


@dataclass(frozen=True)
class First:
    """The first step of an arm.

    Attributes:
        total: seconds on the clock.
        code: CPU seconds of this process, those of another step taken off.
        parts: seconds on the clock, by what was done.
    """

    total: float
    code: float
    parts: Mapping[str, float]


def first_step(case: Case, arm: str) -> First:
    """Compiles an arm from nothing, and runs its first step."""
    torch.compiler.reset()
    model = llama(case.shape)
    ids = torch.randint(case.shape.vocabulary, (1, case.length // (case.cp_size if arm == "stock-local" else 1)))
    with one_rank(case.cp_size):
        compiled = compiled_by(model, case, arm)
        before = timers()
        clock, cpu = time.perf_counter(), time.process_time()
        compiled(ids).backward()
        total, used = time.perf_counter() - clock, time.process_time() - cpu
        after = timers()
        cpu = time.process_time()
        compiled(ids).backward()
        step = time.process_time() - cpu
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return First(total, used - step, parts_of(spent, total))


def compiled_by(model: torch.nn.Module, case: Case, arm: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model under an arm's backend."""
    if arm == "ours":
        return torch.compile(model, backend="cp_ulysses", options={"compiler": case.compiler})
    return torch.compile(model, backend=case.compiler)


def timers() -> dict[str, float]:
    """Seconds of this process so far in each part of torch.compile that torch times."""
    found: Any = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    return {name: float(seconds) for name, seconds in zip(*found) if name != "Function"}


def parts_of(spent: Mapping[str, float], total: float) -> dict[str, float]:
    """What torch's timers, which are nested, say of a first step: parts that add up to it.

    The wait for g++ is within inductor's time; without threads of its own, inductor calls g++ itself.
    """
    seconds = defaultdict(float, spent)
    backend, aot = seconds["OutputGraph.call_user_compiler"], seconds["create_aot_dispatcher_function"]
    wait = seconds["async_compile.wait"] or seconds["compile_file"]
    found = {
        "Dynamo": seconds["_compile.compile_inner"] - backend,
        "rewrite": backend - aot,
        "AOTAutograd": aot - seconds["compile_fx.<locals>.fw_compiler_base"],
        "inductor": seconds["compile_fx_inner"] - wait,
        "g++": wait,
    }
    return {**found, "rest": total - sum(found.values())}


def warm_up(cases: Sequence[Case]) -> None:
    """What a process does once: imports, patterns of inductor, a look for the vector instructions of the CPU."""
    for compiler in {case.compiler for case in cases}:
        torch.compile(lambda x: (x.sin() @ x).sum(), backend=compiler)(torch.ones(4, 4, requires_grad=True)).backward()
    passes(CASES["tiny"])


def compilations(case: Case) -> int:
    """How often the backend is called for all lengths of a case, under torch's defaults."""
    torch.compiler.reset()
    calls = 0

    def backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal calls
        calls += 1
        return cp_ulysses(graph_module, inputs, options={"compiler": case.compiler})

    with one_rank(case.cp_size):
        compiled = torch.compile(llama(case.shape), backend=backend)
        for length in case.lengths:
            compiled(torch.zeros(1, length, dtype=torch.int64)).backward()
    return calls


def passes(case: Case) -> tuple[dict[str, float], int]:
    """Seconds on the clock of Dynamo's tracing, of capture and of each pass; and the nodes of the rewritten graph."""
    parts: dict[str, float] = {}
    nodes = 0

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Any:
        nonlocal nodes
        parts["Dynamo"] = time.perf_counter() - start
        clock = time.perf_counter()
        module, context = capture(graph_module, inputs), Context(case.cp_size, "0")
        parts["capture"] = time.perf_counter() - clock
        nodes = len(rewrite(module, context).graph.nodes)
        parts.update({record.name: record.milliseconds / 1e3 for record in context.records})
        return graph_module

    torch.compiler.reset()
    model, ids = llama(case.shape), torch.zeros(1, case.length, dtype=torch.int64)
    start = time.perf_counter()
    torch.compile(model, backend=backend)(ids)
    return parts, nodes


def many_ranks(case: Case, rounds: int) -> list[float]:
    """CPU seconds of the rewrite of a deep model for many ranks, over those for few; a ratio a round."""
    few, many = case.ranks
    model, ids = llama(case.deep, "meta"), torch.zeros(1, 2 * many, dtype=torch.int64, device="meta")
    plain, signature = captured(model, [ids], {}, None)

    def seconds(cp_size: int) -> float:
        start = time.process_time()
        rewritten(plain, signature, cp_size, Options())
        return time.process_time() - start

    seconds(few)
    found = []
    for number in range(rounds):
        # Each goes first in turn.
        spent = {cp_size: seconds(cp_size) for cp_size in case.ranks[:: 1 if number % 2 else -1]}
        found.append(spent[many] / spent[few])
    return found


def ratios(ours: Sequence[float], others: Sequence[float]) -> Quartiles:
    """Quartiles of the ratios of each round."""
    return quartiles([a / b for a, b in zip(ours, others, strict=True)])


GOALS = {"Dynamo to code": 1.08, "first step": 1.06}
COLUMNS = ("shape", "what", "value", "goal, at most")


def rows_of(name: str, arms: Mapping[str, Sequence[First]], counts: Mapping[str, Any]) -> list[list[Any]]:
    """The lines of a shape: ratios to each stock arm, and what else was counted."""
    found: list[list[Any]] = []
    for other in (arm for arm in arms if arm != "ours" and "ours" in arms):
        for what, of in (("Dynamo to code", lambda x: x.code), ("first step", lambda x: x.total)):
            value = ratios([of(x) for x in arms["ours"]], [of(x) for x in arms[other]])
            found.append([name, f"{what}, over {other}", value, GOALS[what] if other == "stock-local" else None])
    for arm, runs in arms.items():
        found.append([name, f"{arm}: Dynamo to code, CPU seconds", quartiles([x.code for x in runs]), None])
        found.append([name, f"{arm}: first step, seconds", quartiles([x.total for x in runs]), None])
    case = CASES[name]
    few, many = case.ranks
    return [
        *found,
        [name, f"compilations for {len(case.lengths)} lengths", counts["compilations"], MOST],
        [name, f"passes on {case.deep.layers} layers, {many} ranks over {few}", quartiles(counts["many ranks"]), 1.02],
        [name, "all passes, ms per 1,000 nodes", counts["passes"]["all passes"], None],
    ]


def per_thousand(runs: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, Quartiles]:
    """Milliseconds per 1,000 nodes of each part, and of all passes together."""
    found: dict[str, list[float]] = defaultdict(list)
    for parts, nodes in runs:
        for name, seconds in parts.items():
            found[name].append(1e6 * seconds / nodes)
        found["all passes"].append(sum(1e6 * s / nodes for name, s in parts.items() if name not in _FRONT))
    return {name: quartiles(values) for name, values in found.items()}


_FRONT = ("Dynamo", "capture")


def table_of_passes(name: str, parts: Mapping[str, Quartiles]) -> Any:
    """The table of one shape."""
    heads = ("part", "ms per 1,000 nodes", "of Dynamo's tracing")
    rows = [[part, value, value.median / parts["Dynamo"].median] for part, value in parts.items()]
    return Result(f"{name}: capture and passes", heads, rows).table()


def picture(found: Mapping[str, Mapping[str, Sequence[First]]]) -> str:
    """Bars of the parts that took time, a group an arm and shape."""
    groups = {}
    for name, arms in found.items():
        for arm, runs in arms.items():
            parts = {part: quartiles([x.parts[part] for x in runs]) for part in runs[0].parts}
            groups[f"{name}: {arm}"] = [Bar(part, value) for part, value in parts.items() if value.high > 0]
    return bars("The first step under torch.compile", groups, unit="seconds", reference=None)


def main(arguments: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import track

    parser = argument_parser(__doc__, rounds=5)
    parser.set_defaults(shapes=["small"], arms=list(ARMS))
    options = parsed(parser, arguments, CASES, ARMS)
    console = Console(stderr=True)
    found: dict[str, dict[str, list[First]]] = {name: {arm: [] for arm in options.arms} for name in options.shapes}
    counts: dict[str, dict[str, Any]] = {}
    with torch.compiler.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        warm_up([CASES[name] for name in options.shapes])
        turns = [(n, name, arm) for n in range(options.rounds) for name in options.shapes for arm in options.arms]
        for _, name, arm in track(turns, "first steps", console=console, transient=True):
            found[name][arm].append(first_step(CASES[name], arm))
        for name in track(options.shapes, "counts and passes", console=console, transient=True):
            case = CASES[name]
            counts[name] = {
                "compilations": compilations(case),
                "passes": per_thousand([passes(case) for _ in range(options.rounds)]),
                "many ranks": many_ranks(case, options.rounds),
            }
    rows = [row for name in options.shapes for row in rows_of(name, found[name], counts[name])]
    raw = {"first steps": found, "counts": counts}
    cases = {name: CASES[name] for name in options.shapes}
    publish(
        Result("compile time", COLUMNS, rows, {"cases": cases, "rounds": options.rounds}, raw), options, picture(found)
    )
    for name in options.shapes:
        Console().print(table_of_passes(name, counts[name]["passes"]))
    often = [name for name in options.shapes if counts[name]["compilations"] > MOST]
    for name in often:
        print(f"NOT AS IT SHOULD BE: {name}: {counts[name]['compilations']} compilations, and {MOST} are enough")
    return int(bool(often))


if __name__ == "__main__":
    sys.exit(main())
