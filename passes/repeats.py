"""repeats: what repeats heads (``repeat_kv``) stands right in front of the attention that needs it.

    k [B, K, S, d]                              k [B, K, S, d]
    unsqueeze, expand [B, K, n, S, d]
    reshape [B, K * n, S, d]             ->     rope(k), transpose(k)         on K heads
    rope(k_), transpose(k_)                     repeat_interleave(k, n, 1)
    matmul(q, k_)                               matmul(q, k_)

Exact in the program itself: an op that does the same for each head may run before its heads are repeated, which is what
the rule of the op says. The exchange can then be made above the repeat (``hoist``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile.passes.context import Context
from cp_compile.passes.editor import grad_modes, is_tensor, schema_arguments, tensor_inputs
from cp_compile.passes.layouts import WHOLE, Axis, Sharded, Size, divide, same, shape_of
from cp_compile.passes.program import insert_call
from cp_compile.passes.rules import RULES
from cp_compile.passes.rules.attention import is_attention
from cp_compile.passes.rules.op import NoRule, read_op, wrap

__all__ = ["REPEAT", "Repeat", "repeats"]

aten = torch.ops.aten
REPEAT = aten.repeat_interleave.self_int
_EXPANDS = (aten.expand.default, aten.broadcast_to.default)
_MERGES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.contiguous.default)


@dataclass(frozen=True)
class Repeat:
    """``source`` with each index of ``dim`` repeated ``count`` times in a row.

    ``squeeze``: a dim of size 1 that ``source`` must lose first.
    """

    source: Node
    count: int
    dim: int
    squeeze: int | None = None


def repeats(module: GraphModule, context: Context) -> GraphModule:
    """Finds repeats of one dim, and moves them behind the ops that do not mix it. Idempotent."""
    del context
    known: dict[Node, Repeat] = {}
    modes = grad_modes(module)
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not node.users:
            continue
        found = repeat_of(node)
        if found is None:
            _sink(module, node, known, modes)
            continue
        if not _in_one_mode(node, found, modes):
            continue
        mode = modes[node]
        if node.target is not REPEAT:
            node, found = _replaced(module, node, found)
        known[node], modes[node] = found, mode
    # Kernels that the user chose need not take grouped heads.
    chosen = any(getattr(node.target, "__name__", "") == "use_attention_kernels" for node in module.graph.nodes)
    for node in module.graph.nodes if not chosen else ():
        if is_attention(node.target):
            _group(node, known, modes)
    module.graph.eliminate_dead_code()
    return module


def repeat_of(node: Node) -> Repeat | None:
    """What a node repeats: ``repeat_interleave`` of one dim, or the reshape of an expanded new dim."""
    if node.target is REPEAT:
        source, count, dim = (*node.args, None)[:3]
        if dim is None or not isinstance(count, int) or not is_tensor(source) or count == 1:
            return None
        return Repeat(source, count, wrap(dim, source.meta["val"].ndim))  # type: ignore[union-attr, arg-type]
    if node.target not in _MERGES or not is_tensor(node.args[0]):
        return None
    expanded: Any = node.args[0]
    while expanded.target in _COPIES:
        expanded = expanded.args[0]
    if expanded.target not in _EXPANDS:
        return None
    narrow: Any = expanded.args[0]
    shape, wide, out = (shape_of(value.meta["val"]) for value in (narrow, expanded, node))
    if len(shape) != len(wide) or len(out) != len(wide) - 1:
        return None
    repeated = [dim for dim in range(len(wide)) if not same(shape[dim], wide[dim])]
    new = repeated[0] if len(repeated) == 1 else 0
    count = wide[new]
    merged = (*wide[: new - 1], wide[new - 1] * count, *wide[new + 1 :])
    if new == 0 or not isinstance(count, int) or not all(same(a, b) for a, b in zip(out, merged)):
        return None
    if narrow.target is aten.unsqueeze.default and wrap(narrow.args[1], len(wide)) == new:
        return Repeat(narrow.args[0], count, new - 1)
    return Repeat(narrow, count, new - 1, squeeze=new)


def _replaced(module: GraphModule, node: Node, repeat: Repeat) -> tuple[Node, Repeat]:
    graph, source = module.graph, repeat.source
    with graph.inserting_before(node):
        if repeat.squeeze is not None:
            source = insert_call(graph, node, aten.squeeze.dim, source, repeat.squeeze)
        new = insert_call(graph, node, REPEAT, source, repeat.count, repeat.dim)
    node.replace_all_uses_with(new)
    return new, Repeat(source, repeat.count, repeat.dim)


def _in_one_mode(node: Node, repeat: Repeat, modes: dict[Node, bool]) -> bool:
    """Whether a repeat runs with gradients, or without, all the way: under ``no_grad`` it also stops a gradient."""
    step, mode = node, modes[node]
    while step is not repeat.source:
        if modes[step] != mode:
            return False
        step = step.args[0]  # type: ignore[assignment]
    return True


def _sink(module: GraphModule, node: Node, known: dict[Node, Repeat], modes: dict[Node, bool]) -> None:
    """``op(repeat(x)) -> repeat(op(x))``, where the op's rule says that it runs through the repeated dim."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target not in RULES:
        return
    operands = tensor_inputs(node)
    of = [known[source] for source in operands if source in known]
    if any(modes[source] != modes[node] for source in operands if source in known):
        return
    if not of or len({(repeat.count, _heads(repeat)) for repeat in of}) != 1:
        return
    dims = _dims_behind(node, known, Axis(_heads(of[0]), _heads(of[0])), of[0].count)
    if dims is None:
        return
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda source: known[source].source if source in known else source
    )
    graph = module.graph
    with graph.inserting_before(node):
        result = insert_call(graph, node, node.target, *args, **kwargs)
        parts = [result]
        if isinstance(result.meta["val"], (list, tuple)):
            parts = [insert_call(graph, node, operator.getitem, result, i) for i in range(len(dims))]
        wide = [insert_call(graph, node, REPEAT, part, of[0].count, dim) for part, dim in zip(parts, dims)]
    known.update({new: Repeat(part, of[0].count, dim) for new, part, dim in zip(wide, parts, dims)})
    modes.update(dict.fromkeys([result, *parts, *wide], modes[node]))
    if parts == [result]:
        node.replace_all_uses_with(wide[0])
        return
    for user in list(node.users):
        user.replace_all_uses_with(wide[user.args[1]])  # type: ignore[index]


