"""Which dims a dim was made of: heads that a model has folded into the batch are an axis of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from cp_compile.passes.editor import is_tensor
from cp_compile.passes.layouts import Size, product, same, shape_of
from cp_compile.passes.rules.op import wrap

__all__ = ["last_factor"]

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)
_SAME = (aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor)


def last_factor(node: Node | None, dim: int) -> Size | None:
    """The size of the innermost of the dims that a view has merged into ``dim``; ``None``: it was always one.

    Args:
        node: computes the value.
        dim: counted from the front.
    """
    while node is not None:
        source: Any = node.args[0] if node.args else None
        if node.op != "call_function" or not is_tensor(source):
            return None
        before, after = shape_of(source.meta["val"]), shape_of(node.meta["val"])
        if node.target in _VIEWS:
            merged = _merged(before, after, dim)
            if merged is None:
                return None
            first, last = merged
            if last > first:
                return before[last]
            dim = first
        elif node.target is aten.transpose.int:
            a, b = (wrap(place, len(before)) for place in node.args[1:3])  # type: ignore[arg-type]
            dim = {a: b, b: a}.get(dim, dim)
        elif node.target not in _SAME or len(before) != len(after) or not same(before[dim], after[dim]):
            return None
        node = source
    return None


def _merged(before: tuple[Size, ...], after: tuple[Size, ...], dim: int) -> tuple[int, int] | None:
    """The first and the last of the dims in a row that became ``dim``; those of size 1 at either end left out."""
    front, size = product(after[:dim]), after[dim]
    for first in range(len(before)):
        if not same(product(before[:first]), front) or same(before[first], 1):
            continue
        for last in range(first, len(before)):
            if same(product(before[first : last + 1]), size) and not same(before[last], 1):
                return first, last
    return None
