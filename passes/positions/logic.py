"""Sums, comparisons and conditions of positions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from cp_compile.passes.positions.forms import Arguments, Form, NoForm, broadcast, constant, index
from cp_compile.passes.rules.op import wrap

__all__ = ["LOGIC"]


def _pair(a: Arguments) -> tuple[Form, Form]:
    """Both sides; integers in the pieces of both."""
    left, right = (broadcast(a[name], a_shape) for name, a_shape in (("self", a.shape), ("other", a.shape)))
    return left, right


def _numbers(a: Arguments) -> tuple[sympy.Expr, sympy.Expr]:
    left, right = _pair(a)
    if left.whole is None or right.whole is None:
        raise NoForm
    return left.whole, right.whole


def _arithmetic(combine: Callable[[Any, Any], Any]) -> Callable[[Arguments], Form]:
    def rule(a: Arguments) -> Form:
        if a.is_bool or a.get("alpha", 1) != 1:
            raise NoForm
        left, right = _pair(a)
        if left.is_bool or right.is_bool:
            raise NoForm
        if len(left.number) > 1 and len(right.number) > 1:
            raise NoForm
        many, one = (left, right) if len(left.number) > 1 else (right, left)
        if len(many.number) == 1:
            return Form(a.shape, ((0, sympy.expand(combine(left.whole, right.whole))),))
        of = (lambda e: combine(e, one.whole)) if many is left else (lambda e: combine(one.whole, e))
        return Form(a.shape, tuple((start, sympy.expand(of(e))) for start, e in many.number), many.along)

    return rule


def _compared(atoms: Callable[[Any, Any], Sequence[Any]]) -> Callable[[Arguments], Form]:
    def rule(a: Arguments) -> Form:
        left, right = _numbers(a)
        return Form(a.shape, holds=frozenset(sympy.expand(e) for e in atoms(left, right)), is_bool=True)

    return rule


def _ne(a: Arguments) -> Form:
    left, right = _numbers(a)
    difference = sympy.expand(left - right)
    if not difference.is_number:
        raise NoForm
    return constant(a.shape, bool(difference != 0), True)


def _and(a: Arguments) -> Form:
    left, right = _pair(a)
    if not left.is_bool or not right.is_bool:
        raise NoForm
    if left.holds is None or right.holds is None:
        return Form(a.shape, holds=None, is_bool=True)
    return Form(a.shape, holds=left.holds | right.holds, is_bool=True)


def _or(a: Arguments) -> Form:
    left, right = _pair(a)
    if not left.is_bool or not right.is_bool:
        raise NoForm
    if left.holds == frozenset() or right.holds is None:
        return left
    if right.holds == frozenset() or left.holds is None:
        return right
    raise NoForm


def _not(a: Arguments) -> Form:
    form = a["self"]
    if not form.is_bool or (form.holds and len(form.holds) > 1):
        raise NoForm
    if not form.holds:
        return Form(a.shape, holds=frozenset() if form.holds is None else None, is_bool=True)
    (expression,) = form.holds
    return Form(a.shape, holds=frozenset([sympy.expand(-expression - 1)]), is_bool=True)


def _triangle(sign: int) -> Callable[[Arguments], Form]:
    def rule(a: Arguments) -> Form:
        form, ndim = a["self"], len(a.shape)
        if not form.is_bool:
            raise NoForm
        if form.holds is None:
            return Form(a.shape, holds=None, is_bool=True)
        kept = sign * (index(ndim - 2) - index(ndim - 1) + a["diagonal"])
        return Form(a.shape, holds=form.holds | {kept}, is_bool=True)

    return rule


def _cumsum(a: Arguments) -> Form:
    """Of a constant."""
    form = a["self"]
    if form.is_bool:
        if form.holds:
            raise NoForm
        each = sympy.Integer(0 if form.holds is None else 1)
    elif form.whole is not None and form.whole.is_number:
        each = form.whole
    else:
        raise NoForm
    return Form(a.shape, ((0, each * (index(wrap(a["dim"], len(a.shape))) + 1)),))


def _cast(a: Arguments) -> Form:
    form = a["self"]
    if form.is_bool == a.is_bool:
        return form  # type: ignore[no-any-return]
    if form.is_bool and not form.holds:
        return constant(a.shape, form.holds is not None, False)
    if form.whole is not None and form.whole.is_number:
        return constant(a.shape, int(form.whole) != 0, True)
    raise NoForm


def _same(a: Arguments) -> Form:
    return a["self"]  # type: ignore[no-any-return]


LOGIC: tuple[tuple[str, Callable[[Arguments], Form]], ...] = (
    ("add.Tensor add.Scalar", _arithmetic(operator.add)),
    ("sub.Tensor sub.Scalar", _arithmetic(operator.sub)),
    ("le.Tensor le.Scalar", _compared(lambda a, b: [b - a])),
    ("lt.Tensor lt.Scalar", _compared(lambda a, b: [b - a - 1])),
    ("ge.Tensor ge.Scalar", _compared(lambda a, b: [a - b])),
    ("gt.Tensor gt.Scalar", _compared(lambda a, b: [a - b - 1])),
    ("eq.Tensor eq.Scalar", _compared(lambda a, b: [a - b, b - a])),
    ("ne.Tensor ne.Scalar", _ne),
    ("__and__.Tensor bitwise_and.Tensor logical_and.default", _and),
    ("__or__.Tensor bitwise_or.Tensor logical_or.default", _or),
    ("logical_not.default bitwise_not.default", _not),
    ("tril.default", _triangle(1)),
    ("triu.default", _triangle(-1)),
    ("cumsum.default", _cumsum),
    ("_to_copy.default", _cast),
)
"""Rules by the names of their ops."""
