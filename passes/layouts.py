"""Layouts: where a value of the global view lives. Sizes are ints, or sympy expressions of the graph's symbols."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

import sympy
import torch

from cp_compile._compat import FloorDiv, equal_in_this_run, known_true

__all__ = [
    "WHOLE",
    "Axis",
    "Layout",
    "Local",
    "Partial",
    "PerQueryHead",
    "Sharded",
    "Size",
    "Whole",
    "carried_cut",
    "carrier",
    "ceil_div",
    "dim_size",
    "divide",
    "equal",
    "global_shape",
    "local_shape",
    "product",
    "same",
    "shape_of",
    "size_of",
]

Size: TypeAlias = Union[int, sympy.Expr]


def size_of(value: int | torch.SymInt) -> Size:
    """The size as an int where it is one, else as a sympy expression."""
    if not isinstance(value, torch.SymInt):
        return value
    expression = value.node.expr
    if expression.has(FloorDiv):
        # A reshape may leave (s * s) // s, which sympy does not know to be s.
        expression = expression.replace(FloorDiv, lambda a, b: divide(a, b) or FloorDiv(a, b))
    return int(expression) if expression.is_Integer else expression


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """The shape of a (fake) tensor as sizes."""
    return tuple(size_of(size) for size in tensor.shape)


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def equal(a: Size, b: Size, fake_mode: Any) -> bool:
    """Whether two sizes are equal: in every run, or as far as can be told, in the one that is being compiled."""
    if same(a, b):
        return True
    known = known_true(fake_mode, sympy.Eq(a, b))
    return equal_in_this_run(fake_mode, a, b) if known is None else known


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    return math.prod(sizes)  # type: ignore[arg-type, return-value]


def divide(a: Size, b: Size) -> Size | None:
    """``a / b`` where it is known to be whole, else ``None``."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    whole = quotient.is_Integer or (sympy.denom(quotient) == 1 and quotient.is_integer)
    if not whole:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def ceil_div(a: Size, b: int) -> Size:
    """``a / b`` rounded up."""
    if isinstance(a, int):
        return -(-a // b)
    whole = divide(a, b)
    return FloorDiv(a + b - 1, b) if whole is None else whole


def carrier(shape: Sequence[Size], blocked: Collection[int], cp_size: int) -> int | None:
    """The dim that can best carry the cut in place of one that an op mixes; ``None``: no dim has an element a rank.

    A dim that the ranks divide before one that is padded or symbolic, heads in front of a sequence before channels:
    only the bytes that are sent depend on it.

    Args:
        shape: of the value.
        blocked: dims that cannot carry it, the one that is mixed first.
        cp_size: ranks.
    """
    mixed = next(iter(blocked), 0)

    def cost(dim: int) -> tuple[bool, bool, bool, int]:
        size = shape[dim]
        known = isinstance(size, int)
        return not known, known and size % cp_size != 0, not 0 < dim == mixed - 1, -size if known else 0

    free = [dim for dim in range(len(shape)) if dim not in blocked]
    able = [dim for dim in free if not isinstance(shape[dim], int) or shape[dim] >= cp_size]
    return min(able, key=cost, default=None)


@dataclass(frozen=True)
class Axis:
    """An axis that is cut into one contiguous chunk of storage rows a rank.

    Storage row ``j`` of rank ``r`` holds row ``r * chunk + j - start`` of the axis; rows outside ``[0, size)`` are
    pads.
    A slice of the sequence (``logits[:, :-1]``) is therefore the same storage under another ``start`` and ``size``.

    Attributes:
        size: the length in the global view.
        chunk: storage rows a rank.
        start: the storage row at which row 0 stands.
        name: for reading only.
    """

    size: Size
    chunk: Size
    start: Size = 0
    name: str = field(default="sequence", compare=False)

    @classmethod
    def cut(cls, size: Size, cp_size: int, name: str = "sequence") -> Axis:
        """An axis of ``size`` in ``cp_size`` chunks of ``ceil(size / cp_size)``."""
        return cls(size, ceil_div(size, cp_size), name=name)

    def has_pads(self, cp_size: int) -> bool:
        """Whether any rank may hold a row that is not part of the global view."""
        return not (same(self.start, 0) and same(self.size, cp_size * self.chunk))

    def is_on_all_ranks(self, cp_size: int) -> bool:
        """Whether every rank is known to hold a row of the axis."""
        if not all(isinstance(size, int) for size in (self.size, self.chunk, self.start)):
            return False
        return bool(self.start < self.chunk and self.start + self.size > (cp_size - 1) * self.chunk)


def carried_cut(shape: Sequence[Size], blocked: Collection[int], cp_size: int) -> Sharded | None:
    """The cut of the dim that can best carry it (``carrier``)."""
    dim = carrier(shape, blocked, cp_size)
    return None if dim is None else Sharded(dim, Axis.cut(shape[dim], cp_size, "channels"))


@dataclass(frozen=True)
class Whole:
    """Every rank holds all of it."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Sharded:
    """One axis is cut. ``dim`` holds ``outer * axis.size * inner`` elements, ``outer`` varying slowest.

    ``dim`` counts from the front.
    """

    dim: int
    axis: Axis
    outer: Size = 1
    inner: Size = 1

    @property
    def size(self) -> Size:
        """The size of ``dim`` in the global view."""
        return self.outer * self.axis.size * self.inner

    @property
    def local_size(self) -> Size:
        """The size of ``dim`` on a rank, pads included."""
        return self.outer * self.axis.chunk * self.inner

    @property
    def pure(self) -> bool:
        """Whether ``dim`` is the axis and nothing else."""
        return same(self.outer, 1) and same(self.inner, 1)

    def at(self, dim: int) -> Sharded:
        """The same cut in another dim."""
        return Sharded(dim, self.axis, self.outer, self.inner)

    def __str__(self) -> str:
        return f"{self.axis.name} cut in dim {self.dim}"


@dataclass(frozen=True)
class PerQueryHead:
    """Key/value heads inside attention: ``dim`` holds the ``count`` heads that this rank's query heads use.

    Attributes:
        dim: the head dim.
        query_heads: query heads of the whole attention.
        kv_heads: key/value heads of the whole attention.
        count: heads a rank holds: the most that any rank needs.
    """

    dim: int
    query_heads: int
    kv_heads: int
    count: int

    def evenly(self, cp_size: int) -> int | None:
        """How many of a rank's query heads, one behind the other, share each of its kv heads.

        ``None``: another number on one rank than on another, or of one head than of another.
        """
        share, group = self.query_heads // cp_size, self.query_heads // self.kv_heads
        return share // self.count if group % share == 0 or share % group == 0 else None

    def __str__(self) -> str:
        return f"the {self.count} kv heads of this rank's query heads in dim {self.dim}"


@dataclass(frozen=True)
class Partial:
    """The global value is the sum over ranks."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"partial {self.op}"


@dataclass(frozen=True)
class Local:
    """Meaningful on this rank only: what each rank makes of a sort of its own rows (tokens sorted by expert).

    No move leads from here or to here: such a value ends where its rows are put back in their order.

    Attributes:
        role: ``"rows"``: rows in the order of the sort; ``"keys"``: the sorted keys; ``"places"``: rows whose numbers
            say where each came from; ``"inverse"``: cut rows whose numbers say where each went; ``"counts"``: how
            often each key occurs; ``"ends"``: where the rows of each key end.
        order: the node that sorts.
        rows: the cut dim whose rows are sorted, counted as dim 0.
        dim: the dim of this value that holds the rows (none of ``"counts"`` and ``"ends"``).
        into: the cut dim that the numbers of ``"places"`` count through, counted as dim 0.
    """

    role: str
    order: str
    rows: Sharded
    dim: int = 0
    into: Sharded | None = None

    @property
    def per_key(self) -> bool:
        """Whether there is an element for each key, and not for each row."""
        return self.role in ("counts", "ends")

    def __str__(self) -> str:
        return f"this rank's own ({self.role} of the sort {self.order})"


Layout: TypeAlias = Union[Whole, Sharded, PerQueryHead, Partial, Local]
WHOLE = Whole()


def dim_size(layout: Layout) -> Size | None:
    """The size of ``layout.dim`` in the global view; ``None``: no dim is cut, or it is heads that ranks share."""
    if isinstance(layout, Sharded):
        return layout.size
    return layout.rows.size if isinstance(layout, Local) and not layout.per_key else None


def local_shape(shape: Sequence[Size], layout: Layout) -> tuple[Size, ...]:
    """The shape that a rank holds of a value of the global ``shape``."""
    local: list[Any] = list(shape)
    if isinstance(layout, Sharded):
        local[layout.dim] = layout.local_size
    elif isinstance(layout, PerQueryHead):
        local[layout.dim] = layout.count
    elif isinstance(layout, Local) and not layout.per_key:
        local[layout.dim] = layout.rows.local_size
    return tuple(local)


def global_shape(local: Sequence[Size], layout: Layout) -> tuple[Size, ...]:
    """The shape in the global view of a value of which a rank holds ``local``."""
    shape: list[Any] = list(local)
    size = layout.kv_heads if isinstance(layout, PerQueryHead) else dim_size(layout)
    if size is not None:
        shape[layout.dim] = size  # type: ignore[union-attr]
    return tuple(shape)
