"""Pointwise ops: every output element depends on the elements at its own position, after broadcasting."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import torch

from cp_compile.passes.layouts import WHOLE, Partial, Sharded, Size
from cp_compile.passes.rules.op import Op, Operand, Placement, Rule, by_labels

__all__ = ["RULES", "broadcast_labels", "pointwise"]

aten = torch.ops.aten

# fmt: off
_NAMES = (
    # arithmetic
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "float_power",
    "addcmul", "addcdiv", "lerp", "neg", "negative", "abs", "absolute", "sign", "sgn", "square", "sqrt", "rsqrt",
    "reciprocal", "ceil", "floor", "round", "trunc", "fix", "frac", "maximum", "minimum", "fmax", "fmin", "clamp",
    "clamp_min", "clamp_max", "clip", "nan_to_num", "logaddexp", "logaddexp2", "hypot", "copysign", "deg2rad",
    # transcendental
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "sinc", "xlogy",
    "logit", "special_xlog1py",
    # activations
    "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh", "hardswish",
    "hardsigmoid", "sigmoid", "log_sigmoid", "softplus", "softshrink", "hardshrink", "threshold", "tanhshrink",
    # comparison and logic
    "eq", "ne", "lt", "le", "gt", "ge", "equal_to", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
    "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "__and__", "__or__", "__xor__", "isnan", "isinf",
    "isfinite", "isposinf", "isneginf", "where", "masked_fill",
    # dtype, device, copies
    "_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "positive", "fill",
    # filled like another
    "zeros_like", "ones_like", "full_like", "empty_like",
)
# fmt: on


def broadcast_labels(operand: Operand, shape: tuple[Size, ...]) -> list[Hashable]:
    """The dims of ``operand`` by the dims of the broadcast ``shape``; a dim that is repeated has no label."""
    offset = len(shape) - operand.ndim
    return [None if size == 1 and shape[dim + offset] != 1 else dim + offset for dim, size in enumerate(operand.shape)]


def pointwise(op: Op) -> Placement:
    """Runs on any slice; what broadcasts along the cut dim stays whole.

    Where operands are cut along different dims, they follow the largest one. One that has no dim to follow in
    (``f[:, :, None] - f[:, None, :]``) is gathered: what comes out is larger than it by the length of a slice.
    """
    labels = {operand.index: broadcast_labels(operand, op.shape) for operand in op.operands}
    cut = [operand for operand in op.operands if isinstance(operand.layout, Sharded)]
    lead = max(cut, key=_known_size, default=None)
    placement = by_labels(op, labels, [range(len(shape)) for shape in op.outputs], lead=lead)
    across = frozenset(operand.index for operand in cut if placement.wants[operand.index] == WHOLE)
    return replace(placement, gathers=across)


def _known_size(operand: Operand) -> tuple[int, int]:
    """Dims that are not 1, and the product of those that are known."""
    sizes = [size for size in operand.shape if size != 1]
    return len(sizes), math.prod(size for size in sizes if isinstance(size, int))


def _type_as(op: Op) -> Placement:
    """``x.type_as(other)`` takes only the dtype and device of ``other``, which may have any shape and layout."""
    layout = op["self"].layout
    layout = WHOLE if isinstance(layout, Partial) else layout
    return Placement((layout,), {op["self"].index: layout})


def _functional(packet: object) -> list[object]:
    overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[attr-defined]
    return [
        overload
        for overload in overloads
        if not overload._schema.is_mutable
        and any(isinstance(argument.type, torch.TensorType) for argument in overload._schema.arguments)
    ]


RULES: dict[object, Rule] = {
    overload: pointwise for name in _NAMES if hasattr(aten, name) for overload in _functional(getattr(aten, name))
}
del RULES[aten.where.default]  # the positions of a condition: how many depends on the data
RULES[aten.broadcast_tensors.default] = pointwise
RULES[aten.type_as.default] = _type_as
RULES[aten.expand_as.default] = pointwise
