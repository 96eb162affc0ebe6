"""Ops that take only the dtype and device of a cut value, or its sizes."""

from __future__ import annotations

import torch

from cp_compile.passes.layouts import WHOLE
from cp_compile.passes.rules.op import Op, Placement, Rule

__all__ = ["RULES"]

aten = torch.ops.aten


def _like_whole(op: Op) -> Placement:
    """``new_zeros(x, size)``: the size is the user's, so the value is whole."""
    return Placement((WHOLE,))


def _size(op: Op) -> Placement:
    """``x.size(dim)`` is the size in the global view."""
    size = op.operands[0].shape[op["dim"]]
    return Placement((), local=lambda edit, node, args: edit.size(size))


RULES: dict[object, Rule] = {
    aten.new_zeros.default: _like_whole,
    aten.new_ones.default: _like_whole,
    aten.new_full.default: _like_whole,
    aten.new_empty.default: _like_whole,
    aten.sym_size.int: _size,
}
