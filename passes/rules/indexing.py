"""Lookups by index: each index stands for itself, so any slice of the indices is exact."""

from __future__ import annotations

import torch

from cp_compile.passes.layouts import same
from cp_compile.passes.rules.op import NoRule, Op, Placement, Rule, by_labels, wrap

__all__ = ["RULES"]

aten = torch.ops.aten


def _embedding(op: Op) -> Placement:
    """``weight [V, H], indices [*] -> [*, H]``."""
    weight, indices = op["weight"], op["indices"]
    if op["scale_grad_by_freq"]:
        raise NoRule("embedding with scale_grad_by_freq counts the tokens of the whole batch in its backward")
    rows = list(range(indices.ndim))
    return by_labels(op, {weight.index: [None, None], indices.index: rows}, [[*rows, None]])


def _gather(op: Op) -> Placement:
    """Along a dim that is not cut, where input and index have the same rows."""
    source, index = op["self"], op["index"]
    dim = wrap(op["dim"], source.ndim)
    shared = [
        None if d == dim or not same(a, b) else d
        for d, (a, b) in enumerate(zip(source.shape, index.shape, strict=True))
    ]
    return by_labels(op, {source.index: shared, index.index: shared}, [shared])


def _index_select(op: Op) -> Placement:
    source, index = op["self"], op["index"]
    dim = wrap(op["dim"], source.ndim)
    labels = [None if d == dim else d for d in range(source.ndim)]
    return by_labels(op, {source.index: labels, index.index: [None]}, [labels])


def _one_hot(op: Op) -> Placement:
    operand = op.operands[0]
    if op["num_classes"] == -1:
        raise NoRule("one_hot without num_classes depends on the largest index of all ranks", "pass num_classes")
    rows = list(range(operand.ndim))
    return by_labels(op, {0: rows}, [[*rows, None]])


def _scatter_value(op: Op) -> Placement:
    """``scatter(x, dim, index, value)`` and ``scatter_add`` along a dim that is not cut."""
    source = op["self"]
    dim = wrap(op["dim"], source.ndim)
    others = [operand for operand in op.operands if operand is not source]
    shared = [
        None if d == dim or not all(same(source.shape[d], o.shape[d]) for o in others if o.ndim) else d
        for d in range(source.ndim)
    ]
    labels = {operand.index: shared if operand.ndim else [] for operand in op.operands}
    return by_labels(op, labels, [shared])


RULES: dict[object, Rule] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.one_hot.default: _one_hot,
    aten.scatter.value: _scatter_value,
    aten.scatter.src: _scatter_value,
    aten.scatter_add.default: _scatter_value,
}
