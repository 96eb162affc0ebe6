"""reduce: a partial sum that is used as a value is summed over the ranks.

    loss = sum of this rank's terms   partial         loss_ = wait(all_reduce(loss, "sum"))
    return loss                                 ->    return loss_

The transpose of an all-reduced sum is an all-reduced sum: each rank then holds cp times its share of the gradient,
and averaging over ranks, as DDP and FSDP2 do, gives the gradient of the whole sequence's loss.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor
from cp_compile.passes.layouts import Layout
from cp_compile.passes.moves import insert_moves

__all__ = ["reduce_partial"]


def reduce_partial(module: GraphModule, context: Context) -> GraphModule:
    """Sums partial values over the ranks. Idempotent."""
    return insert_moves(module, context, "reduce", _reduce)


def _reduce(edit: Editor, value: Node, have: Layout, want: Layout) -> Node:
    return edit.all_reduce(value)
