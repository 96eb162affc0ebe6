"""Mixtures of experts: tokens sorted by expert, a grouped matmul, and the way back, on each rank's own tokens.

    ids, perm = sort(ids [T])             each rank sorts the ids of its own tokens
    rows = x[perm // k]                   its own rows, in that order
    ends = cumsum(histc(ids))             where the rows of each expert end, on this rank
    y = grouped_mm(rows, weights, ends)   nothing is sent
    y[inverse of perm]                    rows in the order of the sequence again

A row's way through it depends on the row alone, so whose rows stand beside it does not matter. What a value *is* is
followed by its role (``Local``): anything else that is done with such a value is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Axis, Layout, Local, Sharded, Size, divide, same, size_of
from cp_compile.passes.rules import along as along_dims
from cp_compile.passes.rules import matmul, normalisation, pieces, pointwise, reduction, view
from cp_compile.passes.rules.along import along
from cp_compile.passes.rules.op import NoRule, Op, Operand, Placement, Rule, wrap

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["LOCAL_RULES", "RULES", "follows_order"]

aten = torch.ops.aten
_CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim)
_CHOSEN = (aten.argmax.default, aten.argsort.default, aten.argsort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_SAME_NUMBERS = (
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim,
    aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
)  # fmt: skip
_COPIES = (
    aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default,
)  # fmt: skip
_EMPTY = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
_TOKEN_WISE: Mapping[object, Rule] = {
    **pointwise.RULES, **view.RULES, **pieces.RULES, **matmul.RULES, **normalisation.RULES, **reduction.RULES,
    **along_dims.RULES,
}  # fmt: skip
_REMEDY = (
    "sort tokens by expert, look their rows up, multiply them group by group, and put them back by the inverse "
    "permutation; everything between must be token-wise"
)


def _sort(op: Op) -> Placement:
    """Each rank sorts its own part of one flat list of choices; any other sort is exchanged to another dim.

    Choices are numbers from 0 (of a ``topk`` or ``argmax``). Below 0, a number would shift the group of every row.
    """
    keys = op["self"]
    layout = keys.layout
    if keys.ndim != 1 or not isinstance(layout, Sharded) or op["descending"] or not _is_choice(keys.node):
        return along(op, [wrap(op["dim"], keys.ndim)])
    places = Local("places", op.site, layout, into=layout)
    if len(op.outputs) == 1:
        return Placement((places,), local=_as_it_is)
    return Placement((Local("keys", op.site, layout), places), local=_as_it_is)


def _is_choice(node: Node | None) -> bool:
    while node is not None and node.target in _SAME_NUMBERS:
        node = node.args[0]  # type: ignore[assignment]
    if node is not None and node.target is operator.getitem and node.args[1] == 1:
        return getattr(node.args[0], "target", None) in _CHOICES
    return node is not None and node.target in _CHOSEN


def follows_order(op: Op) -> Placement:
    """The placement of an op with an operand that is a rank's own.

    Raises:
        NoRule: the op is neither token-wise nor a step of the idiom.
    """
    rule = LOCAL_RULES.get(op.name)
    placement = rule(op) if rule is not None else None
    if placement is None:
        placement = _token_wise(op)
    return placement if placement.local is not None else replace(placement, local=_as_it_is)


def _as_it_is(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
    """The op itself: stamped as what a rank runs, since its rows are in an order that the program does not have."""
    result = edit.call_like(node, args)
    val = node.meta["val"]
    if not isinstance(val, (list, tuple)):
        return result
    return [edit.call(operator.getitem, result, i) for i in range(len(val))]


def _refused(op: Op, what: str) -> NoRule:
    return NoRule(f"{op.name} {what}", _REMEDY, placement=False)


def _token_wise(op: Op) -> Placement:
    """An op that runs through the rows one by one: its rule says so of a cut of them that has no pads."""
    local = [operand for operand in op.operands if isinstance(operand.layout, Local)]
    first: Any = local[0].layout
    if op.target in _COPIES and len(local) == 1:
        return _copied(op, first)
    if any(o.layout.order != first.order or o.layout.role not in ("rows", "keys") for o in local):  # type: ignore[union-attr]
        if op.target in _EMPTY and not first.per_key:
            return Placement((replace(first, role="rows", into=None),))
        raise _refused(op, f"of a value that is {first}")
    rule = _TOKEN_WISE.get(op.target)
    if rule is None:
        raise _refused(op, f"of rows that each rank has sorted ({first.order})")
    axis = Axis(first.rows.size, first.rows.local_size, name=f"rows of the sort {first.order}")
    as_cut: dict[int, Layout] = {o.index: Sharded(o.layout.dim, axis) for o in local}  # type: ignore[union-attr]
    placement = rule(op.with_layouts(as_cut))
    sliced = [i for i, want in placement.wants.items() if want != as_cut.get(i, WHOLE)]
    kept = all(isinstance(out, Sharded) and out.axis == axis and out.pure for out in placement.out)
    if sliced or not kept or placement.deliver or (placement.local and op.target not in view.RULES):
        raise _refused(op, f"mixes rows that each rank has sorted ({first.order}) with others")
    outs = tuple(Local("rows", first.order, first.rows, out.dim) for out in placement.out)  # type: ignore[union-attr]
    wants: dict[int, Layout] = {o.index: o.layout if isinstance(o.layout, Local) else WHOLE for o in op.operands}
    return Placement(outs, wants, local=placement.local)


def _copied(op: Op, layout: Local) -> Placement:
    """Numbers that wrap or are rounded are not those of the sort."""
    dtype = op.arguments.get("dtype") or op.operands[0].dtype
    exact: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
    if layout.role in ("keys", "counts", "ends"):
        exact += (torch.float32, torch.float64)
    if layout.role == "rows" or dtype in exact:
        return Placement((layout,))
    if layout.role != "keys":
        raise _refused(op, f"to {dtype} of a value that is {layout}")
    return Placement((replace(layout, role="rows"),))


def _lookup(op: Op) -> Placement | None:
    """``x[places]``: rows of a cut value in the order; ``y[inverse]``: back; ``table[keys]``: a row for each key."""
    source = op["self"]
    if "indices" in op.arguments:
        places = [(d, index) for d, index in enumerate(op["indices"]) if index is not None]
        if len(places) != 1:
            return None
        dim, index = places[0]
    else:
        dim, index = wrap(op["dim"], source.ndim), op["index"]
    by = index.layout
    if index.ndim != 1 or not isinstance(by, Local) or by.per_key:
        return None
    if by.role == "places" and not isinstance(source.layout, Local):
        cut = _into(by).at(dim)
        return Placement((Local("rows", by.order, by.rows, dim),), {source.index: cut, index.index: by})
    if by.role == "inverse" and source.layout == Local("rows", by.order, by.rows, dim):
        return Placement((by.rows.at(dim),), {source.index: source.layout, index.index: by})
    if by.role in ("keys", "rows") and not isinstance(source.layout, Local):
        out = Local("rows", by.order, by.rows, dim)
        return Placement((out,), {source.index: WHOLE, index.index: by})
    return None


def _into(layout: Local) -> Sharded:
    assert layout.into is not None
    return layout.into


def _divided(op: Op) -> Placement | None:
    """``places // k``: from a row of ``[T * k]`` to its token."""
    layout, by = op["self"].layout, op["other"]
    if not isinstance(layout, Local) or layout.role != "places" or not isinstance(by, int) or by <= 0:
        return None
    if op.arguments.get("rounding_mode", "floor") is None:
        return None
    into = _into(layout)
    inner = divide(into.inner, by)
    return None if inner is None else Placement((replace(layout, into=replace(into, inner=inner)),))


