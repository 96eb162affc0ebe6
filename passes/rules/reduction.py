"""Reductions. Over a dim that is not cut they run as they are; over the cut axis they give partial sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import WHOLE, Partial, Sharded, product
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.op import NoRule, Op, Placement, Rule, overloads, wrap

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten


def _dims(op: Op) -> list[int]:
    ndim = op.operands[0].ndim
    dims = op.arguments.get("dim")
    if dims is None or dims == []:
        return list(range(ndim))
    return [wrap(dim, ndim) for dim in (dims if isinstance(dims, Sequence) else [dims])]


def _reduce(op: Op) -> Placement:
    """Over dims that are not cut as it is; over the cut axis it is exchanged to a dim that stays."""
    operand = op.operands[0]
    gone = _dims(op)
    labels = [None if d in gone else d for d in range(operand.ndim)]
    keep = bool(op.arguments.get("keepdim", False))
    out = [label for d, label in enumerate(labels) if keep or d not in gone]
    return by_exchange(op, {0: labels}, [out] * len(op.outputs), [None] * len(op.outputs))


def _extreme(op: Op) -> Placement:
    """``amax``, ``amin``, ``max`` and ``min``: where no dim stays that could carry the cut, the ranks' largest.

    All equal elements share the gradient, as torch has it.
    """
    operand = op.operands[0]
    layout, gone = operand.layout, _dims(op)
    if not isinstance(layout, Sharded) or layout.dim not in gone or not operand.dtype.is_floating_point:
        return _reduce(op)
    stays = [operand.shape[d] for d in range(operand.ndim) if d not in gone]
    if any(not isinstance(size, int) or size >= op.cp_size for size in stays):
        return _reduce(op)
    sign = 1 if op.target in (aten.amax.default, aten.max.default) else -1
    keep = bool(op.arguments.get("keepdim", False))

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        x = args["self"]
        real = edit.real(layout, operand.ndim)
        known = edit.call(aten.mul.Scalar, edit.call(aten.detach.default, x), sign)
        known = edit.call(aten.where.ScalarOther, real, known, float("-inf"))
        best = edit.all_reduce(edit.call(aten.amax.default, known, gone, True), "max")
        best = edit.call(aten.mul.Scalar, best, sign)
        # A NaN is the largest of all, wherever it stands.
        nan = edit.call(aten.isnan.default, x)
        chosen = edit.call(aten.logical_or.default, edit.call(aten.eq.Tensor, x, best), nan)
        chosen = edit.call(aten.logical_and.default, chosen, real)
        total = edit.call(aten.sum.dim_IntList, edit.call(aten.where.ScalarOther, chosen, x, 0), gone, keep)
        count = edit.all_reduce(edit.call(aten.sum.dim_IntList, chosen, gone, keep))
        mean = edit.call(aten.div.Tensor, edit.all_reduce(total), count)
        # The value itself and not the mean of equal ones, which may be rounded.
        best = best if keep else edit.call(aten.reshape.default, best, edit.sizes(op.shape))
        exact = edit.call(aten.sub.Tensor, best, edit.call(aten.detach.default, mean))
        finite = edit.call(aten.isfinite.default, exact)
        return edit.call(aten.add.Tensor, mean, edit.call(aten.where.ScalarOther, finite, exact, 0))

    return Placement((WHOLE,), local=local)


def _sum(op: Op) -> Placement:
    """Over the cut axis: the sum of this rank's real elements."""
    layout = op.operands[0].layout
    gone = _dims(op)
    if not (isinstance(layout, Sharded) and layout.dim in gone):
        return _reduce(op)
    return Placement((Partial(),), local=_local_sum(op, layout, gone, count=None))


def _mean(op: Op) -> Placement:
    """Over the cut axis: the sum of this rank's real elements, over the global count."""
    operand = op.operands[0]
    gone = _dims(op)
    if not (isinstance(operand.layout, Sharded) and operand.layout.dim in gone):
        return _reduce(op)
    count = product(operand.shape[d] for d in gone)
    return Placement((Partial(),), local=_local_sum(op, operand.layout, gone, count=count))


