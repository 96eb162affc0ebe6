"""Positions as they are made, viewed, cut, joined and looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from cp_compile._compat import known_true
from cp_compile.passes.layouts import Size, same
from cp_compile.passes.positions.forms import Arguments, Form, NoForm, bounds, broadcast, constant, index, moved
from cp_compile.passes.rules.op import wrap

__all__ = ["VIEWS"]


def _full(value: Any) -> Callable[[Arguments], Form]:
    return lambda a: constant(a.shape, a["fill_value"] if value is None else value, a.is_bool)


def _arange(a: Arguments) -> Form:
    start, step = a.get("start", 0), a.get("step", 1)
    return Form(a.shape, ((0, sympy.sympify(start) + index(0) * step),))


def _by_order(order: Callable[[Arguments, int], list[int | None]]) -> Callable[[Arguments], Form]:
    """Views: for each dim of the result, the old dim that it is; ``None`` for a new or repeated one."""

    def rule(a: Arguments) -> Form:
        form = a["self"]
        places = order(a, len(form.shape))
        to: dict[int, Any] = dict.fromkeys(range(len(form.shape)), 0)
        to.update({old: index(new) for new, old in enumerate(places) if old is not None})
        return moved(form, a.shape, to, form.is_bool)

    return rule


def _unsqueezed(a: Arguments, ndim: int) -> list[int | None]:
    order: list[int | None] = list(range(ndim))
    order.insert(wrap(a["dim"], ndim + 1), None)
    return order


def _expanded(a: Arguments, ndim: int) -> list[int | None]:
    old = a["self"].shape
    offset = len(a.shape) - ndim
    return [
        None if d < offset or (old[d - offset] == 1 and a.shape[d] != 1) else d - offset for d in range(len(a.shape))
    ]


def _reshaped(a: Arguments, ndim: int) -> list[int | None]:
    """Only dims of size 1 may come and go."""
    old = a["self"].shape
    rest = [dim for dim in range(ndim) if old[dim] != 1]
    kept = [dim for dim, size in enumerate(a.shape) if size != 1]
    if len(rest) != len(kept) or not all(same(old[r], a.shape[k]) for r, k in zip(rest, kept)):
        raise NoForm
    order: list[int | None] = [None] * len(a.shape)
    for r, k in zip(rest, kept):
        order[k] = r
    return order


def _transposed(a: Arguments, ndim: int) -> list[int | None]:
    order: list[int | None] = list(range(ndim))
    first, second = wrap(a["dim0"], ndim), wrap(a["dim1"], ndim)
    order[first], order[second] = order[second], order[first]
    return order


def _slice(a: Arguments) -> Form:
    form = a["self"]
    dim = wrap(a["dim"], len(form.shape))
    start, step = a.get("start", 0), a.get("step", 1)
    if start != 0 and not known_true(a.fake_mode, sympy.Ge(start, 0)):
        start = start + form.shape[dim]
        if not known_true(a.fake_mode, sympy.Ge(start, 0)):
            raise NoForm
    if step != 1 and len(form.number) > 1:
        raise NoForm
    to: dict[int, Any] = {d: index(d) for d in range(len(form.shape))}
    if len(form.number) > 1 and form.along == dim:
        return _cropped(a, form, dim, start)
    to[dim] = start + step * index(dim)
    return moved(form, a.shape, to, form.is_bool)


def _cropped(a: Arguments, form: Form, dim: int, start: Size) -> Form:
    """The pieces that are left of a slice."""
    shift = {index(dim): index(dim) + start}
    ends = [*(s for s, _ in form.number[1:]), form.shape[dim]]
    pieces: list[tuple[Size, sympy.Expr]] = []
    for (first, expression), end in zip(form.number, ends):
        if known_true(a.fake_mode, sympy.Le(end - start, 0)):
            continue
        if known_true(a.fake_mode, sympy.Ge(first - start, a.shape[dim])):
            continue
        begin = first - start
        if pieces and known_true(a.fake_mode, sympy.Ge(begin, 0)) is not True:
            raise NoForm
        pieces.append((begin if pieces else 0, expression.subs(shift)))
    return Form(a.shape, tuple(pieces), dim)


def _select(a: Arguments) -> Form:
    form = a["self"]
    dim = wrap(a["dim"], len(form.shape))
    if len(form.number) > 1:
        raise NoForm
    at = a["index"]
    at = at if known_true(a.fake_mode, sympy.Ge(at, 0)) else at + form.shape[dim]
    to: dict[int, Any] = {d: index(d - (d > dim)) for d in range(len(form.shape))}
    to[dim] = at
    return moved(form, a.shape, to, form.is_bool)


def _cat(a: Arguments) -> Form:
    # One that is empty and has one dim is skipped, whatever the others are (the start of a cache).
    forms = [form for form in a["tensors"] if form.shape != (0,)]
    dim = wrap(a["dim"], len(a.shape))
    pieces: list[tuple[Size, sympy.Expr]] = []
    start: Size = 0
    for form in forms:
        if form.whole is None:
            raise NoForm
        pieces.append((start, form.whole.subs(index(dim), index(dim) - start)))
        start = start + form.shape[dim]
    return Form(a.shape, tuple(pieces), dim)


def _lookup(a: Arguments) -> Form:
    """``x[i, j, ...]`` with an index for each dim, all of them forms."""
    form, indices = a["self"], a["indices"]
    if len(indices) != len(form.shape) or any(i is None or i.is_bool for i in indices) or len(form.number) > 1:
        raise NoForm
    to: dict[int, Any] = {}
    for dim, chosen in enumerate(indices):
        chosen = broadcast(chosen, a.shape)
        if chosen.whole is None:
            raise NoForm
        low, high = bounds(sympy.expand(chosen.whole), a.shape)
        inside = sympy.Ge(low, 0), sympy.Lt(high, form.shape[dim])
        if not all(known_true(a.fake_mode, each) for each in inside):
            raise NoForm
        to[dim] = chosen.whole
    return moved(form, a.shape, to, form.is_bool)


VIEWS: tuple[tuple[str, Callable[[Arguments], Form]], ...] = (
    ("arange.default arange.start arange.start_step", _arange),
    ("ones.default new_ones.default ones_like.default", _full(1)),
    ("zeros.default new_zeros.default zeros_like.default", _full(0)),
    ("full.default new_full.default full_like.default", _full(None)),
    ("unsqueeze.default", _by_order(_unsqueezed)),
    ("expand.default broadcast_to.default", _by_order(_expanded)),
    ("view.default reshape.default squeeze.dim squeeze.default squeeze.dims", _by_order(_reshaped)),
    ("transpose.int", _by_order(_transposed)),
    ("permute.default", _by_order(lambda a, ndim: [wrap(dim, ndim) for dim in a["dims"]])),
    ("slice.Tensor", _slice),
    ("select.int", _select),
    ("cat.default", _cat),
    ("index.Tensor", _lookup),
)
"""Rules by the names of their ops."""