def _heads(repeat: Repeat) -> Size:
    return shape_of(repeat.source.meta["val"])[repeat.dim]


def _dims_behind(node: Node, known: dict[Node, Repeat], axis: Axis, count: int) -> list[int] | None:
    """Where each output has the repeated dim, if the op does the same for each index of it."""
    layout_of: Any = lambda source: Sharded(known[source].dim, axis, 1, count) if source in known else WHOLE
    op = read_op(node, layout_of, 1)
    try:
        placement = RULES[node.target](op)
    except NoRule:
        return None
    moved = any(want != op.operands[i].layout for i, want in placement.wants.items())
    if moved or placement.deliver or placement.local is not None:
        return None
    kept = [out for out in placement.out if isinstance(out, Sharded) and (out.axis, out.inner) == (axis, count)]
    sizes = [divide(shape[out.dim], count) for out, shape in zip(kept, op.outputs)]
    if len(kept) != len(op.outputs) or any(size is None or not same(size, axis.size) for size in sizes):
        return None
    return [out.dim for out in kept]


def _group(attention: Node, known: dict[Node, Repeat], modes: dict[Node, bool]) -> None:
    """``sdpa(q, repeat(k), repeat(v)) -> sdpa(q, k, v, enable_gqa=True)``: no repeated head is written, or kept.

    Where torch has a fused kernel for that: without a mask, and on CUDA in half precision.
    """
    arguments = schema_arguments(attention)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if key not in known or value not in known or arguments["attn_mask"] is not None or arguments["dropout_p"]:
        return
    if len({modes[node] for node in (attention, key, value)}) > 1:
        return
    first, second, val = known[key], known[value], query.meta["val"]
    kv_heads, dim = _heads(first), val.ndim - 3
    alike = (first.count, first.dim, kv_heads) == (second.count, second.dim, _heads(second)) and first.dim == dim
    if not alike or shape_of(val)[dim] != first.count * kv_heads:
        return
    if val.device.type == "cuda" and val.itemsize != 2:
        return
    grouped = {**arguments, "key": first.source, "value": second.source, "enable_gqa": True}
    names = [argument.name for argument in attention.target._schema.arguments if not argument.kwarg_only]  # type: ignore[union-attr]
    attention.args = tuple(grouped.pop(name) for name in names)
    attention.kwargs = grouped
