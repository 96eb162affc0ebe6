"""place: gives every node its layout and every edge the layout that its consumer wants, or refuses.

    ids [B, S]         whole             ids [B, S]         whole
    embedding(w, ids)               ->   embedding          sequence in dim 1, wants ids cut in dim 1
    linear, silu, ...                    linear, silu, ...  sequence in dim 1
    sdpa(q, k, v)                        sdpa               heads in dim 1, wants q, k, v so; shown as sequence, dim 2

An analysis: it writes ``meta["cp_layout"]``, ``meta["cp_shown"]``, ``meta["cp_wants"]``, ``meta["cp_local"]`` and
changes no node. Refuses: an op without a rule on a cut value; layouts without a move; a graph with nothing to cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import RefusedError, module_path, user_line
from cp_compile.passes.context import Context, Gathered
from cp_compile.passes.custom_function import CUSTOM_FUNCTION, keeps_sums, place_function
from cp_compile.passes.editor import schema_arguments, tensor_inputs
from cp_compile.passes.layouts import (
    WHOLE,
    Layout,
    Local,
    Partial,
    PerQueryHead,
    Sharded,
    Whole,
    dim_size,
    equal,
    shape_of,
)
from cp_compile.passes.moves import can_move
from cp_compile.passes.outputs import place_outputs
from cp_compile.passes.rules import RULES
from cp_compile.passes.rules.attention import is_attention
from cp_compile.passes.rules.experts import follows_order
from cp_compile.passes.rules.op import NoRule, Op, Placement, read_op
from cp_compile.passes.rules.random import draws, no_draw
from cp_compile.passes.sequence import Reached, find_sequence

__all__ = ["Seeds", "place"]

aten = torch.ops.aten
_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
Seeds = Mapping[Node, Sharded]
"""Where the sequence starts: an input of hidden states, or the embedding whose indices are cut."""


def place(module: GraphModule, context: Context) -> GraphModule:
    """Places the whole graph. Idempotent: a second run finds the same."""
    seeds = context.seeds
    if context.inputs is not None:
        seeds = {}
    if seeds is None:
        seeds = find_sequence(module, context, lambda seeds: attentions_reached(module, seeds, context))
    number = 0
    for node, (placement, operands) in _placements(module, seeds, context):
        node.meta["cp_layout"] = placement.out
        node.meta["cp_shown"] = placement.deliver or placement.out
        node.meta["cp_wants"] = tuple(placement.wants[i] for i in range(len(operands)))
        node.meta["cp_local"] = placement.local
        if isinstance(node.target, torch._ops.OpOverload):
            node.meta["cp_arguments"] = schema_arguments(node)
            if draws(read_op(node, lambda _: WHOLE, context.cp_size)):
                node.meta["cp_draw"] = number = number + 1
    if context.inputs is None:
        place_outputs(module, context)
    else:
        output = module.graph.output_node()
        output.meta["cp_wants"] = tuple(value.meta["cp_layout"][0] for value in tensor_inputs(output))
    return module


class _OwnOrder(Exception):  # noqa: N818 - what a sort of each rank's own is used for takes the sort of all
    def __init__(self, sorts: set[str]) -> None:
        self.sorts = sorts


def _placements(module: GraphModule, seeds: Seeds, context: Context) -> list[tuple[Node, tuple[Placement, list[Node]]]]:
    """The placement of each node. A sort that no rank can make of its own rows is made whole, with the user's leave."""
    while True:
        if context.inputs is None:
            context.gathered.clear()
        try:
            return list(_propagate(module, seeds, context, refuse=True))
        except _OwnOrder as found:
            context.whole_sorts.update(found.sorts)


def attentions_reached(module: GraphModule, seeds: Seeds, context: Context) -> Reached:
    """What the graph's attentions would see if it were cut at ``seeds``."""
    placed = [(node, placement) for node, (placement, _) in _propagate(module, seeds, context, refuse=False)]
    lengths = {node: placement.attends for node, placement in placed if placement.attends is not None}
    placements = [placement for _, placement in placed]
    return Reached(lengths, any(p.in_batch for p in placements), any(p.mixes for p in placements))


def _propagate(
    module: GraphModule, seeds: Seeds, context: Context, *, refuse: bool
) -> Iterator[tuple[Node, tuple[Placement, list[Node]]]]:
    inputs = iter(context.inputs or ())
    shown: dict[Node, tuple[Layout, ...]] = {}
    own: dict[Node, tuple[Layout, ...]] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            return
        operands = tensor_inputs(node)
        try:
            placement = _place_node(node, operands, shown, seeds, context)
            if context.inputs is not None and node.op == "placeholder":
                placement = Placement((next(inputs),))
            _check_moves(node, placement, operands, own, shown, context)
        except NoRule as found:
            if not refuse and is_attention(node.target):
                query = shown[operands[0]][0]
                rows = operands[0].meta["val"].ndim - 2
                placement = Placement(
                    (query,),
                    dict(enumerate(shown[source][0] for source in operands)),
                    attends=query.size if isinstance(query, Sharded) and query.dim == rows else None,
                )
            elif not refuse:
                placement = _whole(node, operands)
            elif (sorts := _sorts(operands, shown)) and context.options.fallback == "gather":
                raise _OwnOrder(sorts) from None
            else:
                placement = _gathered(node, operands, found, context)
        wants = {i: placement.wants.get(i, shown[source][0]) for i, source in enumerate(operands)}
        placement = replace(placement, wants=wants)
        if node.target is operator.getitem:
            placement = replace(placement, out=(own[node.args[0]][node.args[1]],), deliver=placement.out)
        own[node] = placement.out
        shown[node] = placement.deliver or placement.out
        yield node, (placement, operands)


