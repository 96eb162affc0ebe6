"""Attention: the ranks trade a slice of the sequence for a share of the heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.heads import head_of_query
from cp_compile.passes.layouts import WHOLE, Axis, Layout, PerQueryHead, Sharded, Size
from cp_compile.passes.rules.op import LocalForm, NoRule, Op, Operand, Placement, Rule
from cp_compile.passes.rules.random import draws, dropped

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES", "by_heads", "is_attention", "kv_heads_per_rank", "of_these_heads"]

aten = torch.ops.aten


def is_attention(target: object) -> bool:
    """Whether an op is attention that the rule below exchanges."""
    return target in RULES


def _sdpa(op: Op) -> Placement:
    """``query [*, H, S, d], key [*, K, T, d], value [*, K, T, e] -> [*, H, S, e]``, ``H / cp`` heads a rank."""
    query, value = op["query"], op["value"]
    cuts = [operand for operand in op.operands if isinstance(operand.layout, Sharded)]
    # Dims counted as the query has them.
    places = {o.index: o.layout.dim + query.ndim - o.ndim for o in cuts}  # type: ignore[union-attr]
    rows = query.ndim - 2
    if not cuts:
        wants: dict[int, Layout] = {operand.index: WHOLE for operand in op.operands}
        return Placement((WHOLE,), wants, local=_local_form(op, WHOLE, {}))
    if isinstance(query.layout, Sharded) and query.layout.dim > rows:
        raise NoRule("scaled_dot_product_attention whose query is cut along its last dim")
    lead = query if query in cuts else min(cuts, key=lambda o: places[o.index])
    cut: Sharded = lead.layout.at(places[lead.index])  # type: ignore[union-attr]
    if cut.dim < rows:
        return _on_a_batch_slice(op, cut)
    key_and_value = (op["key"].layout, value.layout)
    if cut.dim == rows and lead not in (op["key"], value) and key_and_value == (WHOLE, WHOLE) and not op["is_causal"]:
        return _of_some_queries(op, cut)
    if cuts == [value] and cut.dim == query.ndim - 1 and not draws(op):
        return Placement((cut,), {o.index: cut if o is value else WHOLE for o in op.operands})
    # Learned queries, or image queries, on the sequence: they are the same on every rank, and so is the result.
    return by_heads(op, query.layout if isinstance(query.layout, Sharded) else WHOLE)


def _of_some_queries(op: Op, layout: Sharded) -> Placement:
    """Each query looks at keys that every rank holds (an image, an encoder): nothing is sent."""
    query, mask = op["query"], op["attn_mask"]
    wants: dict[int, Layout] = {operand.index: WHOLE for operand in op.operands}
    wants[query.index] = layout
    if isinstance(mask, Operand) and mask.ndim > 1 and mask.shape[-2] != 1:
        wants[mask.index] = layout.at(mask.ndim - 2)
    return Placement((layout,), wants, local=_local_form(op, layout, {}), attends=layout.size)


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
        wants[operand.index] = of_these_heads(dim, heads, _int(operand.shape[dim], "kv heads"), op.cp_size)
    gathers = frozenset[int]()
    if isinstance(mask, Operand):
        has_heads = mask.ndim >= 3 and mask.shape[mask.ndim - 3] != 1
        wants[mask.index] = cut.at(mask.ndim - 3) if has_heads else WHOLE
        # One that depends on hidden states: without heads, every rank needs all of it.
        gathers = frozenset([mask.index])
    kv_layouts = {name: wants[op[name].index] for name in ("key", "value")}
    few = {name: kv for name, kv in kv_layouts.items() if isinstance(kv, PerQueryHead)}
    local = _local_form(op, cut, few)
    length = query.shape[-2] if isinstance(shown, Sharded) else None
    return Placement((cut,), wants, (shown,), gathers, local=local, attends=length)


def of_these_heads(dim: int, heads: int, kv_heads: int, cp_size: int) -> Sharded | PerQueryHead:
    """The kv heads that a rank's query heads use, in ``dim``."""
    if kv_heads % cp_size == 0:
        return Sharded(dim, Axis.cut(kv_heads, cp_size, "heads"))
    return PerQueryHead(dim, heads, kv_heads, kv_heads_per_rank(heads, kv_heads, cp_size))


