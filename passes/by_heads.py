"""The exchange around attention, rows first: one buffer ``[cp, rows, *batch, width]`` for one value or several.

    q [B, H, L, d]  ->  [cp, L, B, H/cp * d] \\
    k [B, K, L, d]  ->  [cp, L, B, K/cp * d]  cat -> all_to_all -> [cp * L, B, (H + 2 K)/cp * d] -> drop pads -> views
    v [B, K, L, e]  ->  [cp, L, B, K/cp * e] /

What arrives is the whole sequence already, row by row: each value is a strided view of it, and attention's result,
which is laid out like its query, is a send buffer. Only packing ``v`` and unpacking the result copy anything (where the
length divides); what turns ``q`` and ``k`` writes them to the buffer.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from cp_compile.errors import InvariantError
from cp_compile.passes.editor import Editor
from cp_compile.passes.heads import heads_of_all_ranks
from cp_compile.passes.layouts import Axis, Layout, PerQueryHead, Sharded, Size, local_shape, shape_of

__all__ = ["is_from_heads", "is_to_heads", "to_heads", "to_rows"]

aten = torch.ops.aten


def is_to_heads(have: Layout, want: Layout, ndim: int) -> bool:
    """Whether a value ``[*, H, S, d]`` that is cut in S is wanted cut in H."""
    if not (isinstance(have, Sharded) and have.pure and have.dim == ndim - 2):
        return False
    if isinstance(want, Sharded):
        return want.pure and want.dim == ndim - 3
    return isinstance(want, PerQueryHead) and want.dim == ndim - 3


def is_from_heads(have: Layout, want: Layout, ndim: int) -> bool:
    """Whether a value ``[*, H, S, d]`` that is cut in H is wanted cut in S."""
    return isinstance(have, Sharded) and is_to_heads(want, have, ndim)


def to_heads(edit: Editor, values: Sequence[Node], have: Sharded, wants: Sequence[Layout]) -> list[Node]:
    """Values that are cut in the same rows, each by heads, in one all-to-all.

    Args:
        edit: where to insert.
        values: ``[*, H, L, d]``; ``*`` and ``L`` are the same for all, heads and widths may differ.
        have: their layout.
        wants: ``Sharded`` heads or ``PerQueryHead``, one a value.
    """
    cp, axis = edit.context.cp_size, have.axis
    shapes = [local_shape(shape_of(value.meta["val"]), have) for value in values]
    alike, batch = _ranks_alike(wants, cp), shapes[0][:-3]
    sent = [
        _by_rank(edit, value, shape, want, alike, i)
        for i, (value, shape, want) in enumerate(zip(values, shapes, wants, strict=True))
    ]
    for part in sent if len(sent) > 1 else ():
        part.node.meta["cp_join"] = part.place
    sent.sort(key=lambda part: part.repeated)  # in the buffer, what is repeated lies behind the rest
    parts = [part.with_width for part in sent if not part.repeated]
    shared = [part.with_width for part in sent if part.repeated]
    if shared:
        node, width = _joined(edit, shared)
        whole = [cp // alike, alike, axis.chunk, *batch, width]
        parts.append((edit.call(aten.expand.default, node, edit.sizes(whole)), width))
    buffer, total = _joined(edit, parts)
    if alike > 1:
        buffer = edit.call(aten.reshape.default, buffer, edit.sizes([cp, axis.chunk, *batch, total]))
    rows = edit.all_to_all(buffer)
    rows = edit.call(aten.reshape.default, rows, edit.sizes([cp * axis.chunk, *batch, total]))
    if axis.has_pads(cp):
        rows = edit.call(aten.slice.Tensor, rows, 0, edit.size(axis.start), edit.size(axis.start + axis.size))
    found = {}
    for part, node in zip(sent, _parts(edit, rows, [part.width for part in sent]), strict=True):
        width, ndim = shapes[part.place][-1], len(batch) + 3
        node = edit.call(aten.reshape.default, node, edit.sizes([axis.size, *batch, part.heads, width]))
        found[part.place] = edit.call(aten.permute.default, node, [*range(1, ndim - 2), ndim - 2, 0, ndim - 1])
    return [found[i] for i in range(len(values))]


@dataclass(frozen=True)
class _Sent:
    """A value as it is sent.

    Attributes:
        place: among the values.
        node: ``[cp, L, *, width]``; with ranks that are ``alike``, ``[cp / alike, alike, L, *, width]``, and with 1 in
            the place of ``alike`` where it is repeated.
        heads: that a rank is sent.
        width: numbers in a row of theirs.
        repeated: whether all ranks that are alike are sent the same, which is there once.
    """

    place: int
    node: Node
    heads: Size
    width: Size
    repeated: bool

    @property
    def with_width(self) -> tuple[Node, Size]:
        return self.node, self.width


def _ranks_alike(wants: Sequence[Layout], cp: int) -> int:
    """How many ranks in a row are sent the same heads of some values, where that is one number for all; else 1."""
    shared = [want for want in wants if isinstance(want, PerQueryHead)]
    counts = {cp // want.kv_heads if want.evenly(cp) is not None else 1 for want in shared}
    return counts.pop() if len(counts) == 1 else 1


def _by_rank(edit: Editor, value: Node, shape: tuple[Size, ...], want: Layout, alike: int, place: int) -> _Sent:
    """What each rank is sent of a value ``[*, H, L, d]``.

    Args:
        edit: where to insert.
        value: cut in its rows.
        shape: its local shape.
        want: the layout that it is wanted in.
        alike: how many ranks in a row are sent the same heads of few.
        place: of the value among those that are sent.
    """
    cp, dim = edit.context.cp_size, len(shape) - 3
    *batch, _, rows, width = shape
    count: Size
    ranks = [cp] if alike == 1 else [cp // alike, alike]
    repeated = False
    if isinstance(want, PerQueryHead):
        count, repeated = want.count, alike > 1
        if repeated:
            ranks = [cp // alike, 1]
        else:
            value = edit.call(aten.index_select.default, value, dim, heads_of_all_ranks(edit, want))
    elif isinstance(want, Sharded):
        count, value = want.axis.chunk, _whole_chunks(edit, value, want.axis, dim)
    else:
        raise InvariantError(f"an exchange to {want} by heads")
    behind = dim + len(ranks)
    split = edit.call(aten.reshape.default, value, edit.sizes([*batch, *ranks, count, rows, width]))
    split = edit.call(aten.permute.default, split, [*range(dim, behind), behind + 1, *range(dim), behind, behind + 2])
    split = edit.call(aten.reshape.default, split, edit.sizes([*ranks, rows, *batch, count * width]))
    return _Sent(place, split, count, count * width, repeated)


def _joined(edit: Editor, values: Sequence[tuple[Node, Size]]) -> tuple[Node, Size]:
    """Values side by side in their last dim, each with its width.

    For inductor, padded with zeros and added up: that is one kernel, which computes the values too where they are
    computed by element (rotary embeddings), and a concatenation would copy each. No bit changes but the sign of a zero.
    What is repeated is joined before it is, and added by a kernel that repeats it: inductor makes no kernel of its own
    of that.
    """
    total = sum(width for _, width in values)
    if len(values) == 1:
        return values[0]
    if edit.context.options.compiler != "inductor":
        return edit.call(aten.cat.default, [value for value, _ in values], -1), total
    padded, before = [], 0
    for value, width in values:
        behind = total - before - width
        padded.append(edit.call(aten.constant_pad_nd.default, value, [edit.size(before), edit.size(behind)]))
        if "cp_join" in value.meta:
            padded[-1].meta["cp_join"] = value.meta["cp_join"]
        before = before + width
    return functools.reduce(lambda joined, part: edit.call(aten.add.Tensor, joined, part), padded), total


def _parts(edit: Editor, value: Node, widths: Sequence[Size]) -> list[Node]:
    """The parts of a value's last dim; for inductor slices, whose gradients it writes to one buffer by one kernel."""
    if len(widths) == 1:
        return [value]
    if edit.context.options.compiler != "inductor":
        parts = edit.call(aten.split_with_sizes.default, value, edit.sizes(widths), -1)
        return [edit.call(operator.getitem, parts, i) for i in range(len(widths))]
    ends = list(itertools.accumulate(widths))
    bounds = zip([0, *ends], ends)
    return [edit.call(aten.slice.Tensor, value, -1, edit.size(start), edit.size(end)) for start, end in bounds]


