"""Norms and softmax: over dims that are not cut they run on any slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import Sharded
from cp_compile.passes.rules.along import along
from cp_compile.passes.rules.op import Op, Placement, Rule, by_labels, wrap
from cp_compile.passes.rules.pointwise import broadcast_labels
from cp_compile.passes.rules.reduction import accumulation_dtype

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten
_LOG = (aten.log_softmax.int, aten._log_softmax.default)


def _softmax(op: Op) -> Placement:
    """Over the cut axis: shifted by the largest of all ranks, and over the sum of all ranks."""
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    layout = operand.layout
    if not (isinstance(layout, Sharded) and layout.dim == dim and layout.pure):
        return along(op, [dim])

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        # In float32 where the values are narrower, as torch's own kernels do.
        dtype = node.meta["val"].dtype
        x = edit.call(aten._to_copy.default, args["self"], dtype=accumulation_dtype(dtype))
        real = edit.real(layout, operand.ndim)
        masked = edit.call(aten.where.ScalarOther, real, edit.call(aten.detach.default, x), float("-inf"))
        largest = edit.all_reduce(edit.call(aten.amax.default, masked, [dim], True), "max")
        shifted = edit.call(aten.sub.Tensor, x, largest)
        terms = edit.call(aten.exp.default, shifted)
        # Where nothing is left of a row, the pads are NaN like the rows that they repeat.
        total = edit.call(aten.sum.dim_IntList, edit.call(aten.where.ScalarOther, real, terms, 0), [dim], True)
        total = edit.all_reduce(total)
        if op.target in _LOG:
            result = edit.call(aten.sub.Tensor, shifted, edit.call(aten.log.default, total))
        else:
            result = edit.call(aten.div.Tensor, terms, total)
        return edit.call(aten._to_copy.default, result, dtype=dtype)

    return Placement((layout,), local=local)


def _trailing_norm(op: Op) -> Placement:
    """``layer_norm`` and ``rms_norm`` over the trailing ``normalized_shape``; weight and bias have those dims only."""
    operand = op.operands[0]
    rows = operand.ndim - len(op["normalized_shape"])
    labels = [d if d < rows else None for d in range(operand.ndim)]
    return by_labels(op, {0: labels}, [labels] * len(op.outputs))


def _group_norm(op: Op) -> Placement:
    """``input [N, C, *]``, normalised over groups of channels and all of ``*``."""
    labels = [0, *[None] * (op["input"].ndim - 1)]
    return by_labels(op, {op["input"].index: labels}, [labels])


def _cosine_similarity(op: Op) -> Placement:
    """Over a dim of two tensors that broadcast against each other."""
    ndim = max(operand.ndim for operand in op.operands)
    gone = wrap(op["dim"], ndim)
    shape = (*op.shape[:gone], -1, *op.shape[gone:])
    labels = {o.index: [None if d == gone else d for d in broadcast_labels(o, shape)] for o in op.operands}
    return by_labels(op, labels, [[d for d in range(ndim) if d != gone]])


RULES: dict[object, Rule] = {
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten._log_softmax.default: _softmax,
    aten.cosine_similarity.default: _cosine_similarity,
    aten.group_norm.default: _group_norm,
    aten.layer_norm.default: _trailing_norm,
    aten.rms_norm.default: _trailing_norm,
}
