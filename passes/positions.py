"""What values that depend on positions alone hold: integers and conditions as functions of their indices.

    arange(S)[None, :] <= arange(S)[:, None]        at (i, j):  i - j >= 0
    cumsum(diff(arange(S)) != 1)                    at i:       0

An integer is an affine expression of the indices, a condition is a conjunction of ``affine >= 0``; what is neither (or
reads an input) has no form. Conditions are simplified by the range of the indices: where one holds at every index, it
is gone. Sizes may be symbols of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import sympy
import torch
from torch.fx import Node

from cp_compile._compat import known_true
from cp_compile.passes.editor import is_tensor, schema_arguments
from cp_compile.passes.layouts import Size, same, shape_of, size_of
from cp_compile.passes.rules.op import overloads, wrap

__all__ = ["Condition", "Form", "Positions", "index"]

aten = torch.ops.aten
_EXACT = (torch.bool, torch.int32, torch.int64)  # in the others, sums of positions may wrap or be rounded
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


class _NoForm(Exception):  # noqa: N818 - found nothing, which is an answer
    pass


class Positions:
    """The forms of a graph's values, found once each."""

    def __init__(self) -> None:
        self._known: dict[Node, Form | None] = {}

    def form(self, node: Node) -> Form | None:
        """The form of a value, or ``None``."""
        waiting = [node]
        while waiting:
            # Not by recursion: masks of deep models are long chains.
            top = waiting[-1]
            sources = [source for source in top.all_input_nodes if source not in self._known]
            if top in self._known or (top.op == "call_function" and top.target in _RULES and sources):
                waiting.pop() if top in self._known else waiting.extend(sources)
                continue
            self._known[waiting.pop()] = self._compute(top)
        return self._known[node]

    def _compute(self, node: Node) -> Form | None:
        rule = _RULES.get(node.target) if is_tensor(node) else None
        if rule is None:
            return None
        val = node.meta["val"]
        if val.dtype not in _EXACT:
            return None
        args = _Arguments(node, self._known, shape_of(val))
        try:
            form = rule(args)
            return None if form is None else _simplified(form, val.fake_mode)
        except _NoForm:
            return None


class _Arguments:
    """The arguments of a node by schema name: forms of tensors, sizes of numbers."""

    def __init__(self, node: Node, known: Mapping[Node, Form | None], shape: tuple[Size, ...]) -> None:
        self.target: Any = node.target
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
                raise _NoForm
            return form
        return size_of(val)  # type: ignore[arg-type]


def _simplified(form: Form, fake_mode: Any) -> Form:
    """Without what the range of the indices says already."""
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
        return Form(form.shape, tuple(merged), form.along)
    if form.holds is None:
        return form
    left = set()
    for expression in form.holds:
        expression = sympy.expand(sympy.sympify(expression).subs(zero))
        low, high = _range(expression, form.shape)
        if known_true(fake_mode, sympy.Ge(low, 0)):
            continue
        if known_true(fake_mode, sympy.Lt(high, 0)):
            return Form(form.shape, holds=None, is_bool=True)
        left.add(expression)
    return Form(form.shape, holds=frozenset(left), is_bool=True)


def _range(expression: sympy.Expr, shape: Sequence[Size]) -> tuple[sympy.Expr, sympy.Expr]:
    """The least and the largest value over all indices, of an affine expression."""
    low = high = expression
    for dim, size in enumerate(shape):
        slope = sympy.diff(expression, index(dim))
        if slope == 0:
            continue
        if not slope.is_number:
            raise _NoForm
        first, last = (0, size - 1) if slope > 0 else (size - 1, 0)
        low, high = low.subs(index(dim), first), high.subs(index(dim), last)
    return low, high


def _constant(shape: tuple[Size, ...], value: Any, is_bool: bool) -> Form:
    if not isinstance(value, (bool, int, sympy.Integer)):
        raise _NoForm
    if is_bool:
        return Form(shape, holds=frozenset() if value else None, is_bool=True)
    return Form(shape, ((0, sympy.Integer(int(value))),))


def _full(value: Any) -> Callable[[_Arguments], Form]:
    return lambda a: _constant(a.shape, a["fill_value"] if value is None else value, a.is_bool)


def _arange(a: _Arguments) -> Form:
    start, step = a.get("start", 0), a.get("step", 1)
    return Form(a.shape, ((0, sympy.sympify(start) + index(0) * step),))


def _moved(form: Form, shape: tuple[Size, ...], to: Mapping[int, sympy.Expr | int], is_bool: bool) -> Form:
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
        raise _NoForm
    return Form(shape, tuple((start, put(e)) for start, e in form.number), dims[0])