def _local_sum(op: Op, layout: Sharded, gone: list[int], count: Any) -> Any:
    ndim = op.operands[0].ndim

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        x = args["self"]
        if layout.axis.has_pads(op.cp_size):
            x = edit.call(aten.where.ScalarOther, edit.real(layout, ndim), x, 0)
        keep = bool(args.get("keepdim", False))
        dtype = args.get("dtype")
        if count is None:
            return edit.call(aten.sum.dim_IntList, x, gone, keep, dtype=dtype)
        dtype = dtype or op.operands[0].dtype
        total = edit.call(aten.sum.dim_IntList, x, gone, keep, dtype=accumulation_dtype(dtype))
        return edit.call(aten._to_copy.default, edit.call(aten.div.Tensor, total, edit.size(count)), dtype=dtype)

    return local


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a mean is summed in: half-precision sums overflow, or lose what is added last."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _logical(op: Op) -> Placement:
    """``any`` and ``all``: over the cut axis, the ranks count the elements that are true, or false."""
    operand = op.operands[0]
    layout, gone = operand.layout, _dims(op)
    if not (isinstance(layout, Sharded) and layout.dim in gone):
        return _reduce(op)
    is_any = op.name.startswith("aten.any")

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        decisive = edit.call(aten.ne.Scalar if is_any else aten.eq.Scalar, args["self"], 0)
        decisive = edit.call(aten.logical_and.default, decisive, edit.real(layout, operand.ndim))
        count = edit.call(aten.sum.dim_IntList, decisive, gone, bool(args.get("keepdim", False)))
        result = edit.call(aten.ne.Scalar if is_any else aten.eq.Scalar, edit.all_reduce(count), 0)
        return edit.call(aten._to_copy.default, result, dtype=node.meta["val"].dtype)

    return Placement((WHOLE,), local=local)


def _count_nonzero(op: Op) -> Placement:
    operand = op.operands[0]
    layout, gone = operand.layout, _dims(op)
    if not (isinstance(layout, Sharded) and layout.dim in gone):
        return _reduce(op)

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        x = edit.call(aten.where.ScalarOther, edit.real(layout, operand.ndim), args["self"], 0)
        return edit.call_like(node, {**args, "self": x})

    return Placement((Partial(),), local=local)


def _histogram(op: Op) -> Placement:
    """``histc`` with given bounds: the ranks' counts are added up; a pad is put where no bin counts it."""
    operand = op.operands[0]
    layout = operand.layout
    if op["min"] == op["max"] == 0:
        raise NoRule(f"{op.name} without bounds takes those of the whole value", "pass min and max")

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        real = edit.real(layout, operand.ndim)  # type: ignore[arg-type]
        low = float("-inf") if operand.dtype.is_floating_point else math.floor(op["min"]) - 1
        x = edit.call(aten.where.ScalarOther, real, args["self"], low)
        return edit.call_like(node, {**args, "self": x})

    if not isinstance(layout, Sharded):
        raise NoRule(f"{op.name} of {layout}")
    has_pads = layout.axis.has_pads(op.cp_size)
    return Placement((Partial(),), local=local if has_pads else None)


_OVER = (
    "max.dim min.dim argmax.default argmin.default logsumexp.default prod.dim_int "
    "prod.default var.dim var.correction std.dim std.correction var_mean.correction std_mean.correction median.dim "
    "linalg_vector_norm.default norm.ScalarOpt_dim"
)
RULES: dict[object, Rule] = {
    **dict.fromkeys(overloads(_OVER), _reduce),
    **dict.fromkeys(overloads("amax.default amin.default max.default min.default"), _extreme),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.histc.default: _histogram,
    aten.any.default: _logical,
    aten.any.dim: _logical,
    aten.any.dims: _logical,
    aten.all.default: _logical,
    aten.all.dim: _logical,
    aten.all.dims: _logical,
}
