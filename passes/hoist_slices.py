"""hoist_slices: a whole value that is only wanted cut is computed cut, from slices of what it is made of.

    angle = positions[:, None] * frequency    whole [S, d]         angle    [L, d], of this rank's positions
    cos = cos(angle)                          whole [S, d]   ->    cos      [L, d]
    mul(q, cos)          wants cos cut in S                        mul(q, cos)

An analysis, like ``place``: it changes layouts and no node. No rank holds, or computes, rotary tables or position
embeddings of the whole sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile.passes.context import Context
from cp_compile.passes.editor import tensor_inputs
from cp_compile.passes.layouts import WHOLE, Layout, Sharded, Whole, same
from cp_compile.passes.rules import RULES
from cp_compile.passes.rules.op import NoRule, Op, Placement, read_op
from cp_compile.passes.rules.random import draws

__all__ = ["hoist_slices"]


def hoist_slices(module: GraphModule, context: Context) -> GraphModule:
    """Cuts whole floating-point values that all their users want cut alike. Idempotent."""
    hoisted: set[Node] = set()
    for node in reversed(module.graph.nodes):
        want = _wanted(node)
        placement = _placed_cut(node, want, context) if want is not None else None
        if placement is not None:
            operands = range(len(tensor_inputs(node)))
            node.meta.update(cp_layout=placement.out, cp_shown=placement.out, cp_local=placement.local)
            node.meta["cp_wants"] = tuple(placement.wants.get(i, WHOLE) for i in operands)
            hoisted.add(node)
    for node in hoisted:
        if not set(node.users) <= hoisted:
            # A small table that all heads read: computed once, and not again for each head in the backward.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta.setdefault("ac_graph_id", 0)  # a tag has a region: that of no checkpoint
    return module


def _wanted(node: Node) -> Sharded | None:
    """The cut that every user of a whole value wants; ``None``: there is none, or they differ.

    Numbers that are counted (labels, masks) stay whole: a loss counts them without an exchange.
    """
    if node.target not in RULES or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if not node.meta["val"].is_floating_point() or not isinstance(node.meta["cp_layout"][0], Whole):
        return None
    wants: set[Layout | None] = set()
    for user in node.users:
        given = user.meta.get("cp_wants", (None,) * len(tensor_inputs(user)))
        wants.update(want for source, want in zip(tensor_inputs(user), given, strict=True) if source is node)
    want = wants.pop() if len(wants) == 1 else None
    return want if isinstance(want, Sharded) and want.pure else None


def _placed_cut(node: Node, want: Sharded, context: Context) -> Placement | None:
    """How a rank computes its slice of a value from slices of the operands, if it can without any exchange."""
    op = read_op(node, lambda _: WHOLE, context.cp_size)
    if draws(op):
        return None
    for layouts in _cuts(op, want):
        try:
            placement = RULES[node.target](op.with_layouts(layouts))
        except NoRule:
            continue
        as_given = all(placement.wants.get(i, layout) == layout for i, layout in layouts.items())
        if placement.out == (want,) and not placement.deliver and not placement.mixes and as_given:
            return Placement(placement.out, layouts, local=placement.local)
    return None


def _cuts(op: Op, want: Sharded) -> Iterator[dict[int, Layout]]:
    """Ways to cut the operands along dims that are as long as the axis; at least one is cut."""
    choices: list[list[Layout]] = []
    for operand in op.operands:
        dims = [dim for dim, size in enumerate(operand.shape) if same(size, want.axis.size)]
        choices.append([*(want.at(dim) for dim in dims), WHOLE])
    for layouts in itertools.product(*choices):
        if any(isinstance(layout, Sharded) for layout in layouts):
            yield dict(enumerate(layouts))
