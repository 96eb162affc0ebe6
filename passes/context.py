"""What the passes of one pipeline share: the size of the group, the options, and what has been inserted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from cp_compile.options import Options
from cp_compile.passes.layouts import Layout, Sharded, Size

__all__ = ["Context", "Gathered", "Output", "PassRecord"]


@dataclass(frozen=True)
class Output:
    """How a graph output comes back.

    Attributes:
        kind: ``"value"`` (the user's value, the same on every rank), ``"shard"``: local rows, pads included, or
            ``"absent"``: it is not computed, and an empty tensor has its shape behind a first dim of no rows.
        dim: the dim that is cut.
        size: the global length of the axis that is cut.
        inner: elements of ``dim`` behind the axis; those in front of it are what remains.
        size_index: where among the extra outputs its run-time value stands, if ``size`` is symbolic.
    """

    kind: str = "value"
    dim: int = 0
    size: Size = 0
    inner: int = 1
    size_index: int | None = None


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    Attributes:
        number: its place in the pipeline, from 1.
        name: of the pass.
        milliseconds: it and the cheap checks behind it took.
        added: ops that the graph has more of behind it, by name.
        removed: ops that it has fewer of.
        placed: values whose layout it set or changed.
    """

    number: int
    name: str
    milliseconds: float
    added: Mapping[str, int]
    removed: Mapping[str, int]
    placed: int

    def __str__(self) -> str:
        """What changed: ``+4 all_to_all_single, -2 view; 12 layouts``."""
        ops = [f"+{n} {name}" for name, n in sorted(self.added.items())]
        ops += [f"-{n} {name}" for name, n in sorted(self.removed.items())]
        parts = [", ".join(ops)] if ops else []
        parts += [f"{self.placed} layout{'s' * (self.placed != 1)}"] if self.placed else []
        return "; ".join(parts) or "nothing"


@dataclass(frozen=True)
class Gathered:
    """An op that ran whole on every rank, because the user allowed it (``fallback="gather"``).

    Attributes:
        reason: why no rule covers it.
        line: where it stands in the user's code.
        module: the path of its module.
    """

    reason: str
    line: str
    module: str


@dataclass
class Context:
    """What one graph's passes know and leave for each other.

    Attributes:
        cp_size: ranks of the group.
        group_name: the group's name in collectives.
        options: the user's options.
        prologue: nodes that stand once per graph, by what they compute.
        outputs: how each output comes back; filled by ``place``.
        whole_sorts: names of sorts that no rank can make of its own rows alone; filled by ``place``.
        seeds: where the sequence starts; ``None``: ``place`` finds it.
        records: what each pass did; filled by the runner.
        gathered: ops that run whole on every rank with the user's leave; filled by ``place``.
        inputs: the layouts of the inputs, one each, if the graph is the body of a custom autograd function: they are
            local values, and what comes out stays as it is.
    """

    cp_size: int
    group_name: str
    options: Options = field(default_factory=Options)
    prologue: dict[tuple[Any, ...], Node] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    whole_sorts: set[str] = field(default_factory=set)
    seeds: dict[Node, Sharded] | None = None
    inputs: tuple[Layout, ...] | None = None
    records: list[PassRecord] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
