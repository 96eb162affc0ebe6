"""Ops along a dim that they keep: scans, sorts, flips, rolls, pads. Along the cut axis they are exchanged."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import Sharded
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.op import Op, Placement, Rule, dims_as_labels, overloads, wrap

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES", "along"]

aten = torch.ops.aten


def along(op: Op, dims: Collection[int]) -> Placement:
    """An op of one tensor that mixes ``dims`` and keeps them all."""
    labels = dims_as_labels(op.operands[0], blocked=dims)
    return by_exchange(op, {0: labels}, [labels] * len(op.outputs))


def _along_one(op: Op) -> Placement:
    return along(op, [wrap(op["dim"], op.operands[0].ndim)])


def _along_some(op: Op) -> Placement:
    """``flip``, ``roll``, and the Fourier transforms."""
    ndim = op.operands[0].ndim
    dims = op["dims"] if "dims" in op.arguments else op["dim"]
    return along(op, [wrap(dim, ndim) for dim in dims or range(ndim)])


def _pad(op: Op) -> Placement:
    """``F.pad``: a token shift is a pad by 1 in front and by -1 behind."""
    ndim = op.operands[0].ndim
    return along(op, sorted({ndim - 1 - i // 2 for i, pad in enumerate(op["pad"]) if pad != 0}))


def _unfold(op: Op) -> Placement:
    """Windows: ``[*, S, *] -> [*, (S - size) // step + 1, *, size]``."""
    operand = op.operands[0]
    labels = dims_as_labels(operand, blocked=[wrap(op["dimension"], operand.ndim)])
    return by_exchange(op, {0: labels}, [[*labels, None]])


def _triangle(op: Op) -> Placement:
    """``tril`` and ``triu``: on rows or columns of a slice, by their place in the whole."""
    operand = op.operands[0]
    layout, ndim = operand.layout, operand.ndim
    if not (isinstance(layout, Sharded) and layout.dim >= ndim - 2 and layout.pure):
        return along(op, [ndim - 2, ndim - 1])

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        def place(dim: int) -> Node:
            if dim == layout.dim:
                rows = edit.rows(layout.axis)
            else:
                rows = edit.call(aten.arange.default, edit.size(operand.shape[dim]), device=edit.device)
            return edit.call(aten.unsqueeze.default, rows, -1) if dim == ndim - 2 else rows

        offset = edit.call(aten.sub.Tensor, place(ndim - 1), place(ndim - 2))
        keep = aten.le.Scalar if op.target is aten.tril.default else aten.ge.Scalar
        return edit.keep(edit.call(keep, offset, op["diagonal"]), args["self"], operand.dtype)

    return Placement((layout,), local=local)


_ONE = "cumsum.default cumprod.default logcumsumexp.default cummax.default cummin.default topk.default glu.default"
RULES: dict[object, Rule] = {
    **dict.fromkeys(overloads(_ONE), _along_one),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    **dict.fromkeys(overloads("_fft_r2c.default _fft_c2c.default _fft_c2r.default"), _along_some),
    aten.flip.default: _along_some,
    aten.roll.default: _along_some,
    aten.unfold.default: _unfold,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
}
