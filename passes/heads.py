"""Which kv heads a rank's query heads use, as index tensors computed from the rank (GQA with few kv heads)."""

from __future__ import annotations

import torch
from torch.fx import Node

from cp_compile.passes.editor import Editor
from cp_compile.passes.layouts import PerQueryHead

__all__ = ["head_of_query", "heads_of_all_ranks", "heads_of_rank"]

aten = torch.ops.aten


def _first(edit: Editor, kv: PerQueryHead, rank: Node) -> Node:
    """The first kv head that a rank uses: ``rank * (H / cp) // (H / K)``."""
    share, group = kv.query_heads // edit.context.cp_size, kv.query_heads // kv.kv_heads
    return edit.call(aten.floor_divide.Scalar, edit.call(aten.mul.Scalar, rank, share), group)


def _arange(edit: Editor, count: int) -> Node:
    return edit.call(aten.arange.default, count, dtype=torch.int64, device=edit.device)


def heads_of_all_ranks(edit: Editor, kv: PerQueryHead) -> Node:
    """``[cp * count]`` int64: the kv heads that each rank is sent, rank by rank."""

    def make() -> Node:
        index = _arange(edit, edit.context.cp_size * kv.count)
        first = _first(edit, kv, edit.call(aten.floor_divide.Scalar, index, kv.count))
        heads = edit.call(aten.add.Tensor, first, edit.call(aten.remainder.Scalar, index, kv.count))
        return edit.call(aten.clamp.default, heads, 0, kv.kv_heads - 1)

    return edit.once(("heads_of_all_ranks", kv.query_heads, kv.kv_heads, kv.count), make)


def heads_of_rank(edit: Editor, kv: PerQueryHead) -> Node:
    """``[count]`` int64: the kv heads of this rank."""

    def make() -> Node:
        heads = edit.call(aten.add.Tensor, _first(edit, kv, edit.rank), _arange(edit, kv.count))
        return edit.call(aten.clamp.default, heads, 0, kv.kv_heads - 1)

    return edit.once(("heads_of_rank", kv.query_heads, kv.kv_heads, kv.count), make)


def head_of_query(edit: Editor, kv: PerQueryHead) -> Node:
    """``[H / cp]`` int64: for each local query head, the place of its kv head among this rank's."""
    share, group = kv.query_heads // edit.context.cp_size, kv.query_heads // kv.kv_heads

    def make() -> Node:
        heads = edit.call(aten.add.Tensor, edit.call(aten.mul.Scalar, edit.rank, share), _arange(edit, share))
        used = edit.call(aten.floor_divide.Scalar, heads, group)
        return edit.call(aten.sub.Tensor, used, _first(edit, kv, edit.rank))

    return edit.once(("head_of_query", kv.query_heads, kv.kv_heads), make)
