"""Losses: per-row terms of this rank's real rows, summed, over the count of the whole targets."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Layout, Partial, Sharded, Size, Whole, product
from cp_compile.passes.rules.op import Op, Operand, Placement, Rule, by_labels
from cp_compile.passes.rules.pointwise import broadcast_labels
from cp_compile.passes.rules.reduction import accumulation_dtype

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def _class_loss(op: Op) -> Placement:
    """``cross_entropy_loss`` and ``nll_loss_nd``.

    Input ``[N, C, *]`` or ``[C]``, targets ``[N, *]`` (classes) or like the input (probabilities). The mean divides by
    the number (or weight) of the targets that are not ignored, counted over the *whole* targets.
    """
    inputs, target, weight = op["self"], op["target"], op["weight"]
    soft = target.ndim == inputs.ndim
    classes: list[Hashable] = [None if d == (1 if inputs.ndim > 1 else 0) else d for d in range(inputs.ndim)]
    rows = [label for label in classes if label is not None]
    labels = {inputs.index: classes, target.index: classes if soft else rows}
    if isinstance(weight, Operand):
        labels[weight.index] = [None]
    if op["reduction"] == _NONE:
        return by_labels(op, labels, [rows])
    along_classes = isinstance(inputs.layout, Sharded) and classes[inputs.layout.dim] is None
    if along_classes:
        # Positions are the classes (the start of a span): a number a position, which every rank is given.
        whole: dict[int, Layout] = {operand.index: WHOLE for operand in op.operands}
        return Placement((WHOLE,), whole, gathers=frozenset([inputs.index]))
    placement = by_labels(op, labels, [[]], sums=set(rows))
    cut = next((want for want in placement.wants.values() if isinstance(want, Sharded)), None)
    if cut is None:
        return placement
    row_cut = cut.at(rows.index(classes[placement.wants[inputs.index].dim]))  # type: ignore[union-attr]
    target_rows = product(size for size, label in zip(inputs.shape, classes, strict=True) if label is not None)

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        terms = edit.call_like(node, {**args, "reduction": _NONE})
        terms = edit.call(aten.where.ScalarOther, edit.real(row_cut, len(rows)), terms, 0)
        if op["reduction"] == _SUM:
            return edit.call(aten.sum.default, terms)
        total = edit.call(aten.sum.default, terms, dtype=accumulation_dtype(inputs.dtype))
        if soft:
            mean = edit.call(aten.div.Tensor, total, edit.size(target_rows))
            return edit.call(aten._to_copy.default, mean, dtype=inputs.dtype)
        # Of the whole targets, which costs no exchange; of this rank's, where hidden states made them.
        cut_target = not isinstance(target.layout, Whole)
        targets = args["target"] if cut_target else edit.original(node, "target")
        counted = edit.call(aten.ne.Scalar, targets, op["ignore_index"])
        if cut_target:
            counted = edit.call(aten.logical_and.default, counted, edit.real(row_cut, len(rows)))
        if isinstance(weight, Operand):
            safe = edit.call(aten.where.ScalarOther, counted, targets, 0)
            flat = edit.call(aten.reshape.default, safe, [-1])
            each = edit.call(aten.index_select.default, args["weight"], 0, flat)
            flags = edit.call(aten.reshape.default, counted, [-1])
            each = edit.call(aten.where.ScalarOther, flags, each, 0)
            count = edit.call(aten.sum.default, each, dtype=accumulation_dtype(inputs.dtype))
        else:
            count = edit.call(aten.sum.default, counted)
        count = edit.all_reduce(count) if cut_target else count
        return edit.call(aten._to_copy.default, edit.call(aten.div.Tensor, total, count), dtype=inputs.dtype)

    return Placement((Partial(),), placement.wants, local=local)


def _elementwise_loss(op: Op) -> Placement:
    """Losses that are pointwise but for their ``reduction``: ``mse_loss``, ``kl_div``, ``bce`` and their kind."""
    shape = op.shape
    if op["reduction"] != _NONE:
        shape = _broadcast([operand.shape for operand in op.operands])
    labels = {operand.index: broadcast_labels(operand, shape) for operand in op.operands}
    if op["reduction"] == _NONE:
        return by_labels(op, labels, [range(len(shape))])
    placement = by_labels(op, labels, [[]], sums=set(range(len(shape))))
    cut = next((want for want in placement.wants.values() if isinstance(want, Sharded)), None)
    if cut is None:
        return placement
    first = next(o for o in op.operands if isinstance(placement.wants[o.index], Sharded))
    row_cut = cut.at(len(shape) - first.ndim + cut.dim)
    count = product(shape)

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        terms = edit.call_like(node, {**args, "reduction": _NONE})
        terms = edit.call(aten.where.ScalarOther, edit.real(row_cut, len(shape)), terms, 0)
        if op["reduction"] == _SUM:
            return edit.call(aten.sum.default, terms)
        dtype = torch.promote_types(op["self"].dtype, op["target"].dtype)
        total = edit.call(aten.sum.default, terms, dtype=accumulation_dtype(dtype))
        return edit.call(aten._to_copy.default, edit.call(aten.div.Tensor, total, edit.size(count)), dtype=dtype)

    return Placement((Partial(),), placement.wants, local=local)


def _broadcast(shapes: list[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The shape that all broadcast to; sizes may be symbols, which are never 1."""
    result: list[Size] = [1] * max(map(len, shapes))
    for shape in shapes:
        for d, size in enumerate(shape, len(result) - len(shape)):
            result[d] = size if size != 1 else result[d]
    return tuple(result)


RULES: dict[object, Rule] = {
    aten.cross_entropy_loss.default: _class_loss,
    aten.nll_loss_nd.default: _class_loss,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.kl_div.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.soft_margin_loss.default,
        ),
        _elementwise_loss,
    ),
}