def _remainder(op: Op) -> Placement | None:
    """``places % k``: which of its token's choices a row is, the same number as in the whole program."""
    layout, by = op["self"].layout, op["other"]
    if not isinstance(layout, Local) or layout.role != "places" or not isinstance(by, int) or by <= 0:
        return None
    fits = divide(_into(layout).inner, by) is not None
    return Placement((replace(layout, role="rows", into=None),)) if fits else None


def _histogram(op: Op) -> Placement | None:
    """``histc(keys)`` whose bins hold one key each."""
    layout, bins = op["self"].layout, op["bins"]
    if layout.role != "keys":
        return None
    numbers = torch.histc(torch.arange(bins, dtype=torch.float64), bins, float(op["min"]), float(op["max"]))
    if not torch.equal(numbers, torch.ones(bins, dtype=torch.float64)):
        return None
    return Placement((replace(layout, role="counts"),))


def _ends(op: Op) -> Placement | None:
    layout = op["self"].layout
    return Placement((replace(layout, role="ends"),)) if layout.role == "counts" else None


def _grouped(op: Op) -> Placement | None:
    """``rows [n, in], weights [E, in, out], ends [E] -> [n, out]``."""
    rows, weights, ends, *bias = op.operands
    have = ends.layout
    fits = isinstance(have, Local) and have.role == "ends" and isinstance(rows.layout, Local) and not bias
    if not fits or rows.layout.role != "rows" or weights.ndim != 3 or rows.layout.dim != 0:  # type: ignore[union-attr]
        return None
    if rows.layout.order != have.order or not same(weights.shape[0], ends.shape[0]):  # type: ignore[union-attr]
        return None
    return Placement((rows.layout,), {rows.index: rows.layout, weights.index: WHOLE, ends.index: have})


