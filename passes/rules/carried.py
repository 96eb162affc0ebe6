"""Ops that mix the positions of the cut axis, and run through another dim independently: exchanged to that dim.

    cumsum(h, 1)    h [B, S, H] cut in S    ->    cut in H, run over the whole S, shown as cut in S again

The same exchange as attention's, with channels in the place of heads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from cp_compile.passes.layouts import WHOLE, Axis, Layout, Sharded, Size, carried_cut, product, same
from cp_compile.passes.rules.op import Labels, NoRule, Op, Operand, Placement, by_labels, cut_along

__all__ = ["by_exchange", "shown_in"]


def by_exchange(
    op: Op, operands: Mapping[int, Labels], out: Sequence[Labels], shown: Sequence[int | None] | None = None
) -> Placement:
    """Like ``by_labels``; where the cut runs along a dim without a label, the operands are exchanged to one with.

    Args:
        op: the op; it must do the same on a slice of any labelled dim.
        operands: the labels of each operand's dims, by its index; ``None`` for dims that the op mixes.
        out: the labels of each output's dims.
        shown: where each output has what the cut axis has become; ``None``: nowhere, it is shown whole. Left out:
            where the axis stood.

    Raises:
        NoRule: no dim can carry the cut.
    """
    mixed = [o for o in op.operands if isinstance(o.layout, Sharded) and _label(o, operands) is None]
    if not mixed:
        return by_labels(op, operands, out)
    first = mixed[0]
    if first.index not in operands:
        raise NoRule(f"{op.name} of positions that are cut over the ranks")
    cut: Any = first.layout
    carried = _carrier(op, operands, out, first)
    if carried is None:
        rest = product(size for dim, size in enumerate(first.shape) if dim != cut.dim)
        if cut.pure and isinstance(rest, int) and rest < op.cp_size:
            # Fewer elements a position than ranks: there is nothing to share.
            whole: dict[int, Layout] = {o.index: WHOLE for o in op.operands}
            return Placement((WHOLE,) * len(op.outputs), whole, gathers=frozenset(o.index for o in mixed))
        raise NoRule(
            f"{op.name} mixes the positions of the {cut.axis.name}, which is cut over the ranks, and no other dim of "
            f"{list(first.shape)} can carry the cut for cp = {op.cp_size} ranks"
        )
    label, over = carried
    wants = cut_along(op, operands, label, over)
    outs = tuple(over.at(list(labels).index(label)) for labels in out)
    places = [cut.dim] * len(outs) if shown is None else shown
    deliver = tuple(
        WHOLE if dim is None else shown_in(op, cut, dim, shape) for dim, shape in zip(places, op.outputs, strict=True)
    )
    return Placement(outs, wants, deliver, mixes=True)


def shown_in(op: Op, cut: Sharded, dim: int, shape: tuple[Size, ...]) -> Sharded:
    """The cut of what an axis has become in ``dim`` of an output: the same storage where its size is the same."""
    if same(shape[dim], cut.size):
        return cut.at(dim)
    if not same(cut.outer, 1):
        # Positions that are repeated are an axis of their own; those of several rows are several axes.
        raise NoRule(f"{op.name} of a dim that holds the {cut.axis.name} of several rows")
    return Sharded(dim, Axis.cut(shape[dim], op.cp_size, cut.axis.name))


def _label(operand: Operand, operands: Mapping[int, Labels]) -> Hashable:
    labels = operands.get(operand.index)
    return None if labels is None else labels[operand.layout.dim]  # type: ignore[union-attr]


def _carrier(
    op: Op, operands: Mapping[int, Labels], out: Sequence[Labels], mixed: Operand
) -> tuple[Hashable, Sharded] | None:
    """The label that carries the cut, and its cut."""
    labels = list(operands.get(mixed.index, ()))
    everywhere = [label for label in labels if label is not None and all(label in o for o in out)]
    for o in op.operands:
        # One that is cut along such a label already.
        if isinstance(o.layout, Sharded) and _label(o, operands) in everywhere:
            return _label(o, operands), o.layout
    blocked = [dim for dim, label in enumerate(labels) if label not in everywhere]
    blocked.sort(key=lambda dim: dim != mixed.layout.dim)  # type: ignore[union-attr]
    over = carried_cut(mixed.shape, blocked, op.cp_size)
    return None if over is None else (labels[over.dim], over)
