"""Rows and columns for the parts of a box, so that edges lead down and few of them cross.

The layered drawing of Sugiyama, Tagawa and Toda (1981): rows by the longest path, orders within rows by the mean place
of neighbours, then places as near to the neighbours as the order allows.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

__all__ = ["columns", "rows"]

_SWEEPS = 8
"""Times down and up; more of them changes next to nothing."""


def rows(reads: Sequence[set[int]], fed: set[int]) -> list[int]:
    """A row for each part: behind all that it reads.

    Args:
        reads: the parts that each part reads; all of them come before it.
        fed: the parts that take something from elsewhere, or whose sources do. The others (positions, masks) come from
            nothing: they stand where they are needed, and not at the top.
    """
    found: list[int] = []
    for sources in reads:
        found.append(1 + max((found[j] for j in sources), default=-1))
    nearest = [len(reads)] * len(reads)  # of the rows of those that read it
    for i in reversed(range(len(reads))):
        if i not in fed and nearest[i] < len(reads):
            found[i] = nearest[i] - 1
        for j in reads[i]:
            nearest[j] = min(nearest[j], found[i])
    levels = {row: i for i, row in enumerate(sorted(set(found)))}
    return [levels[row] for row in found]


def columns(rows: Sequence[int], reads: Sequence[set[int]]) -> list[int]:
    """A half column for each part; each part takes two, so that one stands between the two that read it."""
    graph = _Layers(rows, reads)
    graph.order()
    return graph.columns()


class _Layers:
    """Rows of knots: parts (``0 .. n - 1``), and one knot in each row that an edge passes on its way."""

    def __init__(self, rows: Sequence[int], reads: Sequence[set[int]]) -> None:
        self.parts = len(rows)
        self.layers: list[list[int]] = [[] for _ in range(1 + max(rows, default=-1))]
        for part, row in enumerate(rows):
            self.layers[row].append(part)
        self.above: dict[int, list[int]] = {part: [] for part in range(self.parts)}
        self.below: dict[int, list[int]] = {part: [] for part in range(self.parts)}
        passing: dict[tuple[int, int], int] = {}
        for part, sources in enumerate(reads):
            for source in sorted(sources):
                before = source
                for row in range(rows[source] + 1, rows[part]):
                    knot = passing.get((source, row))
                    if knot is None:  # one for all edges of a source
                        knot = passing[source, row] = len(self.above)
                        self.above[knot], self.below[knot] = [before], []
                        self.below[before].append(knot)
                        self.layers[row].append(knot)
                    before = knot
                self.above[part].append(before)
                self.below[before].append(part)

    def order(self) -> None:
        """Sorts the rows by the mean place of neighbours, down and up, and keeps the best."""
        best, fewest = [list(layer) for layer in self.layers], self._crossings()
        place = {knot: i for layer in self.layers for i, knot in enumerate(layer)}
        for _ in range(_SWEEPS):
            for near, sequence in (
                (self.above, range(len(self.layers))),
                (self.below, reversed(range(len(self.layers)))),
            ):
                for row in sequence:
                    self.layers[row].sort(key=lambda knot: _mean(knot, near, place))
                    place.update((knot, i) for i, knot in enumerate(self.layers[row]))
                if (crossings := self._crossings()) < fewest:
                    best, fewest = [list(layer) for layer in self.layers], crossings
        self.layers = best

    def _crossings(self) -> int:
        count = 0
        for upper, lower in zip(self.layers, self.layers[1:]):
            place = {knot: i for i, knot in enumerate(lower)}
            ends: list[int] = []
            for knot in upper:
                mine = [place[end] for end in self.below[knot]]
                count += sum(len(ends) - bisect_right(ends, end) for end in mine)
                for end in mine:
                    insort(ends, end)
        return count

    def columns(self) -> list[int]:
        layers = [[knot for knot in layer if knot < self.parts] for layer in self.layers]
        ends = {part: self._ends(part, self.above) for part in range(self.parts)}
        users = {part: self._ends(part, self.below) for part in range(self.parts)}
        place = {part: float(i) for layer in layers for i, part in enumerate(layer)}
        for _ in range(_SWEEPS):
            for near, sequence in ((ends, layers), (users, layers[::-1])):
                for layer in sequence:
                    place.update(zip(layer, _apart([_mean(part, near, place) for part in layer])))
        least = min(place.values(), default=0.0)
        found: dict[int, int] = {}
        for layer in layers:
            free = 0  # two that are 1 apart may be rounded towards each other
            for part in layer:
                found[part] = max(free, round(2 * (place[part] - least)))
                free = found[part] + 2
        return [found[part] for part in range(self.parts)]

    def _ends(self, part: int, near: Mapping[int, Sequence[int]]) -> list[int]:
        """The parts at the other ends of a part's edges."""
        found: list[int] = []
        for knot in near[part]:
            found += [knot] if knot < self.parts else self._ends(knot, near)
        return found


def _mean(knot: int, near: Mapping[int, Sequence[int]], place: Mapping[int, float]) -> float:
    return sum(place[end] for end in near[knot]) / len(near[knot]) if near[knot] else place[knot]


def _apart(wanted: Sequence[float]) -> list[float]:
    """Places in this order, 1 apart or more, as near to the wanted ones as possible: a regression, block by block."""
    blocks: list[tuple[float, int]] = []
    for i, each in enumerate(wanted):
        block = (each - i, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, count = blocks.pop()
            block = ((mean * count + block[0] * block[1]) / (count + block[1]), count + block[1])
        blocks.append(block)
    flat = [mean for mean, count in blocks for _ in range(count)]
    return [mean + i for i, mean in enumerate(flat)]
