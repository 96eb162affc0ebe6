"""How the operands of a call may be cut: every dim, alone and with others, in each of the ways that layouts know."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from cp_compile.passes.layouts import WHOLE, Axis, Layout, Partial, Sharded

__all__ = ["Layouts", "described", "layouts_of"]

Layouts: TypeAlias = "tuple[Layout, ...]"
"""A layout for each tensor of a call."""


def layouts_of(tensors: Sequence[torch.Tensor], cp_size: int) -> Iterator[Layouts]:
    """How the operands of a call may be cut: one axis, in one dim of one or more operands."""
    if not tensors:
        yield ()
    seen = set()
    for places in _places(tensors):
        (first, dim), *_ = places
        for cut in _cuts(tensors[first].shape[dim], cp_size):
            layouts: list[Layout] = [WHOLE] * len(tensors)
            for i, d in places:
                layouts[i] = cut.at(d)
            for rest in (WHOLE, Partial()):
                # What is not cut may be a sum that has not been made yet.
                chosen = tuple(rest if layout == WHOLE and len(tensors) > 1 else layout for layout in layouts)
                if chosen not in seen and (rest == WHOLE or cut.pure):
                    seen.add(chosen)
                    yield chosen


def _places(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Dims that hold the axis: each alone, each pair as long, and all as they are aligned from the right or left."""
    dims = [(i, d) for i, tensor in enumerate(tensors) for d in range(tensor.ndim)]
    size = lambda place: tensors[place[0]].shape[place[1]]
    yield from ((place,) for place in dims)
    yield from ((a, b) for a, b in itertools.combinations(dims, 2) if a[0] != b[0] and size(a) == size(b))
    for key in (lambda place: tensors[place[0]].ndim - place[1], lambda place: place[1]):
        for number in {key(place) for place in dims}:
            aligned = [place for place in dims if key(place) == number]
            if len(aligned) > 2 and len({size(place) for place in aligned}) == 1:
                yield tuple(aligned)


def _cuts(size: int, cp_size: int) -> Iterator[Sharded]:
    if size == 0:
        return
    yield Sharded(0, Axis.cut(size, cp_size))
    if size > 1:
        yield Sharded(0, Axis(size, -(-(size + 2) // cp_size), 1))
    if size % 2 == 0:
        axis = Axis.cut(size // 2, cp_size)
        yield Sharded(0, axis, outer=2)
        yield Sharded(0, axis, inner=2)


def described(layout: Layout) -> str:
    """A layout with its numbers."""
    if not isinstance(layout, Sharded):
        return str(layout)
    axis = layout.axis
    mixed = f", {layout.outer} x {axis.size} x {layout.inner}" if not layout.pure else ""
    return f"{layout} (rows {axis.start}:{axis.start + axis.size} in chunks of {axis.chunk}{mixed})"
