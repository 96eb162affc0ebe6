"""Pieces and joins: slices, selections, splits, concatenations.

Along a dim that is not cut they run on any slice of the others. A slice of the cut axis itself is the same storage
under another window, and one position of it is a partial sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Axis, Layout, Partial, Sharded, Size, same
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.op import Op, Operand, Placement, Rule, by_labels, dims_as_labels, wrap

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
    kept = op.shape[dim]
    if same(kept, layout.size):
        return Placement((layout,), local=_unchanged)
    if not layout.pure or op["step"] != 1:
        labels = dims_as_labels(operand, blocked=[dim])
        return by_exchange(op, {0: labels}, [labels])
    if kept == 0:
        # Nothing is kept, on every rank alike.
        return Placement((WHOLE,), local=lambda edit, node, args: edit.call(aten.slice.Tensor, args["self"], dim, 0, 0))
    start = op.position(0 if op["start"] is None else op["start"], layout.size)
    out, local = _window(layout, start, kept, operand)
    return Placement((out,), local=lambda edit, node, args: local(edit, args["self"]))


def _window(
    layout: Sharded, start: Size, size: Size, operand: Operand
) -> tuple[Layout, Callable[[Editor, Node], Node]]:
    """``size`` rows of the axis from ``start``: their cut, and what a rank runs. One row is a partial sum."""
    axis = layout.axis
    if size == 1:
        return Partial(), lambda edit, value: _one_row(edit, value, layout, start, operand, keep=True)
    window = Sharded(layout.dim, Axis(size, axis.chunk, axis.start + start, axis.name))

    def local(edit: Editor, value: Node) -> Node:
        if not operand.dtype.is_floating_point:
            # Where nothing can be infinite, the rows that fall out of the window serve as pads.
            return edit.call(aten.alias.default, value)
        return _refill_pads(edit, value, window, operand.ndim, operand.dtype)

    return window, local


def _refill_pads(edit: Editor, value: Node, window: Sharded, ndim: int, dtype: torch.dtype) -> Node:
    """``value`` whose rows outside of a window are copies of rows inside it.

    They are real rows of the program, on which the ops behind the window need not be finite. A rank that holds no
    row of the window is given the first one.
    """
    axis, dim = window.axis, window.dim
    chunk = edit.size(axis.chunk)

    def inside() -> Node:
        first = edit.call(aten.mul.Tensor, edit.rank, chunk)
        offset = edit.call(aten.arange.default, chunk, dtype=torch.int64, device=edit.device)
        rows = edit.call(aten.add.Tensor, first, offset)
        rows = edit.call(aten.clamp.default, rows, edit.size(axis.start), edit.size(axis.start + axis.size - 1))
        return edit.call(aten.clamp.default, edit.call(aten.sub.Tensor, rows, first), 0, edit.size(axis.chunk - 1))

    value = edit.call(aten.index_select.default, value, dim, edit.once(("inside", axis), inside))
    if axis.is_on_all_ranks(edit.context.cp_size):
        return value
    first_row = edit.real(Sharded(dim, replace(axis, size=1)), ndim)
    row = edit.call(
        aten.sum.dim_IntList, edit.call(aten.where.ScalarOther, first_row, value, 0), [dim], True, dtype=dtype
    )
    row = edit.all_reduce(row)
    some = edit.call(aten.any.default, edit.real(Sharded(0, axis), 1))
    return edit.call(aten.where.self, some, value, row)


def _select(op: Op) -> Placement:
    """One position of the cut dim: the rank that holds it gives its value, the others zero."""
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    labels = dims_as_labels(operand, blocked=[dim])
    layout = operand.layout
    if not (isinstance(layout, Sharded) and layout.dim == dim):
        return by_labels(op, {0: labels}, [[label for d, label in enumerate(labels) if d != dim]])
    if not layout.pure:
        return by_exchange(op, {0: labels}, [[label for d, label in enumerate(labels) if d != dim]], [None])
    index = op.position(op["index"], layout.size)
    return Placement((Partial(),), local=lambda edit, node, args: _one_row(edit, args["self"], layout, index, operand))


def _one_row(edit: Editor, value: Node, layout: Sharded, index: Size, operand: Operand, *, keep: bool = False) -> Node:
    axis, dim = layout.axis, layout.dim
    only = Axis(1, axis.chunk, axis.start + index, axis.name)
    mine = edit.keep(edit.real(Sharded(dim, only), operand.ndim), value, operand.dtype)
    return edit.call(aten.sum.dim_IntList, mine, [dim], keep, dtype=operand.dtype)


def _split(op: Op) -> Placement:
    """Pieces of a dim that is not cut; those of the cut axis are windows."""
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    labels = dims_as_labels(operand, blocked=[dim])
    layout = operand.layout
    if not (isinstance(layout, Sharded) and layout.dim == dim):
        return by_labels(op, {0: labels}, [labels] * len(op.outputs))
    sizes = [shape[dim] for shape in op.outputs]
    if not layout.pure or 0 in sizes:
        return by_exchange(op, {0: labels}, [labels] * len(op.outputs))
    starts = list(itertools.accumulate(sizes, initial=0))
    windows = [_window(layout, start, size, operand) for start, size in zip(starts, sizes)]
    return Placement(
        tuple(window for window, _ in windows),
        local=lambda edit, node, args: [local(edit, args["self"]) for _, local in windows],
    )


def _unbind(op: Op) -> Placement:
    """Along the cut axis, each row is that of the rank that holds it."""
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    layout = operand.layout
    if isinstance(layout, Sharded) and layout.dim == dim and layout.pure:
        return Placement(
            tuple(Partial() for _ in op.outputs),
            local=lambda edit, node, args: [
                _one_row(edit, args["self"], layout, index, operand) for index in range(len(op.outputs))
            ],
        )
    labels = dims_as_labels(operand, blocked=[dim])
    return by_labels(op, {0: labels}, [[label for d, label in enumerate(labels) if d != dim]] * len(op.outputs))


def _cat(op: Op) -> Placement:
    """Joins along a dim that is not cut, and whole operands are cut along; along the cut axis by an exchange."""
    dim = wrap(op["dim"], len(op.shape))
    labels = [None if d == dim else d for d in range(len(op.shape))]
    full = [operand for operand in op.operands if operand.shape != (0,) and operand.shape[dim] != 0]
    if len(full) == 1 and isinstance(full[0].layout, Sharded):
        # Beside empty ones (an empty cache): itself.
        position = op["tensors"].index(full[0])

        def alone(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
            return edit.call(aten._to_copy.default, args["tensors"][position], dtype=node.meta["val"].dtype)

        return Placement((full[0].layout,), local=alone)
    return by_exchange(op, {operand.index: labels for operand in full}, [labels])


def _stack(op: Op) -> Placement:
    dim = wrap(op["dim"], len(op.shape))
    labels: list[Hashable] = list(range(len(op.shape) - 1))
    return by_labels(op, {o.index: labels for o in op.operands}, [[*labels[:dim], None, *labels[dim:]]])


def _scattered(op: Op) -> Placement:
    """``slice_scatter`` and ``select_scatter`` (``x[..., 1:3] = y``)."""
    operand, source = op["self"], op["src"]
    dim = wrap(op["dim"], operand.ndim)
    labels = dims_as_labels(operand, blocked=[dim])
    whole_rank = source.ndim == operand.ndim
    of_source = labels if whole_rank else [x for d, x in enumerate(labels) if d != dim]
    return by_exchange(op, {operand.index: labels, source.index: of_source}, [labels])


RULES: dict[object, Rule] = {
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
