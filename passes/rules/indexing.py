"""Lookups by index: each index stands for itself, so any slice of the indices is exact."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Layout, Partial, Sharded, Size, product, same
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.op import Labels, NoRule, Op, Operand, Placement, Rule, by_labels, wrap

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten


def _embedding(op: Op) -> Placement:
    """``weight [V, H], indices [*] -> [*, H]``."""
    weight, indices = op["weight"], op["indices"]
    if op["scale_grad_by_freq"]:
        raise NoRule("embedding with scale_grad_by_freq counts the tokens of the whole batch in its backward")
    rows = list(range(indices.ndim))
    return by_labels(op, {weight.index: [None, "features"], indices.index: rows}, [[*rows, "features"]])


def _gather(op: Op) -> Placement:
    """Along a dim that is not cut, where input and index have the same rows.

    Along the cut dim each rank gives the positions that it holds, or, for as many indices as rows of a rank, the
    source is exchanged.
    """
    source, index = op["self"], op["index"]
    dim = wrap(op["dim"], source.ndim)
    shared = [
        None if d == dim or not same(a, b) else d
        for d, (a, b) in enumerate(zip(source.shape, index.shape, strict=True))
    ]
    layout = source.layout
    if isinstance(layout, Sharded) and layout.dim == dim and (_few(index.shape[dim], layout) or not layout.pure):
        return _picked(op, layout, index, index.ndim)
    # Each index of the dim itself stands for what it picks.
    picked = [dim if d == dim else label for d, label in enumerate(shared)]
    return by_exchange(op, {source.index: shared, index.index: picked}, [picked])


def _index_select(op: Op) -> Placement:
    source, index = op["self"], op["index"]
    dim = wrap(op["dim"], source.ndim)
    labels: list[Hashable] = [None if d == dim else d for d in range(source.ndim)]
    layout = source.layout
    if isinstance(layout, Sharded) and layout.dim == dim and (_few(op.shape[dim], layout) or not layout.pure):
        return _picked(op, layout, index, source.ndim - dim)
    if isinstance(index.layout, Sharded):
        if isinstance(layout, Sharded):
            raise NoRule(f"{op.name} of a cut value at cut indices")
        out = [*labels[:dim], "index", *labels[dim + 1 :]]
        return by_labels(op, {source.index: labels, index.index: ["index"]}, [out])
    return by_exchange(op, {source.index: labels, index.index: [None]}, [labels])


def _index(op: Op) -> Placement:
    """``x[i, j]`` with tensors of positions, and whole dims between or behind them.

    Positions that are cut stand for themselves, as in an embedding; of a dim that is cut, each rank gives the rows that
    it holds; through other dims it runs on any slice.
    """
    source, indices = op["self"], op["indices"]
    labels, out, front, ndim = _index_labels(op, op.shape)
    places = [d for d, index in enumerate(indices) if index is not None]
    layout = source.layout
    if isinstance(layout, Sharded) and layout.dim in places:
        chosen = indices[layout.dim]
        if not layout.pure or _few(product(op.shape[front : front + ndim]), layout, len(places)):
            return _picked(op, layout, chosen, len(out) - front - ndim + chosen.ndim)
        if any(isinstance(index.layout, Sharded) for index in indices if index is not None):
            raise NoRule(f"{op.name} of a cut value at cut positions")
        return by_exchange(op, labels, [out], [front if len(places) == ndim == 1 else None])
    return by_labels(op, labels, [out])


def _index_labels(op: Op, shape: tuple[Size, ...] | None) -> tuple[dict[int, Labels], list[Hashable], int, int]:
    """Labels of the source and the indices, those of what is picked, where the indices stand in it, and how many.

    Args:
        op: ``index`` or ``index_put``.
        shape: of the picked elements, if it is known.
    """
    source, indices = op["self"], op["indices"]
    places = [d for d, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        raise NoRule(
            f"{op.name} with a mask picks a number of positions that depends on the data",
            'weigh the positions by the mask, or use options={"fallback": "gather"}',
        )
    ndim = max(index.ndim for index in tensors)
    adjacent = places == list(range(places[0], places[-1] + 1))
    front = places[0] if adjacent else 0
    rest: list[Hashable] = [f"dim {d}" for d in range(source.ndim) if d not in places]
    out = [*rest[:front], *range(ndim), *rest[front:]]
    labels: dict[int, Labels] = {source.index: [None if d in places else f"dim {d}" for d in range(source.ndim)]}
    for index in tensors:
        offset = ndim - index.ndim
        sizes = shape[front : front + ndim] if shape else index.shape
        labels[index.index] = [
            None if size == 1 and sizes[d + offset] != 1 else d + offset for d, size in enumerate(index.shape)
        ]
    return labels, out, front, ndim


def _index_put(op: Op) -> Placement:
    """``x[mask] = number``, and ``x[..., i] = values``."""
    source, indices, values = op["self"], op["indices"], op["values"]
    tensors = [index for index in indices if index is not None]
    if len(indices) == 1 and indices[0].dtype == torch.bool and values.ndim == 0:
        rows = list(range(source.ndim))
        return by_labels(op, {source.index: rows, indices[0].index: rows[: indices[0].ndim]}, [rows])
    labels, out, _, _ = _index_labels(op, None)
    picked: dict[Hashable, Size] = dict(zip(labels[source.index], source.shape, strict=True))
    for index in tensors:
        picked.update((d, n) for d, n in zip(labels[index.index], index.shape, strict=True) if picked.get(d, 1) == 1)
    offset = len(out) - values.ndim
    labels[values.index] = [
        None if size == 1 and picked[out[d + offset]] != 1 else out[d + offset] for d, size in enumerate(values.shape)
    ]
    # The positions themselves are no slice of the result.
    labels = {i: [None if isinstance(label, int) else label for label in dims] for i, dims in labels.items()}
    return by_exchange(op, labels, [labels[source.index]])


def _few(count: Size, layout: Sharded, dims: int = 1) -> bool:
    """Whether all ranks' shares of the picked rows are less than what an exchange of the source would send.

    With several indexed dims (``x[arange(B), last]``) a row is picked from each of them.
    """
    return dims > 1 or not isinstance(count, int) or not isinstance(layout.axis.chunk, int) or count < layout.axis.chunk


def _picked(op: Op, layout: Sharded, by: Operand, behind: int) -> Placement:
    """Positions of the cut dim: the rank that holds one gives its value, the others zero.

    Args:
        op: a lookup whose source is cut in a dim that is indexed.
        layout: of the source.
        by: the operand that indexes it.
        behind: how many dims of the output there are from its first one on.
    """
    axis = layout.axis

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        def swap(value: Any, mine: Any) -> Any:
            if isinstance(value, list):
                return [swap(v, m) for v, m in zip(value, mine, strict=True)]
            return here if value is by else mine

        index = _find(op.arguments, args, by)
        whole = edit.call(aten.add.Tensor, index, edit.size(layout.size))
        index = edit.call(aten.where.self, edit.call(aten.lt.Scalar, index, 0), whole, index)
        before, row, behind_it = _parts(edit, index, layout)
        first = edit.call(aten.mul.Tensor, edit.rank, edit.size(axis.chunk))
        offset = edit.call(aten.sub.Tensor, edit.call(aten.add.Tensor, row, edit.size(axis.start)), first)
        local_row = edit.call(aten.clamp.default, offset, 0, edit.size(axis.chunk - 1))
        mine = edit.call(aten.eq.Tensor, local_row, offset)
        here = local_row
        if before is not None:
            here = edit.call(aten.add.Tensor, edit.call(aten.mul.Tensor, before, edit.size(axis.chunk)), here)
        if behind_it is not None:
            here = edit.call(aten.add.Tensor, edit.call(aten.mul.Tensor, here, edit.size(layout.inner)), behind_it)
        found = edit.call_like(node, {name: swap(value, args[name]) for name, value in op.arguments.items()})
        shape = by.shape
        mine = edit.call(aten.reshape.default, mine, [*edit.sizes(shape), *[1] * (behind - len(shape))])
        return edit.keep(mine, found, op["self"].dtype)

    wants = {o.index: WHOLE for o in op.operands if o is not op["self"]}
    # Few positions, which may come from hidden states (topk of a router).
    return Placement((Partial(),), wants, gathers=frozenset(wants), local=local)


def _parts(edit: Editor, index: Node, layout: Sharded) -> tuple[Node | None, Node, Node | None]:
    """A place in a dim that holds the axis: that before the axis, that in it, and that behind it."""
    before = behind = None
    if not same(layout.inner, 1):
        index, behind = _divided(edit, index, edit.size(layout.inner))
    if not same(layout.outer, 1):
        before, index = _divided(edit, index, edit.size(layout.axis.size))
    return before, index, behind


def _divided(edit: Editor, index: Node, by: int | Node) -> tuple[Node, Node]:
    quotient = edit.call(aten.floor_divide.default, index, by)
    return quotient, edit.call(aten.sub.Tensor, index, edit.call(aten.mul.Tensor, quotient, by))


def _find(arguments: Mapping[str, Any], args: Mapping[str, Any], operand: Operand) -> Node:
    """The node of an operand."""
    pairs = [(value, args[name]) for name, value in arguments.items()]
    for value, node in pairs:
        if isinstance(value, list):
            pairs += list(zip(value, node, strict=True))
        elif value is operand:
            return node  # type: ignore[no-any-return]
    raise AssertionError(f"no operand {operand}")


def _one_hot(op: Op) -> Placement:
    operand = op.operands[0]
    if op["num_classes"] == -1:
        raise NoRule("one_hot without num_classes depends on the largest index of all ranks", "pass num_classes")
    rows = list(range(operand.ndim))
    return by_labels(op, {0: rows}, [[*rows, None]])


def _scatter_value(op: Op) -> Placement:
    """``scatter(x, dim, index, value)`` and its kind; along the cut dim, exchanged to another."""
    source = op["self"]
    dim = wrap(op["dim"], source.ndim)
    others = [operand for operand in op.operands if operand is not source]
    shared = [
        None if d == dim or not all(same(source.shape[d], o.shape[d]) for o in others if o.ndim) else d
        for d in range(source.ndim)
    ]
    labels = {operand.index: shared if operand.ndim else [] for operand in op.operands}
    return by_exchange(op, labels, [shared])


def _scatter_add(op: Op) -> Placement:
    """``scatter_add`` of cut rows into few places: the ranks' sums are added up, and what was there counts once."""
    source, index, values = op["self"], op["index"], op["src"]
    dim = wrap(op["dim"], source.ndim)
    cut = index.layout if isinstance(index.layout, Sharded) else values.layout
    fits = isinstance(cut, Sharded) and cut.dim == dim and same(index.shape[dim], values.shape[dim])
    if not fits or isinstance(source.layout, Sharded):
        return _scatter_value(op)
    wants: dict[int, Layout] = {source.index: WHOLE, index.index: cut, values.index: cut}

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        first = edit.call(aten.eq.Scalar, edit.rank, 0)
        before = edit.keep(first, args["self"], source.dtype)
        src = args["src"]
        if cut.axis.has_pads(op.cp_size):
            src = edit.keep(edit.real(cut, values.ndim), src, values.dtype)
        return edit.call_like(node, {**args, "self": before, "src": src})

    return Placement((Partial(),), wants, local=local)


def _index_add(op: Op) -> Placement:
    """``index_add``, ``index_copy`` and ``index_fill``: rows at positions that every rank knows."""
    source = op["self"]
    dim = wrap(op["dim"], source.ndim)
    labels: list[Hashable] = [None if d == dim else d for d in range(source.ndim)]
    rows = {o.index: labels for o in op.operands if o.ndim == source.ndim and o is not op["index"]}
    return by_exchange(op, rows, [labels])


RULES: dict[object, Rule] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_add,
    aten.index_fill.int_Scalar: _index_add,
    aten.index_fill.int_Tensor: _index_add,
    aten.one_hot.default: _one_hot,
    aten.scatter.value: _scatter_value,
    aten.scatter.src: _scatter_value,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_value,
}