def _inverse(op: Op) -> Placement | None:
    """``inverse[perm] = arange(n)``, also by ``scatter``, and ``argsort(perm)``; ``y[perm] = rows``."""
    if op.target in _ARGSORTS:
        return _of_permutation(op["self"], op["self"].layout, None) if not op["descending"] else None
    if op.target is aten.scatter.src:
        index, values = op["index"], op["src"]
    else:
        if len(op["indices"]) != 1 or op["accumulate"]:
            return None
        index, values = op["indices"][0], op["values"]
    if isinstance(index.layout, Local) and values.layout == Local("rows", index.layout.order, index.layout.rows):
        return _put_back(op, index, values)
    if not _counts_up(values, index.shape[0]) or not same(op["self"].shape[0], index.shape[0]):
        return None
    return _of_permutation(index, index.layout, op)


def _put_back(op: Op, index: Operand, rows: Operand) -> Placement | None:
    """``y[perm] = rows``: every row is put to its place, whatever stood there."""
    layout, target = index.layout, op["self"]
    if op.target is aten.scatter.src or not isinstance(layout, Local) or layout.role != "places":
        return None
    if layout.into != layout.rows or not same(target.shape[0], index.shape[0]):
        return None
    have = target.layout if isinstance(target.layout, Local) else layout.rows
    return Placement((layout.rows,), {target.index: have, index.index: layout, rows.index: rows.layout})


def _of_permutation(index: Operand, layout: Layout, op: Op | None) -> Placement | None:
    if not isinstance(layout, Local) or layout.role != "places" or layout.into != layout.rows or index.ndim != 1:
        return None
    out = replace(layout, role="inverse", into=None)
    if op is None:
        return Placement((out,))
    size = layout.rows.local_size

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        places = args["index"] if "index" in args else args["indices"][0]
        numbers = edit.call(aten.arange.default, edit.size(size), dtype=node.meta["val"].dtype, device=edit.device)
        return edit.call(aten.scatter.src, edit.call(aten.empty_like.default, numbers), 0, places, numbers)

    wants: dict[int, Layout] = {o.index: o.layout if isinstance(o.layout, Local) else WHOLE for o in op.operands}
    return Placement((out,), wants, local=local)


def _counts_up(values: Operand, size: Size) -> bool:
    """Whether a value is ``arange(size)``."""
    node = values.node
    while node is not None and node.target in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    if node is None or node.target is not aten.arange.default or values.ndim != 1:
        return False
    end: Any = node.args[0]
    return same(size_of(end.meta["val"] if isinstance(end, Node) else end), size)


def _added(op: Op) -> Placement | None:
    """``index_add(y, 0, places // k, rows)``: each row is added to its token."""
    target, index, rows = op["self"], op["index"], op["source"]
    dim = wrap(op["dim"], target.ndim)
    by = index.layout
    if not isinstance(by, Local) or by.role != "places" or rows.layout != Local("rows", by.order, by.rows, dim):
        return None
    cut = _into(by).at(dim)
    return Placement((cut,), {target.index: cut, index.index: by, rows.index: rows.layout})


RULES: dict[object, Rule] = dict.fromkeys((aten.sort.default, aten.sort.stable, *_ARGSORTS), _sort)
LOCAL_RULES: dict[str, Callable[[Op], Placement | None]] = {
    "aten.index.Tensor": _lookup,
    "aten.index_select.default": _lookup,
    "aten.floor_divide.default": _divided,
    "aten.floor_divide.Scalar": _divided,
    "aten.div.Tensor_mode": _divided,
    "aten.div.Scalar_mode": _divided,
    "aten.remainder.Scalar": _remainder,
    "aten.remainder.Tensor": _remainder,
    "aten.histc.default": _histogram,
    "aten.cumsum.default": _ends,
    "aten._grouped_mm.default": _grouped,
    "transformers.grouped_mm_fallback.default": _grouped,
    "aten.index_put.default": _inverse,
    "aten.scatter.src": _inverse,
    "aten.argsort.default": _inverse,
    "aten.argsort.stable": _inverse,
    "aten.index_add.default": _added,
}
"""By name: the fallback of a library's grouped matmul is an op that exists only where the library is imported."""
