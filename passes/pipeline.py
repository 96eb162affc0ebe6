"""The pipeline: one list of passes, and a runner that knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import GraphModule

from cp_compile.errors import InvariantError
from cp_compile.passes.bind_rank import bind_rank
from cp_compile.passes.bind_seed import bind_seed
from cp_compile.passes.check import check, check_edges
from cp_compile.passes.context import Context
from cp_compile.passes.exchange import exchange
from cp_compile.passes.gather import gather
from cp_compile.passes.hoist import hoist
from cp_compile.passes.localise import localise
from cp_compile.passes.masks import masks
from cp_compile.passes.overlap import overlap
from cp_compile.passes.place import place
from cp_compile.passes.reduction import reduce_partial
from cp_compile.passes.repeats import repeats
from cp_compile.passes.return_sizes import return_sizes
from cp_compile.passes.slicing import slice_whole

__all__ = ["PIPELINE", "Pass", "PassStep", "check_order", "rewrite"]

Pass: TypeAlias = Callable[[GraphModule, Context], GraphModule]


@dataclass(frozen=True)
class PassStep:
    """A pass, what must hold before it, and what holds after it."""

    run: Pass
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    kind: str = ""

    @property
    def name(self) -> str:
        """The name that the pass stamps on its nodes."""
        return self.kind or self.run.__name__


PIPELINE: tuple[PassStep, ...] = (
    PassStep(masks, requires=("global",)),
    PassStep(repeats, requires=("global",)),
    PassStep(place, requires=("global",), provides=("layouts",)),
    PassStep(hoist, requires=("layouts",)),
    PassStep(bind_rank, requires=("global",), provides=("rank",)),
    PassStep(bind_seed, requires=("layouts", "rank"), provides=("seed",)),
    PassStep(reduce_partial, requires=("layouts",), provides=("reduce",), kind="reduce"),
    PassStep(gather, requires=("layouts", "reduce"), provides=("gather",)),
    PassStep(exchange, requires=("layouts", "rank", "reduce", "gather"), provides=("exchange",)),
    PassStep(slice_whole, requires=("layouts", "rank", "reduce", "gather"), provides=("slice",), kind="slice"),
    PassStep(localise, requires=("seed", "reduce", "gather", "exchange", "slice"), provides=("local",)),
    PassStep(return_sizes, requires=("layouts",)),
    PassStep(overlap, requires=("local",)),
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


def rewrite(
    module: GraphModule,
    context: Context,
    steps: Sequence[PassStep] = PIPELINE,
    after_each: Callable[[str, GraphModule], None] | None = None,
) -> GraphModule:
    """Runs the passes in order, each followed by the cheap checks.

    Args:
        module: a graph in the global view; it is changed in place.
        context: the group and the options.
        steps: the passes.
        after_each: called with the name of the pass and the graph behind it.
    """
    check_order(steps)
    finished: set[str] = set()
    for step in steps:
        module = step.run(module, context)
        finished.update(step.provides)
        check_edges(module, context, frozenset(finished))
        if after_each is not None:
            after_each(step.name, module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
