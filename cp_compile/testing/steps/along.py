"""Scans and reductions along dims, and norms."""

from __future__ import annotations

from cp_compile.testing.programs import Dim
from cp_compile.testing.writer import (
    Step,
    Writer,
    is_literal,
    named,
    replaced,
)

__all__ = ["STEPS"]


def _scan(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        text = b.choice(
            ("{a}.cumsum({d}) / 4", "{a}.softmax({d})", "{a}.log_softmax({d})", "torch.tanh({a}).cumprod({d})",
             "{a}.sort({d}).values", "{a}.logcumsumexp({d})", "{a}.cummax({d}).values")
        )  # fmt: skip
        b.add(text.format(a=a.name, d=b.dim(a)), a.dims)


def _triangle(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        b.add(f"{a.name}.{b.choice(('tril', 'triu'))}({b.integer(-1, 1)})", a.dims)


def _reduce(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim, keep = b.dim(a), b.flag()
        names = ("sum", "mean", "amax", "amin", "logsumexp")
        text = f"{a.name}.{b.choice(names)}({dim}, keepdim={keep})"
        b.add(text, replaced(a.dims, dim, Dim.of(1)) if keep else replaced(a.dims, dim))


def _reduce_two(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        i = b.integer(0, a.ndim - 2)
        j = b.integer(i + 1, a.ndim - 1)
        kept = [dim for d, dim in enumerate(a.dims) if d not in (i, j)]
        b.add(f"{a.name}.{b.choice(('sum', 'mean', 'amax'))}(({i}, {j}))", kept)


def _reduce_all(b: Writer) -> None:
    if a := b.pick():
        b.add(f"{a.name}.{b.choice(('mean', 'sum', 'max'))}()", ())


def _logical(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1, "bool"):
        dim = b.dim(a)
        b.add(f"{a.name}.{b.choice(('any', 'all'))}({dim})", replaced(a.dims, dim), "bool")


def _norm(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1 and is_literal(value.dims[-1]) and value.sizes[-1] > 1):
        width = a.sizes[-1]
        weight = b.parameter(width)
        text = b.choice(("F.layer_norm({a}, ({n},), {w})", "F.rms_norm({a}, ({n},), {w})"))
        b.add(text.format(a=a.name, n=width, w=weight), a.dims)


STEPS: dict[str, Step] = named(_scan, _triangle, _reduce, _reduce_two, _reduce_all, _logical, _norm)
