"""hoist: the exchange is made above a repeat of heads, so that keys and values travel with their own heads.

    k [B, K, S, d]     cut in S                        k    wanted as the kv heads of this rank's query heads
    repeat(k, n)       cut in S                 ->     repeat on this rank
    attention          wants its heads cut             attention

An analysis, like ``place``: it changes layouts and no node. Each rank is sent the distinct heads that it needs, which
is the least (GQA, arXiv:2305.13245). It is made above a transpose too, where what is turned is ``[*, K, S, d]``: a key
that attention by hand turns can then travel with the query.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile.passes.by_heads import is_to_heads
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, tensor_inputs
from cp_compile.passes.heads import head_of_query
from cp_compile.passes.layouts import Axis, Layout, PerQueryHead, Sharded, shape_of
from cp_compile.passes.repeats import REPEAT, Repeat, repeat_of
from cp_compile.passes.rules.attention import of_these_heads
from cp_compile.passes.rules.op import LocalForm
from cp_compile.passes.turns import TURNS, order_of

__all__ = ["hoist"]


def hoist(module: GraphModule, context: Context) -> GraphModule:
    """Gives repeats and transposes that are only wanted by heads a layout by heads. Idempotent."""
    for node in reversed(module.graph.nodes):  # a repeat behind a transpose first
        have = next(iter(node.meta.get("cp_layout", ())), None)  # a size has none
        if not isinstance(have, Sharded):
            continue
        wanted = {want for user in node.users for want in _wants(user, node)}
        want = next(iter(wanted), None)
        if len(wanted) != 1 or not isinstance(want, (Sharded, PerQueryHead)) or want == have:
            continue
        if node.target in TURNS:
            _above_a_turn(node, want)
        elif node.target is REPEAT and (repeat := repeat_of(node)) is not None:
            _above_a_repeat(node, repeat, want, context.cp_size)
    return module


def _above_a_repeat(node: Node, repeat: Repeat, want: Layout, cp_size: int) -> None:
    heads = shape_of(repeat.source.meta["val"])[repeat.dim]
    query_heads = shape_of(node.meta["val"])[repeat.dim]
    if node.meta["cp_layout"][0].dim == repeat.dim or not isinstance(heads, int) or query_heads % cp_size:
        return
    if want != Sharded(repeat.dim, Axis.cut(query_heads, cp_size, "heads")):
        return
    own = of_these_heads(repeat.dim, int(query_heads), heads, cp_size)
    local = _repeated(own) if isinstance(own, PerQueryHead) else None
    node.meta.update(cp_layout=(want,), cp_shown=(want,), cp_wants=(own,), cp_local=local)


def _above_a_turn(node: Node, want: Sharded | PerQueryHead) -> None:
    source: Node = node.args[0]  # type: ignore[assignment]
    above = replace(want, dim=order_of(node)[want.dim])
    if is_to_heads(source.meta["cp_layout"][0], above, source.meta["val"].ndim):
        node.meta.update(cp_layout=(want,), cp_shown=(want,), cp_wants=(above,))


def _wants(user: Node, node: Node) -> list[Layout | None]:
    wants = user.meta.get("cp_wants")
    if wants is None:
        return [None]
    return [want for source, want in zip(tensor_inputs(user), wants, strict=True) if source is node]


def _repeated(few: PerQueryHead) -> LocalForm:
    """Each local query head is given the kv head that it uses."""

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        return edit.call(torch.ops.aten.index_select.default, args["self"], few.dim, head_of_query(edit, few))

    return local