def kv_heads_per_rank(query_heads: int, kv_heads: int, cp_size: int) -> int:
    """The most kv heads that the query heads of any one rank use."""
    share, group = query_heads // cp_size, query_heads // kv_heads
    return max((rank * share + share - 1) // group - rank * share // group + 1 for rank in range(cp_size))


def _local_form(op: Op, layout: Layout, few: Mapping[str, PerQueryHead]) -> LocalForm | None:
    """What a rank runs, where it is not the op itself.

    Args:
        op: the attention.
        layout: of its result.
        few: the operands with the kv heads of this rank's query heads: each query head is given the one that it uses.
    """
    if not few and not draws(op):
        return None
    alike = len(few) == 2 and len(set(few.values())) == 1 and not draws(op)
    groups = next(iter(few.values())).evenly(op.cp_size) if alike else None

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        if groups is not None:
            return edit.call_like(node, {**args, "enable_gqa": groups > 1})
        for name, kv in few.items():
            args[name] = edit.call(aten.index_select.default, args[name], kv.dim, head_of_query(edit, kv))
        if len(few) == 2:
            args["enable_gqa"] = False
        return _with_dropout(edit, node, args, op, layout) if draws(op) else edit.call_like(node, args)

    return local


def _with_dropout(edit: Editor, node: Node, args: dict[str, Any], op: Op, layout: Layout) -> Node:
    """Attention written out, since a fused kernel draws from torch's own generator."""
    query, key, value, mask = (args[name] for name in ("query", "key", "value", "attn_mask"))
    if args["enable_gqa"]:
        group = op["query"].shape[-3] // op["key"].shape[-3]
        key, value = (edit.call(aten.repeat_interleave.self_int, x, group, -3) for x in (key, value))
    rows, width = op["query"].shape[-2:]
    columns = op["key"].shape[-2]
    scale = op["scale"]
    query = edit.call(aten.mul.Tensor, query, float(width) ** -0.5 if scale is None else scale)
    scores = edit.call(aten.matmul.default, query, edit.call(aten.transpose.int, key, -2, -1))
    if op["is_causal"]:
        ones = edit.call(aten.ones.default, edit.sizes([rows, columns]), dtype=torch.bool, device=edit.device)
        mask = edit.call(aten.tril.default, ones)
    if mask is not None and (op["is_causal"] or op["attn_mask"].dtype == torch.bool):
        scores = edit.call(aten.where.ScalarOther, mask, scores, float("-inf"))
    elif mask is not None:
        scores = edit.call(aten.add.Tensor, scores, mask)
    weights = edit.call(aten._safe_softmax.default, scores, -1)
    shape = (*op.shape[:-2], rows, columns)
    dtype = op["query"].dtype
    weights, _ = dropped(edit, node, weights, shape, layout, float(op["dropout_p"]), dtype)
    return edit.call(aten.matmul.default, weights, value)


def _on_a_batch_slice(op: Op, layout: Sharded) -> Placement:
    """The cut runs along a batch dim (or heads): attention runs on the slice as it is."""
    query, mask = op["query"], op["attn_mask"]
    wants: dict[int, Layout] = {}
    for operand in (query, op["key"], op["value"]):
        if operand.ndim != query.ndim or operand.shape[layout.dim] not in (1, layout.size):
            raise NoRule("scaled_dot_product_attention whose key or value has another size in the cut dim")
        wants[operand.index] = layout if operand.shape[layout.dim] != 1 or layout.size == 1 else WHOLE
    if isinstance(mask, Operand):
        dim = layout.dim - (query.ndim - mask.ndim)
        cut = dim >= 0 and mask.shape[dim] != 1
        wants[mask.index] = layout.at(dim) if cut else WHOLE
    return Placement((layout,), wants, local=_local_form(op, layout, {}), in_batch=True)


def _int(size: Size, what: str) -> int:
    if not isinstance(size, int):
        raise NoRule(f"scaled_dot_product_attention whose number of {what} is not a constant ({size})")
    return size


RULES: dict[object, Rule] = {aten.scaled_dot_product_attention.default: _sdpa}
