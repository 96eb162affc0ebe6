"""Pointwise ops, masks and positions."""

from __future__ import annotations

from cp_compile.testing.programs import Dim
from cp_compile.testing.writer import (
    Step,
    Writer,
    broadcast,
    named,
)

__all__ = ["STEPS"]


_UNARY = (
    "{a} * 1.5", "torch.tanh({a})", "{a} + 0.5", "-{a}", "torch.sigmoid({a})", "F.gelu({a})", "F.relu({a})",
    "{a}.sin()", "torch.tanh({a}).exp()", "({a}.abs() + 0.1).log()", "{a}.clone()", "1 / ({a}.abs() + 1)",
    "{a}.contiguous()", "({a}.square() + 0.1).sqrt()", "{a}.clamp(-0.7, 0.9)", "{a}.detach()",
)  # fmt: skip
_BINARY = ("{a} + {b}", "{a} * torch.tanh({b})", "{a} - {b}", "torch.maximum({a}, {b})", "{a} / ({b}.abs() + 1)")


def _unary(b: Writer) -> None:
    if a := b.pick():
        b.add(b.choice(_UNARY).format(a=a.name), a.dims)


def _binary(b: Writer) -> None:
    a = b.pick()
    other = a and b.pick(lambda value: broadcast(a, value) is not None)
    if a and other:
        b.add(b.choice(_BINARY).format(a=a.name, b=other.name), broadcast(a, other) or ())


def _where(b: Writer) -> None:
    a = b.pick()
    mask = a and b.pick(lambda value: broadcast(a, value) is not None, "bool")
    if a and mask:
        text = b.choice(("{a}.masked_fill({m}, 0.5)", "torch.where({m}, {a}, -{a})", "{a} * {m}"))
        b.add(text.format(a=a.name, m=mask.name), broadcast(a, mask) or ())


def _compare(b: Writer) -> None:
    if a := b.pick():
        b.add(f"{a.name} > 0.1", a.dims, "bool")


def _positions(b: Writer) -> None:
    length = b.length
    text, dims, kind = b.choice(
        (
            ("torch.arange(S).double() / 4", [length], "float"),
            ("torch.arange(S) % 2 == 0", [length], "bool"),
            ("torch.arange(S)[:, None] >= torch.arange(S)", [length, length], "bool"),
            ("torch.ones(S, S, dtype=torch.float64).tril()", [length, length], "float"),
            ("keep[:, :, None]", [b.batch, length, Dim.of(1)], "bool"),
            ("(torch.arange(S)[:, None] - torch.arange(S)).abs() / 8.0 + ids[:, :, None].double()",
             [b.batch, length, length], "float"),
        )
    )  # fmt: skip
    b.add(text, dims, kind)


STEPS: dict[str, Step] = named(_unary, _binary, _where, _compare, _positions)
