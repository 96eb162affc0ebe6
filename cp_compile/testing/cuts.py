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
    """How the operands of a call may be cut: one axis in one dim of one or more operands, or two axes in two."""
    if not tensors:
        yield ()
    seen = set()
    for chosen in (*_of_one_axis(tensors, cp_size), *_of_two_axes(tensors, cp_size)):
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def _of_one_axis(tensors: Sequence[torch.Tensor], cp_size: int) -> Iterator[Layouts]:
    for places in _places(tensors):
        (first, dim), *_ = places
        for cut in _cuts(tensors[first].shape[dim], cp_size):
            layouts: list[Layout] = [WHOLE] * len(tensors)
            for i, d in places:
                layouts[i] = cut.at(d)
            yield tuple(layouts)
            if cut.pure and len(tensors) > 1:
                # What is not cut may be a sum that has not been made yet.
                yield tuple(Partial() if layout == WHOLE else layout for layout in layouts)


def _of_two_axes(tensors: Sequence[torch.Tensor], cp_size: int) -> Iterator[Layouts]:
    """A slice beside a window that starts elsewhere (a token shift), and dims of different lengths."""
    dims = [(i, d) for i, tensor in enumerate(tensors) for d in range(tensor.ndim)]
    for (i, d), (j, e) in itertools.permutations(dims, 2):
        size, other = tensors[i].shape[d], tensors[j].shape[e]
        if i == j or size < 2 or other < 2:
            continue
        layouts: list[Layout] = [WHOLE] * len(tensors)
        layouts[i] = Sharded(d, Axis.cut(size, cp_size))
        layouts[j] = Sharded(e, _window(other, cp_size))
        yield tuple(layouts)


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
        yield Sharded(0, _window(size, cp_size))
    if size % 2 == 0:
        axis = Axis.cut(size // 2, cp_size)
        yield Sharded(0, axis, outer=2)
        yield Sharded(0, axis, inner=2)
        yield Sharded(0, _window(size // 2, cp_size), inner=2)
    if size % 4 == 0:
        yield Sharded(0, Axis.cut(size // 4, cp_size), outer=2, inner=2)


def _window(size: int, cp_size: int) -> Axis:
    """Rows of a longer axis: one more stands in front of them, and one behind."""
    return Axis(size, -(-(size + 2) // cp_size), 1)


def described(layout: Layout) -> str:
    """A layout with its numbers."""
    if not isinstance(layout, Sharded):
        return str(layout)
    axis = layout.axis
    mixed = f", {layout.outer} x {axis.size} x {layout.inner}" if not layout.pure else ""
    return f"{layout} (rows {axis.start}:{axis.start + axis.size} in chunks of {axis.chunk}{mixed})"
