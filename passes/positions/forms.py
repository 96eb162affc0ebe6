"""Forms: a value as a function of its indices, and how it is read, moved and simplified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import sympy
import torch
from torch.fx import Node

from cp_compile._compat import known_true
from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.layouts import Size, same, size_of

__all__ = [
    "Arguments",
    "Condition",
    "Form",
    "NoForm",
    "bounds",
    "broadcast",
    "constant",
    "index",
    "moved",
    "simplified",
]


Condition: TypeAlias = Union[frozenset[Any], None]
"""Expressions that are all >= 0; ``None``: never true."""


def index(dim: int) -> sympy.Symbol:
    """The index of a dim."""
    return sympy.Symbol(f"i{dim}", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Form:
    """A value as a function of its indices.

    Attributes:
        shape: of the value.
        number: an integer, in pieces along ``along``: where each starts, and its expression.
        along: the dim of the pieces.
        holds: a condition; with ``is_bool``.
    """

    shape: tuple[Size, ...]
    number: tuple[tuple[Size, sympy.Expr], ...] = ()
    along: int = 0
    holds: Condition = frozenset()
    is_bool: bool = False

    @property
    def whole(self) -> sympy.Expr | None:
        """The integer, if it is one expression everywhere."""
        return self.number[0][1] if len(self.number) == 1 and not self.is_bool else None


class NoForm(Exception):  # noqa: N818 - found nothing, which is an answer
    pass


class Arguments:
    """The arguments of a node by schema name: forms of tensors, sizes of numbers."""

    def __init__(self, node: Node, known: Mapping[Node, Form | None], shape: tuple[Size, ...]) -> None:
        self.shape = shape
        self.is_bool = node.meta["val"].dtype == torch.bool
        self.fake_mode = node.meta["val"].fake_mode
        self._arguments = schema_arguments(node)
        self._known = known

    def __getitem__(self, name: str) -> Any:
        return self._read(self._arguments[name])

    def get(self, name: str, default: Any = None) -> Any:
        value = self[name] if name in self._arguments else None
        return default if value is None else value

    def _read(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._read(item) for item in value]
        if not isinstance(value, Node):
            return value
        val = value.meta.get("val")
        if isinstance(val, torch.Tensor):
            form = self._known.get(value)
            if form is None:
                raise NoForm
            return form
        return size_of(val)  # type: ignore[arg-type]


def simplified(form: Form, fake_mode: Any, dtype: torch.dtype) -> Form:
    """Without what the range of the indices says already.

    Raises:
        NoForm: an integer may be none that ``dtype`` holds.
    """
    zero = {index(dim): 0 for dim, size in enumerate(form.shape) if size == 1}
    if not form.is_bool:
        pieces = [(start, sympy.sympify(e).subs(zero)) for start, e in form.number]
        merged = pieces[:1]
        for start, expression in pieces[1:]:
            before_start, before = merged[-1]
            one_row = same(start - before_start, 1)
            at = {index(form.along): before_start}
            if one_row and same(before.subs(at), expression.subs(at)):
                merged[-1] = (before_start, expression)
            elif not same(before, expression):
                merged.append((start, expression))
        if not all(_fits(e, form.shape, dtype) for _, e in merged):
            raise NoForm
        return Form(form.shape, tuple(merged), form.along)
    if form.holds is None:
        return form
    left = set()
    for expression in form.holds:
        expression = sympy.expand(sympy.sympify(expression).subs(zero))
        low, high = bounds(expression, form.shape)
        if known_true(fake_mode, sympy.Ge(low, 0)):
            continue
        if known_true(fake_mode, sympy.Lt(high, 0)):
            return Form(form.shape, holds=None, is_bool=True)
        left.add(expression)
    return Form(form.shape, holds=frozenset(left), is_bool=True)


def _fits(expression: sympy.Expr, shape: Sequence[Size], dtype: torch.dtype) -> bool:
    """Whether an expression is an integer that does not wrap. No dim of a tensor has ``2 ** 40`` elements."""
    for end in bounds(sympy.expand(expression), shape):
        terms = end.as_coefficients_dict()
        if not all(factor.is_Integer for factor in terms.values()):
            return False
        most = sum(abs(factor) * term.subs(dict.fromkeys(term.free_symbols, 2**40)) for term, factor in terms.items())
        if not most.is_number or most > torch.iinfo(dtype).max:
            return False
    return True


def bounds(expression: sympy.Expr, shape: Sequence[Size]) -> tuple[sympy.Expr, sympy.Expr]:
    """The least and the largest value over all indices, of an affine expression."""
    low = high = expression
    for dim, size in enumerate(shape):
        slope = sympy.diff(expression, index(dim))
        if slope == 0:
            continue
        if not slope.is_number:
            raise NoForm
        first, last = (0, size - 1) if slope > 0 else (size - 1, 0)
        low, high = low.subs(index(dim), first), high.subs(index(dim), last)
    return low, high


def constant(shape: tuple[Size, ...], value: Any, is_bool: bool) -> Form:
    if not isinstance(value, (bool, int, sympy.Integer)):
        raise NoForm
    if is_bool:
        return Form(shape, holds=frozenset() if value else None, is_bool=True)
    return Form(shape, ((0, sympy.Integer(int(value))),))


def moved(form: Form, shape: tuple[Size, ...], to: Mapping[int, sympy.Expr | int], is_bool: bool) -> Form:
    """The form with each index replaced; ``to`` gives what stands for the index of each old dim."""
    swap = {index(dim): new for dim, new in to.items()}
    put: Any = lambda e: sympy.sympify(e).subs(swap, simultaneous=True)
    if form.is_bool:
        holds = None if form.holds is None else frozenset(map(put, form.holds))
        return Form(shape, holds=holds, is_bool=True)
    if len(form.number) == 1:
        return Form(shape, ((0, put(form.number[0][1])),))
    target = to.get(form.along, 0)
    dims = [dim for dim in range(len(shape)) if same(index(dim), target)]
    if len(dims) != 1:
        raise NoForm
    return Form(shape, tuple((start, put(e)) for start, e in form.number), dims[0])


def broadcast(form: Any, shape: tuple[Size, ...]) -> Form:
    """A form, or a number, as one of ``shape``."""
    if not isinstance(form, Form):
        if not isinstance(form, (int, sympy.Expr)):
            raise NoForm
        return constant(shape, form, True) if isinstance(form, bool) else Form(shape, ((0, sympy.sympify(form)),))
    offset = len(shape) - len(form.shape)
    repeated = [d for d, size in enumerate(form.shape) if size == 1 and shape[d + offset] != 1]
    to: dict[int, Any] = {d: 0 if d in repeated else index(d + offset) for d in range(len(form.shape))}
    return moved(form, shape, to, form.is_bool)
