"""Edges around what stands in their way. The page does the same in its script, for boxes that open and close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Rect", "Router"]

_BEND = 22
"""Height in which an edge turns into its lane and out of it."""

_STEPS = 24
"""Points of a bend that are looked at."""


@dataclass(frozen=True)
class Rect:
    """A place on the paper.

    Attributes:
        holds: names of the ops in it: edges from and to these may cross it.
        row: the lower end of the row that it stands in.
    """

    left: float
    top: float
    right: float
    bottom: float
    holds: frozenset[str] = frozenset()
    row: float = 0.0

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2


@dataclass(frozen=True)
class _Lane:
    """The vertical piece of a path that is drawn."""

    x: float
    top: float
    bottom: float
    source: str


@dataclass
class Router:
    """Paths one after the other; each keeps off the lanes of those before it, but for those of its own source."""

    lanes: list[_Lane] = field(default_factory=list)

    def path(self, source: str, start: Rect, x: float, y: float, blocks: Sequence[Rect]) -> str:
        """From below ``start`` down to a point: in one bend if nothing is in the way, else by a free lane."""
        begin, floor = start.middle, max(start.bottom, start.row)
        head = f"M{begin:.1f} {start.bottom:.1f}" + (f"V{floor:.1f}" if floor > start.bottom else "")
        if not crossed(begin, floor, x, y, blocks):
            return head + _bend(begin, floor, x, y)
        top, bottom = floor + _BEND, y - _BEND
        lane = self._lane(source, (begin, floor), (x, y), blocks)
        self.lanes.append(_Lane(lane, top, bottom, source))
        return f"{head}{_bend(begin, floor, lane, top)}V{bottom:.1f}{_bend(lane, bottom, x, y)}"

    def _lane(self, source: str, start: tuple[float, float], end: tuple[float, float], blocks: Sequence[Rect]) -> float:
        """The free lane with the shortest way, beside all that stands between; on the right if it is the same."""
        (x1, y1), (x2, y2) = start, end
        top, bottom = y1 + _BEND, y2 - _BEND
        tall = [rect for rect in blocks if rect.bottom > top and rect.top < bottom]
        busy = [each for each in self.lanes if each.source != source and each.bottom > top and each.top < bottom]

        def length(x: float) -> float:
            return abs(x - x1) + abs(x - x2) + (40 if x < min(x1, x2) else 0)

        def free(x: float) -> bool:
            beside = all(x < rect.left - 4 or x > rect.right + 4 for rect in tall)
            return beside and all(abs(each.x - x) > 4 for each in busy)

        places = [x1, x2, *(x for rect in tall for x in (rect.left - 9, rect.right + 9))]
        places += [x for each in busy for x in (each.x - 6, each.x + 6)]
        best, least = x1, float("inf")
        for x in sorted(filter(free, places), key=length):
            if length(x) >= least:
                break
            cost = length(x) + 400 * (crossed(x1, y1, x, top, blocks) + crossed(x, bottom, x2, y2, blocks))
            if cost < least:
                best, least = x, cost
        return best


def crossed(x1: float, y1: float, x2: float, y2: float, blocks: Sequence[Rect]) -> int:
    """How many blocks a bend from one point down to another crosses."""
    near = [rect for rect in blocks if rect.bottom > y1 - 2 and rect.top < y2 + 2]
    found: set[int] = set()
    for step in range(_STEPS + 1):
        t = step / _STEPS  # the cubic curve of _bend
        x = x1 + (x2 - x1) * (3 * t**2 - 2 * t**3)
        y = y1 + (y2 - y1) * (1.5 * t - 1.5 * t**2 + t**3)
        for i, rect in enumerate(near):
            if rect.left - 3 < x < rect.right + 3 and rect.top - 1 < y < rect.bottom + 1:
                found.add(i)
    return len(found)


def _bend(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    return f"C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