def _by_order(order: Callable[[_Arguments, int], list[int | None]]) -> Callable[[_Arguments], Form]:
    """Views: for each dim of the result, the old dim that it is; ``None`` for a new or repeated one."""

    def rule(a: _Arguments) -> Form:
        form = a["self"]
        places = order(a, len(form.shape))
        to: dict[int, Any] = dict.fromkeys(range(len(form.shape)), 0)
        to.update({old: index(new) for new, old in enumerate(places) if old is not None})
        return _moved(form, a.shape, to, form.is_bool)

    return rule


def _unsqueezed(a: _Arguments, ndim: int) -> list[int | None]:
    order: list[int | None] = list(range(ndim))
    order.insert(wrap(a["dim"], ndim + 1), None)
    return order


def _expanded(a: _Arguments, ndim: int) -> list[int | None]:
    old = a["self"].shape
    offset = len(a.shape) - ndim
    return [
        None if d < offset or (old[d - offset] == 1 and a.shape[d] != 1) else d - offset for d in range(len(a.shape))
    ]


def _reshaped(a: _Arguments, ndim: int) -> list[int | None]:
    """Only dims of size 1 may come and go."""
    old = a["self"].shape
    rest = [dim for dim in range(ndim) if old[dim] != 1]
    kept = [dim for dim, size in enumerate(a.shape) if size != 1]
    if len(rest) != len(kept) or not all(same(old[r], a.shape[k]) for r, k in zip(rest, kept)):
        raise _NoForm
    order: list[int | None] = [None] * len(a.shape)
    for r, k in zip(rest, kept):
        order[k] = r
    return order


def _transposed(a: _Arguments, ndim: int) -> list[int | None]:
    order: list[int | None] = list(range(ndim))
    first, second = wrap(a["dim0"], ndim), wrap(a["dim1"], ndim)
    order[first], order[second] = order[second], order[first]
    return order


def _slice(a: _Arguments) -> Form:
    form = a["self"]
    dim = wrap(a["dim"], len(form.shape))
    start, step = a.get("start", 0), a.get("step", 1)
    if start != 0 and not known_true(a.fake_mode, sympy.Ge(start, 0)):
        start = start + form.shape[dim]
        if not known_true(a.fake_mode, sympy.Ge(start, 0)):
            raise _NoForm
    if step != 1 and len(form.number) > 1:
        raise _NoForm
    to: dict[int, Any] = {d: index(d) for d in range(len(form.shape))}
    if len(form.number) > 1 and form.along == dim:
        return _cropped(a, form, dim, start)
    to[dim] = start + step * index(dim)
    return _moved(form, a.shape, to, form.is_bool)


def _cropped(a: _Arguments, form: Form, dim: int, start: Size) -> Form:
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
            raise _NoForm
        pieces.append((begin if pieces else 0, expression.subs(shift)))
    return Form(a.shape, tuple(pieces), dim)


def _select(a: _Arguments) -> Form:
    form = a["self"]
    dim = wrap(a["dim"], len(form.shape))
    if len(form.number) > 1:
        raise _NoForm
    at = a["index"]
    at = at if known_true(a.fake_mode, sympy.Ge(at, 0)) else at + form.shape[dim]
    to: dict[int, Any] = {d: index(d - (d > dim)) for d in range(len(form.shape))}
    to[dim] = at
    return _moved(form, a.shape, to, form.is_bool)


def _cat(a: _Arguments) -> Form:
    forms = a["tensors"]
    dim = wrap(a["dim"], len(a.shape))
    pieces: list[tuple[Size, sympy.Expr]] = []
    start: Size = 0
    for form in forms:
        if form.whole is None:
            raise _NoForm
        pieces.append((start, form.whole.subs(index(dim), index(dim) - start)))
        start = start + form.shape[dim]
    return Form(a.shape, tuple(pieces), dim)


def _lookup(a: _Arguments) -> Form:
    """``x[i, j, ...]`` with an index for each dim, all of them forms."""
    form, indices = a["self"], a["indices"]
    if len(indices) != len(form.shape) or any(i is None or i.is_bool for i in indices) or len(form.number) > 1:
        raise _NoForm
    to: dict[int, Any] = {}
    for dim, chosen in enumerate(indices):
        chosen = _broadcast(chosen, a.shape)
        if chosen.whole is None:
            raise _NoForm
        low, high = _range(sympy.expand(chosen.whole), a.shape)
        inside = sympy.Ge(low, 0), sympy.Lt(high, form.shape[dim])
        if not all(known_true(a.fake_mode, each) for each in inside):
            raise _NoForm
        to[dim] = chosen.whole
    return _moved(form, a.shape, to, form.is_bool)


def _broadcast(form: Any, shape: tuple[Size, ...]) -> Form:
    """A form, or a number, as one of ``shape``."""
    if not isinstance(form, Form):
        if not isinstance(form, (int, sympy.Expr)):
            raise _NoForm
        return _constant(shape, form, True) if isinstance(form, bool) else Form(shape, ((0, sympy.sympify(form)),))
    offset = len(shape) - len(form.shape)
    repeated = [d for d, size in enumerate(form.shape) if size == 1 and shape[d + offset] != 1]
    to: dict[int, Any] = {d: 0 if d in repeated else index(d + offset) for d in range(len(form.shape))}
    return _moved(form, shape, to, form.is_bool)


