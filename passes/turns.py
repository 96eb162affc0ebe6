"""The ops that put the dims of a value in another order, and that order."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

__all__ = ["TURNS", "order_of"]

aten = torch.ops.aten
TURNS = (aten.transpose.int, aten.permute.default, aten.t.default)


def order_of(turn: Node) -> list[int]:
    """Where each dim of the result of one of ``TURNS`` stood in what it turns."""
    ndim = turn.meta["val"].ndim
    given: Any = turn.args[1:]
    if turn.target is aten.permute.default:
        return [dim % ndim for dim in given[0]]
    order = list(range(ndim))
    if ndim > 1:
        a, b = (dim % ndim for dim in given or (0, 1))
        order[a], order[b] = order[b], order[a]
    return order
