"""slice: a whole value that meets a cut one is cut there, on the same axis.

    cos [S, d]    whole          rows = clamp(rank * L + arange(L), 0, S - 1)
    mul(q, cos)           ->     cos_ = index_select(cos, 0, rows)          [L, d]
                                 mul(q, cos_)

Pads repeat the last real row, so whatever is finite for real rows is finite for pads. The rank is an input, so the
graph is the same on every rank; the gradient of the whole value is this rank's share of it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import InvariantError
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor
from cp_compile.passes.heads import heads_of_rank
from cp_compile.passes.layouts import Layout, PerQueryHead, Sharded, local_shape, shape_of
from cp_compile.passes.moves import insert_moves

__all__ = ["slice_whole"]

aten = torch.ops.aten


def slice_whole(module: GraphModule, context: Context) -> GraphModule:
    """Cuts whole values where a cut one is wanted. Idempotent."""
    return insert_moves(module, context, "slice", _slice)


def _slice(edit: Editor, value: Node, have: Layout, want: Layout) -> Node:
    if isinstance(want, PerQueryHead):
        return edit.call(aten.index_select.default, value, want.dim, heads_of_rank(edit, want))
    if not isinstance(want, Sharded):
        raise InvariantError(f"a slice to {want}")
    rows = edit.rows(want.axis)
    if want.pure:
        return edit.call(aten.index_select.default, value, want.dim, rows)
    shape = shape_of(value.meta["val"])
    split = [*shape[: want.dim], want.outer, want.axis.size, want.inner, *shape[want.dim + 1 :]]
    value = edit.call(aten.reshape.default, value, edit.sizes(split))
    value = edit.call(aten.index_select.default, value, want.dim + 1, rows)
    return edit.call(aten.reshape.default, value, edit.sizes(local_shape(shape, want)))