def _pair(a: _Arguments) -> tuple[Form, Form]:
    """Both sides; integers in the pieces of both."""
    left, right = (_broadcast(a[name], a_shape) for name, a_shape in (("self", a.shape), ("other", a.shape)))
    return left, right


def _numbers(a: _Arguments) -> tuple[sympy.Expr, sympy.Expr]:
    left, right = _pair(a)
    if left.whole is None or right.whole is None:
        raise _NoForm
    return left.whole, right.whole


def _arithmetic(combine: Callable[[Any, Any], Any]) -> Callable[[_Arguments], Form]:
    def rule(a: _Arguments) -> Form:
        if a.is_bool or a.get("alpha", 1) != 1:
            raise _NoForm
        left, right = _pair(a)
        if left.is_bool or right.is_bool:
            raise _NoForm
        if len(left.number) > 1 and len(right.number) > 1:
            raise _NoForm
        many, one = (left, right) if len(left.number) > 1 else (right, left)
        if len(many.number) == 1:
            return Form(a.shape, ((0, sympy.expand(combine(left.whole, right.whole))),))
        of = (lambda e: combine(e, one.whole)) if many is left else (lambda e: combine(one.whole, e))
        return Form(a.shape, tuple((start, sympy.expand(of(e))) for start, e in many.number), many.along)

    return rule


def _compared(atoms: Callable[[Any, Any], Sequence[Any]]) -> Callable[[_Arguments], Form]:
    def rule(a: _Arguments) -> Form:
        left, right = _numbers(a)
        return Form(a.shape, holds=frozenset(sympy.expand(e) for e in atoms(left, right)), is_bool=True)

    return rule


def _ne(a: _Arguments) -> Form:
    left, right = _numbers(a)
    difference = sympy.expand(left - right)
    if not difference.is_number:
        raise _NoForm
    return _constant(a.shape, bool(difference != 0), True)


def _and(a: _Arguments) -> Form:
    left, right = _pair(a)
    if not left.is_bool or not right.is_bool:
        raise _NoForm
    if left.holds is None or right.holds is None:
        return Form(a.shape, holds=None, is_bool=True)
    return Form(a.shape, holds=left.holds | right.holds, is_bool=True)


def _or(a: _Arguments) -> Form:
    left, right = _pair(a)
    if not left.is_bool or not right.is_bool:
        raise _NoForm
    if left.holds == frozenset() or right.holds is None:
        return left
    if right.holds == frozenset() or left.holds is None:
        return right
    raise _NoForm


def _not(a: _Arguments) -> Form:
    form = a["self"]
    if not form.is_bool or (form.holds and len(form.holds) > 1):
        raise _NoForm
    if not form.holds:
        return Form(a.shape, holds=frozenset() if form.holds is None else None, is_bool=True)
    (expression,) = form.holds
    return Form(a.shape, holds=frozenset([sympy.expand(-expression - 1)]), is_bool=True)


def _triangle(sign: int) -> Callable[[_Arguments], Form]:
    def rule(a: _Arguments) -> Form:
        form, ndim = a["self"], len(a.shape)
        if not form.is_bool:
            raise _NoForm
        if form.holds is None:
            return Form(a.shape, holds=None, is_bool=True)
        kept = sign * (index(ndim - 2) - index(ndim - 1) + a["diagonal"])
        return Form(a.shape, holds=form.holds | {kept}, is_bool=True)

    return rule


def _cumsum(a: _Arguments) -> Form:
    """Of a constant."""
    form = a["self"]
    if form.is_bool:
        if form.holds:
            raise _NoForm
        each = sympy.Integer(0 if form.holds is None else 1)
    elif form.whole is not None and form.whole.is_number:
        each = form.whole
    else:
        raise _NoForm
    return Form(a.shape, ((0, each * (index(wrap(a["dim"], len(a.shape))) + 1)),))


def _cast(a: _Arguments) -> Form:
    form = a["self"]
    if form.is_bool == a.is_bool:
        return form  # type: ignore[no-any-return]
    if form.is_bool and not form.holds:
        return _constant(a.shape, form.holds is not None, False)
    if form.whole is not None and form.whole.is_number:
        return _constant(a.shape, int(form.whole) != 0, True)
    raise _NoForm


def _same(a: _Arguments) -> Form:
    return a["self"]  # type: ignore[no-any-return]


_TABLE: tuple[tuple[str, Callable[[_Arguments], Form]], ...] = (
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
    ("clone.default contiguous.default alias.default detach.default lift_fresh_copy.default", _same),
)
_RULES: dict[object, Callable[[_Arguments], Form]] = {op: rule for names, rule in _TABLE for op in overloads(names)}
