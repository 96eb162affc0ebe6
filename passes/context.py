"""What the passes of one pipeline share: the size of the group, the options, and what has been inserted once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from cp_compile.options import Options
from cp_compile.passes.layouts import Layout, Sharded, Size

__all__ = ["Context", "Output"]


@dataclass(frozen=True)
class Output:
    """How a graph output comes back.

    Attributes:
        kind: ``"value"`` (the user's value, the same on every rank), or ``"shard"``: local rows, pads included.
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
