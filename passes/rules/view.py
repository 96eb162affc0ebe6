"""Views: the same elements under another shape. The cut axis is followed through row-major order."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Axis, Partial, Sharded, Size, divide, local_shape, product, same
from cp_compile.passes.rules.op import LocalForm, NoRule, Op, Placement, Rule, by_labels, dims_as_labels, wrap

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

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
    if not same(product(operand.shape), product(op.shape)) or any(size == 0 for size in op.shape):
        raise NoRule(f"{op.name} of an empty tensor")
    moved = follow(layout, operand.shape, op.shape)
    if moved is None:
        raise NoRule(
            f"{op.name} from {list(operand.shape)} to {list(op.shape)} cuts the {layout.axis.name} "
            f"(dim {layout.dim}, {layout.axis.size} long) into pieces, across the ranks' chunks"
        )
    shape = local_shape(op.shape, moved)
    form: LocalForm = lambda edit, node, args: edit.call(aten.reshape.default, args["self"], edit.sizes(shape))
    return Placement((moved,), local=form)


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
    return by_labels(
        op, {0: dims_as_labels(operand, blocked=gone)}, [[d for d in range(operand.ndim) if d not in gone]]
    )


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
    labels: list[Hashable] = [d if repeats[d + offset] == 1 else None for d in range(operand.ndim)]
    return by_labels(op, {0: labels}, [[None] * offset + labels])


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


def _repeat_interleave(op: Op) -> Placement:
    operand = op.operands[0]
    if op["dim"] is None:
        raise NoRule(f"{op.name} without a dim flattens the sequence")
    labels = dims_as_labels(operand, blocked=[wrap(op["dim"], operand.ndim)])
    return by_labels(op, {0: labels}, [labels])


def _as_complex(op: Op) -> Placement:
    labels: list[Hashable] = list(range(op.operands[0].ndim - 1))
    return by_labels(op, {0: [*labels, None]}, [labels])


def _as_real(op: Op) -> Placement:
    labels: list[Hashable] = list(range(op.operands[0].ndim))
    return by_labels(op, {0: labels}, [[*labels, None]])


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
    aten.view_as_complex.default: _as_complex,
    aten.view_as_real.default: _as_real,
    aten.flip.default: _moved_within,
    aten.roll.default: _moved_within,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _scattered,
    aten.select_scatter.default: _scattered,
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
    aten.repeat_interleave.self_int: _repeat_interleave,
}
