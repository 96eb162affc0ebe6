"""The pipeline: one list of passes, and a runner that knows none of them.

The runner keeps what each pass did (``Context.records``), logs it (``TORCH_LOGS="+cp_compile"``), and hands the graph
in front of and behind each pass to torch's structured trace (``TORCH_TRACE``, which ``tlparse`` shows).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from cp_compile._compat import trace_graph
from cp_compile.errors import InvariantError, OptionError
from cp_compile.options import Options
from cp_compile.passes.bind_rank import bind_rank
from cp_compile.passes.bind_seed import bind_seed
from cp_compile.passes.check import check, check_edges
from cp_compile.passes.chunk_loss import chunk_loss
from cp_compile.passes.context import Context, PassRecord
from cp_compile.passes.exchange import exchange
from cp_compile.passes.gather import gather
from cp_compile.passes.hoist import hoist
from cp_compile.passes.hoist_slices import hoist_slices
from cp_compile.passes.localise import localise
from cp_compile.passes.masks import masks
from cp_compile.passes.overlap import overlap
from cp_compile.passes.pack import pack
from cp_compile.passes.place import place
from cp_compile.passes.recompute import recompute
from cp_compile.passes.reduction import reduce_partial
from cp_compile.passes.repeats import repeats
from cp_compile.passes.return_sizes import return_sizes
from cp_compile.passes.slicing import slice_whole
from cp_compile.passes.tile_mlp import tile_mlp

__all__ = ["PIPELINE", "Pass", "PassStep", "check_order", "chosen_steps", "rewrite"]

log = logging.getLogger(__name__)
Pass: TypeAlias = Callable[[GraphModule, Context], GraphModule]


@dataclass(frozen=True)
class PassStep:
    """A pass, what must hold before it, and what holds after it.

    Attributes:
        run: the pass.
        requires: what passes in front of it provide.
        provides: what holds behind it.
        kind: its name, where that is not the function's.
        optional: whether the program is as exact without it.
    """

    run: Pass
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    kind: str = ""
    optional: bool = False

    @property
    def name(self) -> str:
        """The name that the pass stamps on its nodes."""
        return self.kind or self.run.__name__


PIPELINE: tuple[PassStep, ...] = (
    PassStep(masks, requires=("global",), optional=True),
    PassStep(repeats, requires=("global",), optional=True),
    PassStep(place, requires=("global",), provides=("layouts",)),
    PassStep(hoist, requires=("layouts",), optional=True),
    PassStep(hoist_slices, requires=("layouts",), optional=True),
    PassStep(bind_rank, requires=("global",), provides=("rank",)),
    PassStep(bind_seed, requires=("layouts", "rank"), provides=("seed",)),
    PassStep(reduce_partial, requires=("layouts",), provides=("reduce",), kind="reduce"),
    PassStep(gather, requires=("layouts", "reduce"), provides=("gather",)),
    PassStep(pack, requires=("layouts", "rank", "reduce", "gather"), optional=True),
    PassStep(exchange, requires=("layouts", "rank", "reduce", "gather"), provides=("exchange",)),
    PassStep(slice_whole, requires=("layouts", "rank", "reduce", "gather"), provides=("slice",), kind="slice"),
    PassStep(localise, requires=("seed", "reduce", "gather", "exchange", "slice"), provides=("local",)),
    PassStep(chunk_loss, requires=("local",), optional=True),
    PassStep(return_sizes, requires=("layouts",)),
    PassStep(tile_mlp, requires=("local",)),
    PassStep(overlap, requires=("local",), optional=True),
    PassStep(recompute, requires=("local",)),
    PassStep(check, requires=("local",), provides=("checked",)),
)


def check_order(steps: Sequence[PassStep]) -> None:
    """Checks, before anything runs, that each pass finds what it requires.

    Raises:
        InvariantError: a pass stands in front of one that it builds on.
    """
    have = {"global"}
    for step in steps:
        missing = [need for need in step.requires if need not in have]
        if missing:
            raise InvariantError(f"pass {step.name!r} requires {', '.join(missing)}, which no pass before it provides")
        have.update(step.provides)


def chosen_steps(options: Options, steps: Sequence[PassStep] = PIPELINE) -> tuple[PassStep, ...]:
    """The pipeline as the options ``leave_out`` and ``stop_after`` have it.

    Raises:
        OptionError: a name is not that of a pass, or of one without which the program is another one.
    """
    names = [step.name for step in steps]
    for option, given in (("leave_out", options.leave_out), ("stop_after", (options.stop_after,))):
        for name in given:
            if name is not None and name not in names:
                raise OptionError(f"option {option!r} names the pass {name!r}; the passes are {', '.join(names)}")
    needed = [step.name for step in steps if step.name in options.leave_out and not step.optional]
    if needed:
        optional = ", ".join(step.name for step in steps if step.optional)
        raise OptionError(
            f"option 'leave_out' names the pass {needed[0]!r}, without which the program is not exact; those that can "
            f"be left out are {optional}"
        )
    last = len(names) if options.stop_after is None else names.index(options.stop_after) + 1
    return tuple(step for step in steps[:last] if step.name not in options.leave_out)


def rewrite(
    module: GraphModule,
    context: Context,
    steps: Sequence[PassStep] | None = None,
    after_each: Callable[[str, GraphModule], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> GraphModule:
    """Runs the passes in order, each followed by the cheap checks.

    Args:
        module: a graph in the global view; it is changed in place.
        context: the group and the options.
        steps: the passes; default: those that the options choose.
        after_each: called with the name of the pass and the graph behind it.
        progress: called with what is about to run, in words.
    """
    steps = chosen_steps(context.options) if steps is None else steps
    check_order(steps)
    finished: set[str] = set()
    for number, step in enumerate(steps, 1):
        if progress is not None:
            progress(f"pass {number} of {len(steps)}: {step.name}")
        trace_graph(f"cp_compile_{number:02}_{step.name}_before", module)
        ops, layouts, start = _ops(module), _layouts(module), time.perf_counter()
        module = step.run(module, context)
        finished.update(step.provides)
        check_edges(module, context, frozenset(finished))
        record = _record(number, step.name, time.perf_counter() - start, module, ops, layouts)
        context.records.append(record)
        log.debug("pass %d of %d: %-10s %7.1f ms  %s", number, len(steps), step.name, record.milliseconds, record)
        trace_graph(f"cp_compile_{number:02}_{step.name}_after", module)
        if after_each is not None:
            after_each(step.name, module)
    for gathered in context.gathered:
        log.info("runs whole on every rank: %s (%s)", gathered.reason, gathered.line or gathered.module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _ops(module: GraphModule) -> Counter[str]:
    """How often each op stands in a graph, and how many inputs it has."""
    count: Counter[str] = Counter()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            count["input"] += 1
        elif node.op == "call_function":
            count[str(getattr(node.target, "__name__", node.target)).split(".")[0]] += 1
    return count


def _layouts(module: GraphModule) -> dict[Node, Any]:
    return {node: node.meta["cp_layout"] for node in module.graph.nodes if "cp_layout" in node.meta}


def _record(
    number: int, name: str, seconds: float, module: GraphModule, ops: Counter[str], layouts: dict[Node, Any]
) -> PassRecord:
    now = _ops(module)
    placed = sum(1 for node, layout in _layouts(module).items() if layouts.get(node) != layout)
    return PassRecord(number, name, 1e3 * seconds, dict(now - ops), dict(ops - now), placed)
