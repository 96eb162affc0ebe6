"""A program being written: what is drawn for it, and the lines so far."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hypothesis import strategies as st

from cp_compile.testing.programs import Dim, Line, Value

__all__ = [
    "TOKENS",
    "WIDTH",
    "Step",
    "Writer",
    "bracketed",
    "broadcast",
    "is_literal",
    "named",
    "plus",
    "replaced",
    "text_of",
    "times",
]

TOKENS, WIDTH = 7, 8
_MOST_ELEMENTS, _MOST_DIMS = 3000, 5


class Writer:
    """A program being written."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.batch = Dim("B", draw(st.sampled_from([2, 1, 3])))
        self.length = Dim("S", draw(st.sampled_from([5, 4, 6, 3, 8, 2, 1])))
        rows = (self.batch, self.length)
        shape = f"({self.batch.size}, {self.length.size})"
        self.parameters: dict[str, tuple[int, ...]] = {"table": (TOKENS, WIDTH)}
        self.arguments = {
            "ids": f"torch.randint({TOKENS}, {shape}, generator=generator)",
            "keep": f"torch.rand({shape}, generator=generator) > 0.3",
            "labels": f"torch.randint(-1, {TOKENS}, {shape}, generator=generator)",
        }
        self.lines: list[Line] = []
        self.values: list[Value] = [Value("ids", rows, "int", TOKENS), Value("keep", rows, "bool")]
        self.add("F.embedding(ids, self.table)", (*rows, Dim.of(WIDTH)))

    # -- what is drawn

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choice(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def order(self, count: int) -> list[int]:
        return list(self.draw(st.permutations(range(count))))

    def pick(self, fits: Callable[[Value], bool] = lambda value: True, kind: str = "float") -> Value | None:
        """One of the values of a kind that fits, the latest first."""
        found = [value for value in reversed(self.values) if value.kind == kind and fits(value)]
        # Mostly the latest, so that lines build on each other.
        return self.choice(found) if len(found) > 1 and self.integer(0, 3) == 3 else next(iter(found), None)

    def dim(self, value: Value) -> int:
        """A dim, the sequence's place first."""
        dims = sorted(range(value.ndim), key=lambda d: d != 1)
        return int(self.choice(dims))

    # -- what is written

    def add(self, text: str, dims: Sequence[Dim], kind: str = "float", high: int = 0) -> Value | None:
        """A line that makes a value; none if that would be too large."""
        elements = math.prod(dim.size for dim in dims)
        if elements > _MOST_ELEMENTS or len(dims) > _MOST_DIMS or elements == 0:
            return None
        value = Value(f"v{len(self.lines)}", tuple(dims), kind, high)
        self.line(value.name, f"{value.name} = {text}")
        self.values.append(value)
        return value

    def line(self, makes: str, text: str) -> None:
        self.lines.append(Line(makes, text, frozenset(re.findall(r"self\.\w+|\b[a-z]\w*\b", text.split("=", 1)[1]))))

    def parameter(self, *shape: int) -> str:
        """A parameter of a shape: one that there is (a tied one), or a new one."""
        known = [name for name, old in self.parameters.items() if old == shape]
        if known and self.flag():
            return f"self.{self.choice(known)}"
        name = f"w{len(self.parameters)}"
        self.parameters[name] = shape
        return f"self.{name}"


Step: TypeAlias = Callable[[Writer], Any]


def text_of(dims: Sequence[Dim]) -> str:
    return ", ".join(dim.text for dim in dims)


def replaced(dims: Sequence[Dim], dim: int, *new: Dim) -> list[Dim]:
    return [*dims[:dim], *new, *dims[dim + 1 :]]


def is_literal(dim: Dim) -> bool:
    return dim.text.isdigit()


def bracketed(dim: Dim) -> str:
    return dim.text if re.fullmatch(r"\w+", dim.text) else f"({dim.text})"


def times(dim: Dim, count: int) -> Dim:
    return Dim.of(dim.size * count) if is_literal(dim) else Dim(f"{count} * {bracketed(dim)}", dim.size * count)


def plus(dim: Dim, count: int) -> Dim:
    if is_literal(dim):
        return Dim.of(dim.size + count)
    return Dim(f"{dim.text} {'+' if count > 0 else '-'} {abs(count)}", dim.size + count)


def broadcast(a: Value, b: Value) -> list[Dim] | None:
    """The shape that two broadcast to, if they do."""
    dims: list[Dim] = []
    for i in range(1, max(a.ndim, b.ndim) + 1):
        x = a.dims[-i] if i <= a.ndim else Dim.of(1)
        y = b.dims[-i] if i <= b.ndim else Dim.of(1)
        if x != y and "1" not in (x.text, y.text):
            return None
        dims.insert(0, y if x.text == "1" else x)
    return dims


def named(*steps: Step) -> dict[str, Step]:
    """Steps by the names of their functions."""
    return {step.__name__.removeprefix("_"): step for step in steps}
