"""Pieces and joins: slices, selections, splits, concatenations.

Along a dim that is not cut they run on any slice of the others. A slice of the cut axis itself is the same storage
under another window, and one position of it is a partial sum.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Axis, Partial, Sharded, same
from cp_compile.passes.rules.op import NoRule, Op, Placement, Rule, by_labels, dims_as_labels, wrap

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten


def _unchanged(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
    return edit.call(aten.alias.default, args["self"])


def _slice(op: Op) -> Placement:
    """A slice of the cut dim is the same storage under another window; of another dim, itself."""
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    layout = operand.layout
    if not (isinstance(layout, Sharded) and layout.dim == dim):
        labels = dims_as_labels(operand, blocked=[dim])
        return by_labels(op, {0: labels}, [labels])
    axis, kept = layout.axis, op.shape[dim]
    if same(kept, layout.size):
        return Placement((layout,), local=_unchanged)
    if not layout.pure or op["step"] != 1:
        raise NoRule(f"a slice with step {op['step']} of the {axis.name}, which is cut over the ranks")
    if kept == 0:
        # Nothing is kept, on every rank alike.
        return Placement((WHOLE,), local=lambda edit, node, args: edit.call(aten.slice.Tensor, args["self"], dim, 0, 0))
    start = op.position(0 if op["start"] is None else op["start"], layout.size)
    window = Axis(kept, axis.chunk, axis.start + start, axis.name)

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        return edit.refill_pads(args["self"], Sharded(dim, window), operand.ndim, operand.dtype)

    # Where nothing can be infinite, the rows that fall out of the window serve as pads.
    return Placement((Sharded(dim, window),), local=local if operand.dtype.is_floating_point else _unchanged)


def _select(op: Op) -> Placement:
    """One position of the cut dim: the rank that holds it gives its value, the others zero."""
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    labels = dims_as_labels(operand, blocked=[dim])
    layout = operand.layout
    if not (isinstance(layout, Sharded) and layout.dim == dim):
        return by_labels(op, {0: labels}, [[label for d, label in enumerate(labels) if d != dim]])
    if not layout.pure:
        raise NoRule(f"{op.name} of a dim that holds the {layout.axis.name} and something else")
    index = op.position(op["index"], layout.size)
    only = Axis(1, layout.axis.chunk, layout.axis.start + index, layout.axis.name)

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        x = args["self"]
        mine = edit.call(aten.where.ScalarOther, edit.real(Sharded(dim, only), operand.ndim), x, 0)
        return edit.call(aten.sum.dim_IntList, mine, [dim], dtype=operand.dtype)

    return Placement((Partial(),), local=local)


def _split(op: Op) -> Placement:
    """Pieces of a dim that is not cut."""
    operand = op.operands[0]
    labels = dims_as_labels(operand, blocked=[wrap(op["dim"], operand.ndim)])
    return by_labels(op, {0: labels}, [labels] * len(op.outputs))


def _unbind(op: Op) -> Placement:
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    labels = dims_as_labels(operand, blocked=[dim])
    return by_labels(op, {0: labels}, [[label for d, label in enumerate(labels) if d != dim]] * len(op.outputs))


def _cat(op: Op) -> Placement:
    """Joins along a dim that is not cut; whole operands are cut along."""
    dim = wrap(op["dim"], len(op.shape))
    labels = [None if d == dim else d for d in range(len(op.shape))]
    full = [operand for operand in op.operands if operand.shape != (0,) and operand.shape[dim] != 0]
    if len(full) == 1 and isinstance(full[0].layout, Sharded):
        # Beside empty ones (an empty cache): itself.
        position = op["tensors"].index(full[0])
        return Placement(
            (full[0].layout,),
            local=lambda edit, node, args: edit.call(aten.alias.default, args["tensors"][position]),
        )
    return by_labels(op, {operand.index: labels for operand in full}, [labels])


def _stack(op: Op) -> Placement:
    dim = wrap(op["dim"], len(op.shape))
    labels: list[Hashable] = list(range(len(op.shape) - 1))
    return by_labels(op, {o.index: labels for o in op.operands}, [[*labels[:dim], None, *labels[dim:]]])


def _moved_within(op: Op) -> Placement:
    """``flip`` and ``roll`` of dims that are not cut."""
    operand = op.operands[0]
    dims = op["dims"] or range(operand.ndim)
    labels = dims_as_labels(operand, blocked=[wrap(d, operand.ndim) for d in dims])
    return by_labels(op, {0: labels}, [labels])


def _pad(op: Op) -> Placement:
    """Of dims that are not cut."""
    operand = op.operands[0]
    pads = op["pad"]
    blocked = [operand.ndim - 1 - i // 2 for i, pad in enumerate(pads) if pad != 0]
    labels = dims_as_labels(operand, blocked=blocked)
    return by_labels(op, {0: labels}, [labels])


def _scattered(op: Op) -> Placement:
    """``slice_scatter`` and ``select_scatter`` (``x[..., 1:3] = y``) along a dim that is not cut."""
    operand, source = op["self"], op["src"]
    dim = wrap(op["dim"], operand.ndim)
    labels = dims_as_labels(operand, blocked=[dim])
    whole_rank = source.ndim == operand.ndim
    return by_labels(
        op,
        {operand.index: labels, source.index: labels if whole_rank else [x for d, x in enumerate(labels) if d != dim]},
        [labels],
    )


RULES: dict[object, Rule] = {
    aten.flip.default: _moved_within,
    aten.roll.default: _moved_within,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _scattered,
    aten.select_scatter.default: _scattered,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split.sizes: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.tensor_split.sections: _split,
    aten.unbind.int: _unbind,
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.stack.default: _stack,
}
