"""Norms and softmax: over dims that are not cut they run on any slice."""

from __future__ import annotations

import torch

from cp_compile.passes.rules.op import Op, Placement, Rule, by_labels, wrap

__all__ = ["RULES"]

aten = torch.ops.aten


def _softmax(op: Op) -> Placement:
    operand = op.operands[0]
    dim = wrap(op["dim"], operand.ndim)
    labels = [None if d == dim else d for d in range(operand.ndim)]
    return by_labels(op, {0: labels}, [labels])


def _trailing_norm(op: Op) -> Placement:
    """``layer_norm`` and ``rms_norm`` over the trailing ``normalized_shape``; weight and bias have those dims only."""
    operand = op.operands[0]
    rows = operand.ndim - len(op["normalized_shape"])
    labels = [d if d < rows else None for d in range(operand.ndim)]
    return by_labels(op, {0: labels}, [labels] * len(op.outputs))


RULES: dict[object, Rule] = {
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten._log_softmax.default: _softmax,
    aten.layer_norm.default: _trailing_norm,
    aten.rms_norm.default: _trailing_norm,
}
