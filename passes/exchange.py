"""exchange: an all-to-all that trades the cut of one axis for the cut of another (DeepSpeed-Ulysses).

    q [B, H, S, d]   cut in S                  [B, cp, H/cp, L, d] -> [cp, B, H/cp, L, d]
    sdpa(q, ...)     wants heads cut    ->     all_to_all
                                               [cp, B, H/cp, L, d] -> [B, H/cp, cp * L, d] -> drop pads
                                               sdpa(q_, ...)

Pads of the axis that becomes whole are dropped, so the consumer sees the user's length; an axis that becomes cut is
padded first. Its transpose is the reversed all-to-all, which is what autograd runs.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import InvariantError
from cp_compile.passes.by_heads import is_from_heads, is_to_heads, to_heads, to_rows
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor
from cp_compile.passes.heads import heads_of_all_ranks
from cp_compile.passes.layouts import Axis, Layout, PerQueryHead, Sharded, Size, local_shape, product, same, shape_of
from cp_compile.passes.moves import insert_moves

__all__ = ["exchange"]

aten = torch.ops.aten


def exchange(module: GraphModule, context: Context) -> GraphModule:
    """Inserts the all-to-alls that the placement asks for. Idempotent."""
    return insert_moves(module, context, "exchange", _exchange)


def _exchange(edit: Editor, value: Node, have: Layout, want: Layout) -> Node:
    if not isinstance(have, Sharded):
        raise InvariantError(f"an exchange from {have}")
    shape = local_shape(shape_of(value.meta["val"]), have)
    if is_to_heads(have, want, len(shape)):
        return to_heads(edit, [value], have, [want])[0]
    if isinstance(want, Sharded) and is_from_heads(have, want, len(shape)):
        return to_rows(edit, value, have, want)
    if isinstance(want, PerQueryHead):
        value = edit.call(aten.index_select.default, value, want.dim, heads_of_all_ranks(edit, want))
        count = edit.context.cp_size * want.count
        shape = (*shape[: want.dim], count, *shape[want.dim + 1 :])
        want = Sharded(want.dim, Axis(count, want.count, name="heads"))
    if not isinstance(want, Sharded):
        raise InvariantError(f"an exchange to {want}")
    value, shape = _pad(edit, value, shape, want)
    value, shape = _all_to_all(edit, value, shape, have, want)
    return _drop_pads(edit, value, shape, have)


def _pad(edit: Editor, value: Node, shape: tuple[Size, ...], want: Sharded) -> tuple[Node, tuple[Size, ...]]:
    """The axis that is about to be cut, padded to whole chunks."""
    cp, axis, dim = edit.context.cp_size, want.axis, want.dim
    if not axis.has_pads(cp):
        return value, shape
    padded = (*shape[:dim], want.outer * (cp * axis.chunk) * want.inner, *shape[dim + 1 :])
    rows = edit.all_rows(axis)
    if want.pure:
        return edit.call(aten.index_select.default, value, dim, rows), padded
    split = [*shape[:dim], want.outer, axis.size, want.inner, *shape[dim + 1 :]]
    value = edit.call(aten.reshape.default, value, edit.sizes(split))
    value = edit.call(aten.index_select.default, value, dim + 1, rows)
    return edit.call(aten.reshape.default, value, edit.sizes(padded)), padded


def _all_to_all(
    edit: Editor, value: Node, shape: tuple[Size, ...], have: Sharded, want: Sharded
) -> tuple[Node, tuple[Size, ...]]:
    cp = edit.context.cp_size
    split: list[Size] = []
    for dim, size in enumerate(shape):
        if dim == want.dim:
            split += [want.outer] if not same(want.outer, 1) else []
            send = len(split)
            split += [cp, want.axis.chunk]
            split += [want.inner] if not same(want.inner, 1) else []
        elif dim == have.dim:
            split += [have.outer] if not same(have.outer, 1) else []
            chunk = len(split)
            split += [have.axis.chunk]
            split += [have.inner] if not same(have.inner, 1) else []
        else:
            split.append(size)
    order = [send, *(d for d in range(len(split)) if d != send)]
    value = edit.call(aten.permute.default, edit.call(aten.reshape.default, value, edit.sizes(split)), order)
    value = edit.all_to_all(value)
    # What arrives is [source rank, ...]: the source's place is in front of its chunk.
    place = order.index(chunk)
    back = [*range(1, place), 0, *range(place, len(split))]
    value = edit.call(aten.permute.default, value, back)
    whole = list(shape)
    whole[have.dim] = product((have.outer, cp * have.axis.chunk, have.inner))
    whole[want.dim] = want.local_size
    return edit.call(aten.reshape.default, value, edit.sizes(whole)), tuple(whole)


def _drop_pads(edit: Editor, value: Node, shape: tuple[Size, ...], have: Sharded) -> Node:
    cp, axis, dim = edit.context.cp_size, have.axis, have.dim
    if not axis.has_pads(cp):
        return value
    start, end = edit.size(axis.start), edit.size(axis.start + axis.size)
    if have.pure:
        # Contiguous: inductor fixes the strides of a fallback kernel's input, and those of a slice with a symbolic
        # length come out as the numbers of the first length that it met.
        return edit.call(aten.contiguous.default, edit.call(aten.slice.Tensor, value, dim, start, end))
    split = [*shape[:dim], have.outer, cp * axis.chunk, have.inner, *shape[dim + 1 :]]
    value = edit.call(aten.reshape.default, value, edit.sizes(split))
    value = edit.call(aten.slice.Tensor, value, dim + 1, start, end)
    real = (*shape[:dim], have.size, *shape[dim + 1 :])
    return edit.call(aten.reshape.default, value, edit.sizes(real))
