"""tile_mlp: a block that treats each token alone runs in chunks of this rank's rows (option ``mlp_chunks``).

    y = down(silu(gate(h)) * up(h))      [B, L, d], wide in between     y = cat([down(silu(gate(h0)) * up(h0)), ...])

Forward and backward hold what is wide for one chunk at a time: it is computed again in the backward, chunk by chunk.
The source of the method is tiled compute in ALST (arXiv:2506.13996).
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile._compat import FloorDiv
from cp_compile.errors import RefusedError
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, take_place, tensor_inputs
from cp_compile.passes.layouts import Sharded, Size, Whole, shape_of
from cp_compile.passes.rules import pointwise

__all__ = ["tile_mlp"]

aten = torch.ops.aten
_LINEAR = aten.linear.default


@dataclass(frozen=True)
class _Block:
    """A token-wise block: its ops in order, the last of which is its result, and the one cut value that it reads."""

    source: Node
    ops: tuple[Node, ...]
    cut: Sharded


def tile_mlp(module: GraphModule, context: Context) -> GraphModule:
    """Runs each block of projections up and down in chunks. Idempotent.

    Raises:
        RefusedError: the option asks for chunks, and no such block is found.
    """
    chunks = context.options.mlp_chunks
    if chunks == 1 or any(node.meta.get("cp_pass") == "tile_mlp" for node in module.graph.nodes):
        return module
    blocks = [block for node in module.graph.nodes if (block := _block_of(node)) is not None]
    if not blocks:
        raise RefusedError(
            f"the option mlp_chunks={chunks} finds no block to run in chunks: none of projections to more channels and "
            "back, with nothing but token-wise ops between",
            "leave the option out",
        )
    edit = Editor(module, context, "tile_mlp")
    for number, block in enumerate(blocks):
        _tile(edit, block, chunks, number)
    return module


def _block_of(result: Node) -> _Block | None:
    """The smallest token-wise block that ends in a projection, begins in one value, and is wider in between."""
    cut = _cut(result)
    if result.target is not _LINEAR or cut is None:
        return None
    ops, reads = {result}, _cut_inputs(result)
    while not (len(reads) == 1 and _narrows(ops, result)):
        last = max(reads, default=None)  # nodes compare by their place in the graph
        if last is None or not _is_token_wise(last) or _cut(last) != cut or not set(last.users) <= ops:
            return None
        ops.add(last)
        reads = (reads - {last}) | (_cut_inputs(last) - ops)
    (source,) = reads
    return _Block(source, tuple(sorted(ops)), cut) if _cut(source) == cut else None


def _narrows(ops: set[Node], result: Node) -> bool:
    """Whether another projection among the ops is wider than the result."""
    width = shape_of(result.meta["val"])[-1]
    widths = [shape_of(node.meta["val"])[-1] for node in ops if node.target is _LINEAR and node is not result]
    return any(isinstance(each, int) and isinstance(width, int) and each > width for each in widths)


def _cut(node: Node) -> Sharded | None:
    """The cut of a value's rows; ``None`` where it is not cut, or in its last dim, or not in rows alone."""
    layout = node.meta.get("cp_layout", (None,))[0]
    if not isinstance(layout, Sharded) or not layout.pure or layout.dim == node.meta["val"].ndim - 1:
        return None
    return layout


def _cut_inputs(node: Node) -> set[Node]:
    return {
        source for source in tensor_inputs(node) if not isinstance(source.meta.get("cp_layout", (Whole(),))[0], Whole)
    }


def _is_token_wise(node: Node) -> bool:
    return node.target is _LINEAR or node.target in pointwise.RULES


def _tile(edit: Editor, block: _Block, chunks: int, number: int) -> None:
    result, dim = block.ops[-1], block.cut.dim
    bounds = [_part(block.cut.axis.chunk, i, chunks) for i in range(chunks + 1)]
    sizes = edit.sizes([end - start for start, end in itertools.pairwise(bounds)])
    results = []
    with edit.before(result):
        parts = edit.call(aten.split_with_sizes.default, block.source, sizes, dim)
        for i in range(chunks):
            rows = edit.call(operator.getitem, parts, i)
            made = {block.source: rows}
            for op in block.ops:
                made[op] = _copy(edit, op, made, number * chunks + i + 1)
            results.append(made[result])
        joined = edit.call(aten.cat.default, results, dim)
    take_place(joined, result)
    result.replace_all_uses_with(joined)
    for op in reversed(block.ops):
        edit.graph.erase_node(op)


def _part(length: Size, number: int, parts: int) -> Size:
    """Where a part begins; some are empty where there are fewer rows than parts."""
    return number * length // parts if isinstance(length, int) else FloorDiv(number * length, parts)


def _copy(edit: Editor, op: Node, made: dict[Node, Node], region: int) -> Node:
    """An op on one chunk, in a region of its own unless the model has one: the backward computes that chunk again."""
    args, kwargs = torch.fx.node.map_arg((op.args, op.kwargs), lambda node: made.get(node, node))
    copy = edit.call(op.target, *args, **kwargs)
    copy.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
    copy.meta.setdefault("ac_graph_id", region)
    return copy
