"""Attention: the ranks trade a slice of the sequence for a share of the heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.heads import head_of_query
from cp_compile.passes.layouts import WHOLE, Axis, Layout, PerQueryHead, Sharded, Size
from cp_compile.passes.rules.op import LocalForm, NoRule, Op, Operand, Placement, Rule
from cp_compile.passes.rules.random import draws, no_draw

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES", "by_heads", "is_attention", "kv_heads_per_rank"]

aten = torch.ops.aten


def is_attention(target: object) -> bool:
    """Whether an op is attention that the rule below exchanges."""
    return target in RULES


def _sdpa(op: Op) -> Placement:
    """``query [*, H, S, d], key [*, K, T, d], value [*, K, T, e] -> [*, H, S, e]``, ``H / cp`` heads a rank."""
    if draws(op):
        raise no_draw(op)
    query = op["query"]
    layout = query.layout
    if not isinstance(layout, Sharded):
        if all(not isinstance(operand.layout, Sharded) for operand in op.operands):
            return Placement((WHOLE,), {operand.index: WHOLE for operand in op.operands})
        # Learned queries, or image queries, on the sequence: they are the same on every rank, and so is the result.
        return by_heads(op, WHOLE)
    if layout.dim == query.ndim - 2:
        return by_heads(op, layout)
    if layout.dim < query.ndim - 2:
        return _on_a_batch_slice(op, layout)
    raise NoRule("scaled_dot_product_attention whose query is cut along its last dim")


def by_heads(op: Op, shown: Layout) -> Placement:
    """The exchange: query, key and value by heads in, heads out, handed on as ``shown``: a slice of the sequence."""
    query, key, value, mask = op["query"], op["key"], op["value"], op["attn_mask"]
    if query.ndim < 3:
        raise NoRule("scaled_dot_product_attention without a head dim has nothing to exchange for the sequence")
    dim = query.ndim - 3
    if not query.ndim == key.ndim == value.ndim or (isinstance(mask, Operand) and mask.ndim > query.ndim):
        raise NoRule("scaled_dot_product_attention of operands with different numbers of dims")
    heads, kv_heads = _int(query.shape[dim], "query heads"), _int(key.shape[dim], "kv heads")
    if heads % op.cp_size:
        raise NoRule(
            f"scaled_dot_product_attention with {heads} query heads and {kv_heads} kv heads cannot be shared by "
            f"cp = {op.cp_size} ranks: {heads} is not divisible by {op.cp_size}",
            f"use a cp size that divides {heads}, or options={{'fallback': 'gather'}} (exact, slower)",
        )
    cut = Sharded(dim, Axis.cut(heads, op.cp_size, "heads"))
    wants: dict[int, Layout] = {query.index: cut}
    for operand in (key, value):
        wants[operand.index] = _of_these_heads(op, heads, _int(operand.shape[dim], "kv heads"), dim)
    gathers = frozenset[int]()
    if isinstance(mask, Operand):
        has_heads = mask.ndim >= 3 and mask.shape[mask.ndim - 3] != 1
        wants[mask.index] = cut.at(mask.ndim - 3) if has_heads else WHOLE
        # One that depends on hidden states: without heads, every rank needs all of it.
        gathers = frozenset([mask.index])
    kv_layouts = {name: wants[op[name].index] for name in ("key", "value")}
    few = {name: kv for name, kv in kv_layouts.items() if isinstance(kv, PerQueryHead)}
    local = _expanded(few) if few else None
    length = query.shape[-2] if isinstance(shown, Sharded) else None
    return Placement((cut,), wants, (shown,), gathers, local=local, attends=length)


def _of_these_heads(op: Op, heads: int, kv_heads: int, dim: int) -> Layout:
    """The kv heads that a rank's query heads use."""
    if kv_heads % op.cp_size == 0:
        return Sharded(dim, Axis.cut(kv_heads, op.cp_size, "heads"))
    return PerQueryHead(dim, heads, kv_heads, kv_heads_per_rank(heads, kv_heads, op.cp_size))


def kv_heads_per_rank(query_heads: int, kv_heads: int, cp_size: int) -> int:
    """The most kv heads that the query heads of any one rank use."""
    share, group = query_heads // cp_size, query_heads // kv_heads
    return max((rank * share + share - 1) // group - rank * share // group + 1 for rank in range(cp_size))


def _expanded(few: Mapping[str, PerQueryHead]) -> LocalForm:
    """Each local query head is given the kv head that it uses."""

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        for name, kv in few.items():
            args[name] = edit.call(aten.index_select.default, args[name], kv.dim, head_of_query(edit, kv))
        return edit.call_like(node, {**args, "enable_gqa": False} if len(few) == 2 else args)

    return local


def _on_a_batch_slice(op: Op, layout: Sharded) -> Placement:
    """The cut runs along a batch dim (or heads): attention runs on the slice as it is."""
    query, mask = op["query"], op["attn_mask"]
    wants: dict[int, Layout] = {}
    for operand in (query, op["key"], op["value"]):
        if operand.ndim != query.ndim or operand.shape[layout.dim] != query.shape[layout.dim]:
            raise NoRule("scaled_dot_product_attention whose key or value has another size in the cut dim")
        wants[operand.index] = layout
    if isinstance(mask, Operand):
        dim = layout.dim - (query.ndim - mask.ndim)
        cut = dim >= 0 and mask.shape[dim] != 1
        wants[mask.index] = layout.at(dim) if cut else WHOLE
    return Placement((layout,), wants)


def _int(size: Size, what: str) -> int:
    if not isinstance(size, int):
        raise NoRule(f"scaled_dot_product_attention whose number of {what} is not a constant ({size})")
    return size


RULES: dict[object, Rule] = {aten.scaled_dot_product_attention.default: _sdpa}
