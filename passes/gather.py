"""gather: a cut value is made whole on every rank, where the user allows it.

    h [B, L, H]     cut in S             all_gather -> [cp * L, B, H] -> drop pads -> [B, S, H]
    fft(h)          wants whole    ->    fft(h_)

Its transpose is a reduce-scatter.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import InvariantError
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor
from cp_compile.passes.layouts import Layout, Sharded, local_shape, shape_of
from cp_compile.passes.moves import insert_moves

__all__ = ["gather"]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def gather(module: GraphModule, context: Context) -> GraphModule:
    """Makes cut values whole where the placement asks for it. Idempotent."""
    return insert_moves(module, context, "gather", _gather)


def _gather(edit: Editor, value: Node, have: Layout, want: Layout) -> Node:
    if not isinstance(have, Sharded):
        raise InvariantError(f"a gather from {have}")
    cp, dim, axis = edit.context.cp_size, have.dim, have.axis
    shape = shape_of(value.meta["val"])
    local = local_shape(shape, have)
    split = [*local[:dim], have.outer, axis.chunk, have.inner, *local[dim + 1 :]]
    value = edit.call(aten.reshape.default, value, edit.sizes(split))
    order = [dim + 1, *(d for d in range(len(split)) if d != dim + 1)]
    value = edit.call(aten.contiguous.default, edit.call(aten.permute.default, value, order))
    value = edit.call(_c10d.all_gather_into_tensor.default, value, cp, edit.context.group_name)
    value = edit.call(_c10d.wait_tensor.default, value)
    if axis.has_pads(cp):
        value = edit.call(aten.slice.Tensor, value, 0, edit.size(axis.start), edit.size(axis.start + axis.size))
    back = [*range(1, dim + 2), 0, *range(dim + 2, len(split))]
    return edit.call(aten.reshape.default, edit.call(aten.permute.default, value, back), edit.sizes(shape))
