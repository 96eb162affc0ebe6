"""Views, pieces and joins."""

from __future__ import annotations

import math

from cp_compile.testing.programs import Dim, Value
from cp_compile.testing.writer import (
    Step,
    Writer,
    bracketed,
    is_literal,
    named,
    plus,
    replaced,
    text_of,
    times,
)

__all__ = ["STEPS"]


def _transpose(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        i, j = b.integer(0, a.ndim - 1), b.integer(0, a.ndim - 1)
        dims = list(a.dims)
        dims[i], dims[j] = dims[j], dims[i]
        b.add(f"{a.name}.transpose({i}, {j})", dims)


def _permute(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        order = b.order(a.ndim)
        b.add(f"{a.name}.permute({', '.join(map(str, order))})", [a.dims[d] for d in order])


def _unsqueeze(b: Writer) -> None:
    if a := b.pick():
        dim = b.integer(0, a.ndim)
        b.add(f"{a.name}.unsqueeze({dim})", [*a.dims[:dim], Dim.of(1), *a.dims[dim:]])


def _squeeze(b: Writer) -> None:
    if a := b.pick(lambda value: any(dim.text == "1" for dim in value.dims)):
        dim = b.choice([d for d, size in enumerate(a.dims) if size.text == "1"])
        b.add(f"{a.name}.squeeze({dim})", replaced(a.dims, dim))


def _flatten(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        start = b.integer(0, a.ndim - 2)
        end = b.integer(start + 1, a.ndim - 1)
        parts = a.dims[start : end + 1]
        size = math.prod(dim.size for dim in parts)
        text = str(size) if all(map(is_literal, parts)) else " * ".join(map(bracketed, parts))
        dims = [*a.dims[:start], Dim(text, size, parts), *a.dims[end + 1 :]]
        how = f".flatten({start}, {end})" if b.flag() else f".reshape({text_of(dims)})"
        b.add(f"{a.name}{how}", dims)


def _unflatten(b: Writer) -> None:
    """A dim in two, or into what it was made of."""
    if a := b.pick(lambda value: any(map(_splits, value.dims))):
        dim = b.choice([d for d, size in enumerate(a.dims) if _splits(size)])
        parts = b.choice(_splits(a.dims[dim]))
        dims = replaced(a.dims, dim, *parts)
        how = f".unflatten({dim}, ({text_of(parts)}))" if b.flag() else f".reshape({text_of(dims)})"
        b.add(f"{a.name}{how}", dims)


def _splits(dim: Dim) -> list[list[Dim]]:
    """What a dim can be taken apart into."""
    if dim.parts:
        return [list(dim.parts)]
    if not is_literal(dim):
        return []
    return [[Dim.of(n), Dim.of(dim.size // n)] for n in (2, 4, 3) if dim.size % n == 0 and dim.size > n]


def _expand(b: Writer) -> None:
    if a := b.pick(lambda value: any(dim.text == "1" for dim in value.dims)):
        dim = b.choice([d for d, size in enumerate(a.dims) if size.text == "1"])
        new = b.choice((Dim.of(2), Dim.of(4), b.length))
        dims = replaced(a.dims, dim, new)
        b.add(f"{a.name}.expand({text_of(dims)})", dims)


def _repeat(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        twice = times(a.dims[dim], 2)
        if b.flag():
            b.add(f"{a.name}.repeat_interleave(2, {dim})", replaced(a.dims, dim, twice))
        else:
            counts = ", ".join("2" if d == dim else "1" for d in range(a.ndim))
            b.add(f"{a.name}.repeat({counts})", replaced(a.dims, dim, twice))


def _index(a: Value, dim: int, text: str) -> str:
    return f"{a.name}[{':, ' * dim}{text}]"


def _slice(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        size = a.dims[dim]
        options = [("1:", plus(size, -1)), (":-1", plus(size, -1)), (":1", Dim.of(1)), ("-1:", Dim.of(1))]
        if is_literal(size):
            options.append(("::2", Dim.of((size.size + 1) // 2)))
        else:
            options.append(("::2", Dim(f"({size.text} + 1) // 2", (size.size + 1) // 2)))
        if size.size > 2:
            options.append(("1:-1", plus(size, -2)))
        text, new = b.choice(options)
        if new.size >= 1:
            b.add(_index(a, dim, text), replaced(a.dims, dim, new))


def _select(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        b.add(_index(a, dim, b.choice(("0", "-1"))), replaced(a.dims, dim))


def _chunk(b: Writer) -> None:
    """One of two halves, of a dim that does not vary."""
    if a := b.pick(lambda value: any(is_literal(dim) and dim.size % 2 == 0 for dim in value.dims)):
        dim = b.choice([d for d, size in enumerate(a.dims) if is_literal(size) and size.size % 2 == 0])
        half = Dim.of(a.dims[dim].size // 2)
        b.add(f"{a.name}.chunk(2, {dim})[{b.integer(0, 1)}]", replaced(a.dims, dim, half))


def _cat(b: Writer) -> None:
    a = b.pick(lambda value: value.ndim >= 1)
    if not a:
        return
    dim = b.dim(a)
    rest = lambda value: replaced(value.dims, dim) if value.ndim == a.ndim else None
    other = b.pick(lambda value: rest(value) == rest(a))
    if not other:
        return
    x, y = a.dims[dim], other.dims[dim]
    size = x.size + y.size
    joined = Dim.of(size) if is_literal(x) and is_literal(y) else Dim(f"{x.text} + {y.text}", size)
    b.add(f"torch.cat([{a.name}, {other.name}], {dim})", replaced(a.dims, dim, joined))


def _stack(b: Writer) -> None:
    a = b.pick()
    other = a and b.pick(lambda value: value.dims == a.dims)
    if a and other:
        dim = b.integer(0, a.ndim)
        b.add(f"torch.stack([{a.name}, {other.name}], {dim})", [*a.dims[:dim], Dim.of(2), *a.dims[dim:]])


def _shift(b: Writer) -> None:
    """A pad, a flip, a roll, or a token shift."""
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        zeros = "0, 0, " * (a.ndim - 1 - dim)
        text, new = b.choice(
            (
                (f"{a.name}.flip({dim})", a.dims[dim]),
                (f"{a.name}.roll(1, {dim})", a.dims[dim]),
                (f"F.pad({a.name}, ({zeros}1, -1))", a.dims[dim]),
                (f"F.pad({a.name}, ({zeros}1, 0))", plus(a.dims[dim], 1)),
            )
        )
        b.add(text, replaced(a.dims, dim, new))


STEPS: dict[str, Step] = named(
    _transpose,
    _permute,
    _unsqueeze,
    _squeeze,
    _flatten,
    _unflatten,
    _expand,
    _repeat,
    _slice,
    _select,
    _chunk,
    _cat,
    _stack,
    _shift,
)
