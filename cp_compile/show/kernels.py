"""Which values inductor computes in one loop, and so at one moment: an estimate by rule.

    g, u, d           three values of one size                g, u, d      are held
    h = silu(g) * u   for a matmul                     ->     h, gg, gu    one loop: all six are there at once
    gg, gu = f(g, u, d)  as soon as d is there

Two values share a loop where they have as many elements, one reads what the other reads or is, and neither waits for
what is made of the other by a kernel of its own. A result is written over an operand of its size that nothing reads
any more, if no other result of the loop reads it (``torch/_inductor/scheduler.py``: ``can_fuse``,
``decide_inplace_update``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cp_compile.passes.layouts import Size, same

__all__ = ["Kernels", "Loop"]

_LOOK_BACK = 64


@dataclass
class Loop:
    """Values that are computed element by element together.

    Attributes:
        step: when it runs.
        elements: of each result.
        mask: a bit for each of its results.
        results: what it stores, each with what it reads for it.
    """

    step: int
    elements: Size
    mask: int = 0
    results: dict[Any, tuple[Any, ...]] = field(default_factory=dict)

    def reads(self, value: Any) -> list[Any]:
        """The results that read a value."""
        return [result for result, operands in self.results.items() if value in operands]


class Kernels:
    """The loops of both halves of a step, in the order of their first results."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []
        self._of: dict[Any, Loop] = {}
        self._elements: dict[Any, Size] = {}
        self._made: dict[Any, int] = {}
        self._behind: dict[Any, int] = {}
        self._first = 0

    def next_graph(self) -> None:
        """What is computed from here on is another graph's: no loop spans both."""
        self._first = len(self.loops)

    def own(self, result: Any, step: int, operands: Iterable[Any], elements: Size) -> None:
        """A value that a kernel of its own makes."""
        self._made[result], self._elements[result] = step, elements
        self._behind[result] = self._waits_for(operands)

    def computed(self, result: Any, step: int, operands: Iterable[Any], elements: Size, *, alone: bool) -> None:
        """A value that is computed element by element; ``alone``: by no loop of others."""
        operands = tuple(dict.fromkeys(operands))
        loop = None if alone else self._loop_for(operands, elements)
        if loop is None:
            loop = Loop(step, elements)
            self.loops.append(loop)
        else:
            ready = (self.step_of(operand) for operand in operands if operand not in loop.results)
            loop.step = max([loop.step, *ready])
        loop.results[result] = operands
        bit = 1 << len(self._of)
        loop.mask |= bit
        self._of[result], self._elements[result] = loop, elements
        self._behind[result] = self._waits_for(operands) | bit

    def has(self, value: Any) -> bool:
        """Whether a value is the result of a loop."""
        return value in self._of

    def step_of(self, value: Any, otherwise: int = -1) -> int:
        """When a value is made; ``otherwise``: where nothing is known of it, as it is there before the step."""
        loop = self._of.get(value)
        return self._made.get(value, otherwise) if loop is None else loop.step

    def ends(self, reads: Mapping[Any, Mapping[Any, int]]) -> dict[Any, int]:
        """When each value is read last, from when each of its readers was seen; a result is there while its loop runs.

        Args:
            reads: by value, then by reader: the result of a loop, or anything else.
        """
        found = {}
        for value, readers in reads.items():
            steps = [self._of[reader].step if reader in self._of else step for reader, step in readers.items()]
            found[value] = max([*steps, self.step_of(value)])
        return found

    def overwritten(
        self, ends: Mapping[Any, int], sizes: Mapping[Any, Size], kept: Collection[Any]
    ) -> Iterator[tuple[Any, int]]:
        """Operands that a result is written over, each with the step of its loop.

        Args:
            ends: when each value is read last.
            sizes: bytes of what the step makes.
            kept: what nothing is written over.
        """
        for loop in self.loops:
            operands = dict.fromkeys(operand for operands in loop.results.values() for operand in operands)
            free = [x for x in operands if x in sizes and x not in kept and x not in loop.results]
            free = [x for x in free if ends[x] == loop.step]
            for result in loop.results:
                fitting = [x for x in free if loop.reads(x) == [result] and same(sizes[x], sizes[result])]
                if fitting:
                    free.remove(fitting[0])
                    yield fitting[0], loop.step

    def _loop_for(self, operands: tuple[Any, ...], elements: Size) -> Loop | None:
        for loop in reversed(self.loops[max(self._first, len(self.loops) - _LOOK_BACK) :]):
            if same(loop.elements, elements) and self._share(loop, operands) and not self._wait(loop, operands):
                return loop
        return None

    def _share(self, loop: Loop, operands: tuple[Any, ...]) -> bool:
        """Whether what is read whole here is read by a loop, or made."""
        whole = [x for x in operands if x in self._elements and same(self._elements[x], loop.elements)]
        return any(x in loop.results or loop.reads(x) for x in whole)

    def _wait(self, loop: Loop, operands: tuple[Any, ...]) -> bool:
        """Whether an operand is made of a loop's results by others."""
        return any(self._behind.get(x, 0) & loop.mask for x in operands if x not in loop.results)

    def _waits_for(self, operands: Iterable[Any]) -> int:
        mask = 0
        for operand in operands:
            mask |= self._behind.get(operand, 0)
        return mask
