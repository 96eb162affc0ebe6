"""The moves between layouts: one table, keyed by (from, to), that names the next step; one pass a kind of step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch.fx import GraphModule, Node

from cp_compile.errors import InvariantError
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, rewire, tensor_inputs
from cp_compile.passes.layouts import (
    WHOLE,
    Layout,
    Local,
    Partial,
    PerQueryHead,
    Sharded,
    Size,
    Whole,
    carried_cut,
    shape_of,
)

__all__ = ["Build", "can_move", "insert_moves", "next_move"]

Build: TypeAlias = Callable[[Editor, Node, Layout, Layout], Node]
"""Inserts a move: (editor, value, its layout, the wanted layout) -> the moved value."""


def next_move(have: Layout, want: Layout, shape: Sequence[Size], cp_size: int) -> tuple[str, Layout] | None:
    """The kind of the next step from one layout to another, and the layout it leads to; ``None``: they are equal.

    ============== =================== ====================================================
    have           want                steps
    ============== =================== ====================================================
    whole          sharded, per head   slice
    sharded        sharded, other dim  exchange
    sharded        per query head      exchange
    partial        whole               reduce
    partial        sharded             reduce, slice
    sharded        whole               gather
    sharded        sharded, same dim   exchange to another dim and back; where none can carry
                                       the cut: gather, slice
    ============== =================== ====================================================

    Args:
        have: the layout of a value.
        want: the wanted one.
        shape: of the value, in the global view.
        cp_size: ranks.
    """
    if have == want:
        return None
    steps: dict[tuple[type, type], tuple[str, Layout]] = {
        (Whole, Sharded): ("slice", want),
        (Whole, PerQueryHead): ("slice", want),
        (Sharded, Sharded): ("exchange", want),
        (Sharded, PerQueryHead): ("exchange", want),
        (Sharded, Whole): ("gather", WHOLE),
        (Partial, Whole): ("reduce", WHOLE),
        (Partial, Sharded): ("reduce", WHOLE),
        (Partial, PerQueryHead): ("reduce", WHOLE),
    }
    if isinstance(have, Sharded) and isinstance(want, (Sharded, PerQueryHead)) and have.dim == want.dim:
        other = carried_cut(shape, [have.dim], cp_size)
        return ("gather", WHOLE) if other is None else ("exchange", other)
    step = steps.get((type(have), type(want)))
    if step is None:
        raise InvariantError(f"no move leads from {have} to {want}")
    return step


def can_move(have: Layout, want: Layout, shape: Sequence[Size], cp_size: int, *, gather: bool) -> bool:
    """Whether a value can be given another layout; making a cut value whole takes ``gather``."""
    if have != want and (isinstance(have, (PerQueryHead, Local)) or isinstance(want, Local)):
        return False
    while (step := next_move(have, want, shape, cp_size)) is not None:
        if step[0] == "gather" and not gather:
            return False
        have = step[1]
    return True


def insert_moves(module: GraphModule, context: Context, kind: str, build: Build) -> GraphModule:
    """Makes every move whose next step is of ``kind``, once per value and layout, right behind the value.

    Behind the value and not in front of its consumer: a consumer may stand in a ``no_grad`` region, and another one
    of the same value outside.
    """
    edit = Editor(module, context, kind)
    made: dict[tuple[Node, Layout], Node] = {}
    for node in list(module.graph.nodes):
        wants = node.meta.get("cp_wants")
        if not wants:
            continue
        sources = tensor_inputs(node)
        for i, want in enumerate(wants):
            shape = shape_of(sources[i].meta["val"])
            while True:
                source, have = sources[i], sources[i].meta["cp_layout"][0]
                step = next_move(have, want, shape, context.cp_size)
                if step is None or step[0] != kind:
                    break
                key = source, step[1]
                if key not in made:
                    with edit.after(source):
                        made[key] = _sent(edit, build, source, have, step[1])
                    made[key].meta.update(
                        val=source.meta["val"],
                        cp_layout=(step[1],),
                        cp_shown=(step[1],),
                        cp_moved=(kind, have, step[1]),
                    )
                sources[i] = made[key]
        rewire(node, sources)
    return module


def _sent(edit: Editor, build: Build, source: Node, have: Layout, want: Layout) -> Node:
    """A slice sends nothing; the other moves send the value."""
    if isinstance(have, Whole):
        return build(edit, source, have, want)
    return edit.sent(source, lambda value: build(edit, value, have, want), added=isinstance(have, Partial))