def _sorts(operands: list[Node], shown: Mapping[Node, tuple[Layout, ...]]) -> set[str]:
    """The sorts in whose order, on each rank, operands stand."""
    return {layout.order for source in operands for layout in shown[source] if isinstance(layout, Local)}


def _place_node(
    node: Node, operands: list[Node], shown: Mapping[Node, tuple[Layout, ...]], seeds: Seeds, context: Context
) -> Placement:
    if node.op == "placeholder":
        return Placement((WHOLE,), deliver=(seeds[node],) if node in seeds else ())
    if node.target is operator.getitem:
        return Placement((shown[node.args[0]][node.args[1]],))  # type: ignore[index]
    if node.target is CUSTOM_FUNCTION:
        return place_function(node, [shown[source][0] for source in operands], context, place)
    if not isinstance(node.target, torch._ops.OpOverload):
        return _whole(node, operands)

    def layout_of(source: Node) -> Layout:
        layout = shown[source][0]
        return seeds[node] if node in seeds and source is node.args[1] else layout

    op = read_op(node, layout_of, context.cp_size)
    if node.target in _STRIDED and any(source.op != "placeholder" for source in operands):
        raise NoRule(
            f"{op.name} reads memory by strides, which are others where a value was moved",
            "write it with view, unfold or narrow",
            placement=False,
        )
    if any(isinstance(operand.layout, Local) for operand in op.operands):
        placement = follows_order(op)
        _check_sizes(op, placement)
        return placement
    if context.inputs is not None and keeps_sums(op):
        return Placement((Partial(),), {0: Partial()})
    if not any(isinstance(operand.layout, (Sharded, PerQueryHead)) for operand in op.operands):
        return _whole_draw(op) if draws(op) else _whole(node, operands)
    if node.target is aten.copy_.default:
        raise NoRule(
            f"input {operands[0].meta.get('cp_input')!r} is updated with a value that is cut over the ranks, so that "
            "each rank would keep another one",
            "update it with a value that is the same on every rank (a mean over the sequence, a count)",
        )
    rule = RULES.get(node.target)
    if rule is None and draws(op):
        raise no_draw(op)
    if rule is None:
        raise NoRule(f"{op.name} has no rule for a value whose {_cut_name(op)} is cut over the ranks")
    placement = rule(op)
    _check_sizes(op, placement)
    if node.name in context.whole_sorts:
        raise NoRule(f"{op.name} whose result is not used row by row")
    return placement


def _check_sizes(op: Op, placement: Placement) -> None:
    """A cut dim is as long as its layout says, of what goes in and of what comes out."""
    wanted = [(op.operands[i].shape, want) for i, want in placement.wants.items()]
    for shape, layout in [*wanted, *zip(op.outputs, placement.out, strict=True)]:
        size = dim_size(layout)
        if size is not None and not equal(shape[layout.dim], size, op.fake_mode):  # type: ignore[union-attr]
            raise NoRule(
                f"{op.name} of a dim of {shape[layout.dim]} where {layout} has {size}",  # type: ignore[union-attr]
                placement=not isinstance(layout, Local),
            )


def _check_moves(
    node: Node,
    placement: Placement,
    operands: list[Node],
    own: Mapping[Node, tuple[Layout, ...]],
    shown: Mapping[Node, tuple[Layout, ...]],
    context: Context,
) -> None:
    """From what an operand is, and not from what it is shown as: an input is whole on every rank.

    A gather takes the user's leave, or the rule's that asks for it or that shows its result as whole.
    """
    for i, source in enumerate(operands):
        have = own[source][0]
        want = placement.wants.get(i, shown[source][0])
        gather = context.options.fallback == "gather" or i in placement.gathers or isinstance(shown[source][0], Whole)
        if not can_move(have, want, shape_of(source.meta["val"]), context.cp_size, gather=gather):
            sizes = " with other chunks" if str(have) == str(want) else ""
            raise NoRule(
                f"{node.target} needs operand {i} to be {want}{sizes}, and it is {have}: that would take a gather"
            )


def _cut_name(op: Op) -> str:
    return next(o.layout.axis.name for o in op.operands if isinstance(o.layout, Sharded))


def _gathered(node: Node, operands: list[Node], found: NoRule, context: Context) -> Placement:
    """The op as it is, on whole operands, where the user allows it; else the refusal."""
    if found.placement and context.options.fallback == "gather":
        context.gathered.append(Gathered(found.reason, user_line(node), module_path(node)))
        try:
            if node.target is CUSTOM_FUNCTION:
                return place_function(node, [WHOLE] * len(operands), context, place)
            if not isinstance(node.target, torch._ops.OpOverload):
                return _whole(node, operands)
            op = read_op(node, lambda _: WHOLE, context.cp_size)
            if not draws(op):
                return _whole(node, operands)
            return replace(_whole_draw(op), wants=dict.fromkeys(range(len(operands)), WHOLE))
        except NoRule as no_draw:
            found = no_draw
    raise RefusedError.at(node, found.reason, found.remedy) from None


def _whole_draw(op: Op) -> Placement:
    """A draw that every rank makes alike."""
    rule = RULES.get(op.target)
    if rule is None:
        raise no_draw(op)
    return rule(op)


def _whole(node: Node, operands: list[Node]) -> Placement:
    val = node.meta.get("val")
    count = len(val) if isinstance(val, (tuple, list)) else 1
    return Placement((WHOLE,) * count, dict.fromkeys(range(len(operands)), WHOLE))
