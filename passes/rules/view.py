"""Views: the same elements under another shape. The cut axis is followed through row-major order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from cp_compile.passes.layouts import Layout, Sharded, Size, carried_cut, divide, local_shape, product, same
from cp_compile.passes.rules.along import along
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.op import LocalForm, NoRule, Op, Placement, Rule, by_labels, dims_as_labels, wrap

__all__ = ["RULES", "follow"]

aten = torch.ops.aten


def follow(layout: Sharded, before: tuple[Size, ...], after: tuple[Size, ...]) -> Sharded | None:
    """Where the cut axis stands when a tensor of shape ``before`` is viewed as ``after``; ``None``: split.

    Row-major order fixes how many elements stand in front of the axis and behind it. The dim of ``after`` that holds
    the axis is the one whose neighbours leave whole factors on both sides.
    """
    front = product(before[: layout.dim]) * layout.outer
    back = product(before[layout.dim + 1 :]) * layout.inner
    found: list[Sharded] = []
    for dim, size in enumerate(after):
        outer, inner = divide(front, product(after[:dim])), divide(back, product(after[dim + 1 :]))
        if outer is not None and inner is not None and same(size, outer * layout.axis.size * inner):
            found.append(Sharded(dim, layout.axis, outer, inner))
    # Only an axis of size 1 can stand in several places: they hold the same elements, so any is exact; prefer the
    # dim that is the axis alone, then one that it ends ([B, S] -> [B * S]), then the old place.
    found.sort(key=lambda place: (not place.pure, not same(place.inner, 1), place.dim != layout.dim, place.dim))
    return found[0] if found else None


def _view(op: Op) -> Placement:
    """``[B, S, H] -> [B * S, H]`` and back: a reshape to the local sizes."""
    (operand,) = op.operands
    layout = operand.layout
    if not isinstance(layout, Sharded):
        return by_labels(op, {operand.index: [None] * operand.ndim}, [[None]])
    if any(size == 0 for size in op.shape):
        raise NoRule(f"{op.name} of an empty tensor")
    moved = follow(layout, operand.shape, op.shape)
    wants: dict[int, Layout] = {}
    if moved is None:
        # Another dim, which the view leaves whole, takes the cut (scores [B * H, S, S] that become [B, H, S, S]).
        cut = carried_cut(operand.shape, [layout.dim], op.cp_size)
        moved = follow(cut, operand.shape, op.shape) if cut else None
        if cut is None or moved is None:
            raise NoRule(
                f"{op.name} from {list(operand.shape)} to {list(op.shape)} cuts the {layout.axis.name} "
                f"(dim {layout.dim}, {layout.axis.size} long) into pieces, across the ranks' chunks"
            )
        wants[operand.index] = cut
    shape = local_shape(op.shape, moved)
    form: LocalForm = lambda edit, node, args: edit.call(aten.reshape.default, args["self"], edit.sizes(shape))
    return Placement((moved,), wants, local=form)


def _permuted(op: Op, order: list[int]) -> Placement:
    return by_labels(op, {0: range(op.operands[0].ndim)}, [order])


def _transpose(op: Op) -> Placement:
    ndim = op.operands[0].ndim
    order = list(range(ndim))
    a, b = wrap(op["dim0"], ndim), wrap(op["dim1"], ndim)
    order[a], order[b] = order[b], order[a]
    return _permuted(op, order)


def _t(op: Op) -> Placement:
    return _permuted(op, list(range(op.operands[0].ndim))[::-1])


def _matrix_transpose(op: Op) -> Placement:
    *front, a, b = range(op.operands[0].ndim)
    return _permuted(op, [*front, b, a])


def _permute(op: Op) -> Placement:
    ndim = op.operands[0].ndim
    return _permuted(op, [wrap(dim, ndim) for dim in op["dims"]])


def _movedim(op: Op) -> Placement:
    ndim = op.operands[0].ndim
    listed = [[d] if isinstance(d, int) else list(d) for d in (op["source"], op["destination"])]
    source, destination = ([wrap(d, ndim) for d in dims] for dims in listed)
    order: list[int | None] = [None] * ndim
    for a, b in zip(source, destination, strict=True):
        order[b] = a
    rest = iter(d for d in range(ndim) if d not in source)
    return _permuted(op, [next(rest) if d is None else d for d in order])


def _unsqueeze(op: Op) -> Placement:
    labels: list[Hashable] = list(range(op.operands[0].ndim))
    labels.insert(wrap(op["dim"], len(labels) + 1), None)
    return by_labels(op, {0: range(op.operands[0].ndim)}, [labels])


def _squeeze(op: Op) -> Placement:
    operand = op.operands[0]
    dims = op.arguments.get("dim", list(range(operand.ndim)))
    dims = {wrap(dim, operand.ndim) for dim in ([dims] if isinstance(dims, int) else dims)}
    gone = {dim for dim in dims if operand.shape[dim] == 1}
    placement = by_labels(
        op, {0: dims_as_labels(operand, blocked=gone)}, [[d for d in range(operand.ndim) if d not in gone]]
    )
    # By name: a slice of the cut dim may be one row long.
    form: LocalForm = lambda edit, node, args: edit.call(aten.squeeze.dims, args["self"], sorted(gone))
    return replace(placement, local=form)


def _expand(op: Op) -> Placement:
    """``[1, S, 1] -> [B, S, H]``: sizes along the cut dim are the local ones."""
    operand = op.operands[0]
    offset = len(op.shape) - operand.ndim
    repeated = {d for d, size in enumerate(operand.shape) if size == 1 and op.shape[d + offset] != 1}
    labels: list[Hashable] = [None if d in repeated else d for d in range(operand.ndim)]
    placement = by_labels(op, {0: labels}, [[None] * offset + labels])
    shape = local_shape(op.shape, placement.out[0])
    form: LocalForm = lambda edit, node, args: edit.call(aten.expand.default, args["self"], edit.sizes(shape))
    return Placement(placement.out, placement.wants, local=form)


def _repeat(op: Op) -> Placement:
    operand = op.operands[0]
    repeats = op["repeats"]
    offset = len(repeats) - operand.ndim
    layout = operand.layout
    if isinstance(layout, Sharded) and repeats[layout.dim + offset] != 1 and not same(layout.size, layout.axis.size):
        # Rows of several dims, one after another: more of what stands in front of the axis.
        outer = layout.outer * repeats[layout.dim + offset]
        return Placement((Sharded(layout.dim + offset, layout.axis, outer, layout.inner),))
    labels: list[Hashable] = [d if repeats[d + offset] == 1 else None for d in range(operand.ndim)]
    shown = [offset + operand.layout.dim] if isinstance(operand.layout, Sharded) else None
    return by_exchange(op, {0: labels}, [[None] * offset + labels], shown)


def _repeat_interleave(op: Op) -> Placement:
    """Each index several times in a row: more of what stands behind the axis; without a dim, flattened first."""
    operand = op.operands[0]
    layout = operand.layout
    if op["dim"] is None:
        if not isinstance(layout, Sharded):
            return by_labels(op, {}, [])
        outer = product(operand.shape[: layout.dim]) * layout.outer
        inner = layout.inner * product(operand.shape[layout.dim + 1 :]) * op["repeats"]
        return Placement((Sharded(0, layout.axis, outer, inner),))
    dim = wrap(op["dim"], operand.ndim)
    if isinstance(layout, Sharded) and layout.dim == dim:
        return Placement((Sharded(dim, layout.axis, layout.outer, layout.inner * op["repeats"]),))
    return along(op, [dim])


def _as_complex(op: Op) -> Placement:
    labels: list[Hashable] = list(range(op.operands[0].ndim - 1))
    return by_labels(op, {0: [*labels, None]}, [labels])


def _as_real(op: Op) -> Placement:
    labels: list[Hashable] = list(range(op.operands[0].ndim))
    return by_labels(op, {0: labels}, [[*labels, None]])


RULES: dict[object, Rule] = {
    aten.view_as_complex.default: _as_complex,
    aten.view_as_real.default: _as_real,
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
        ),
        _view,
    ),
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.mT.default: _matrix_transpose,
    aten.permute.default: _permute,
    aten.movedim.int: _movedim,
    aten.movedim.intlist: _movedim,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
}