def to_rows(edit: Editor, value: Node, have: Sharded, want: Sharded) -> Node:
    """A value ``[*, H/cp, S, d]`` that is cut in its heads, cut in its rows.

    What arrives is written once, as ``[*, L, H, d]``: most models merge heads and width next.
    """
    cp = edit.context.cp_size
    *batch, count, _, width = local_shape(shape_of(value.meta["val"]), have)
    dim = len(batch)
    rows = edit.call(aten.permute.default, value, [dim + 1, *range(dim + 1), dim + 2])
    rows = _whole_chunks(edit, rows, want.axis, 0)
    chunk = want.axis.chunk
    rows = edit.call(aten.reshape.default, rows, edit.sizes([cp, chunk, *batch, count, width]))
    rows = edit.all_to_all(rows)
    merged = edit.call(aten.permute.default, rows, [*range(2, dim + 2), 1, 0, dim + 2, dim + 3])
    merged = edit.call(aten.reshape.default, merged, edit.sizes([*batch, chunk, cp * count, width]))
    if have.axis.has_pads(cp):
        start = have.axis.start
        merged = edit.call(aten.slice.Tensor, merged, -2, edit.size(start), edit.size(start + have.axis.size))
    return edit.call(aten.transpose.int, merged, -3, -2)


def _whole_chunks(edit: Editor, value: Node, axis: Axis, dim: int) -> Node:
    """An axis that is about to be cut, padded to whole chunks."""
    if not axis.has_pads(edit.context.cp_size):
        return value
    return edit.call(aten.index_select.default, value, dim, edit.all_rows(axis))
