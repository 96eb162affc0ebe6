"""Hypothesis strategies: random small programs over the rule table. Needs ``hypothesis``.

A program starts at an embedding of token ids and adds a line at a time, each an op on what stands above it that fits by
shape and dtype: pointwise ops and broadcasting, views, pieces and joins, reductions, products, norms, lookups, attention
(one op, or written by hand), depthwise convolutions, checkpointed regions, losses, tied parameters. Sizes are written by
name where they may vary. Values stay of moderate size, so that errors of 1e-8 mean something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from cp_compile.testing.programs import Dim, Line, Program, Value, needed

__all__ = ["programs"]

_MOST_ELEMENTS, _MOST_DIMS = 3000, 5
_TOKENS, _WIDTH = 7, 8


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    max_lines: int = 7,
    dynamic: bool | None = None,
    cp_sizes: Sequence[int] = (2, 3, 4),
    steps: Sequence[str] | None = None,
) -> Program:
    """Programs that are well-typed, and run on whole tensors.

    Args:
        draw: hypothesis's.
        max_lines: steps at most; a step may write a few lines.
        dynamic: whether sizes are symbols; ``None``: either.
        cp_sizes: numbers of ranks.
        steps: which steps, by their names in ``STEPS``; ``None``: all.

    Returns:
        ``Program``: print it, or build it and call ``cp_compile.verify(*program.build(), **program.options)``.
    """
    builder = _Builder(draw)
    chosen = [STEPS[name] for name in steps or STEPS]
    for _ in range(draw(st.integers(1, max_lines))):
        draw(st.sampled_from(chosen))(builder)
    candidates = [value for value in builder.values[1:] if value.name not in _ARGUMENTS]
    returned = [candidates[-1]]
    for _ in range(draw(st.integers(0, 2))):
        returned.append(draw(st.sampled_from(candidates)))
    names = tuple(dict.fromkeys(value.name for value in returned))
    if not any("self.table" in line.uses for line in needed(builder.lines, names)):
        # Something of the sequence, at least.
        names = (*names, "v0")
    is_dynamic = draw(st.booleans()) if dynamic is None else dynamic
    options = {
        "cp_size": draw(st.sampled_from(list(cp_sizes))),
        "sequence": ("ids", 1),
        "outputs": draw(st.sampled_from(["gathered", "local", "shard"])),
    }
    return Program(tuple(builder.lines), names, builder.parameters, builder.arguments, is_dynamic, options)


_ARGUMENTS = ("ids", "keep", "labels")


class _Builder:
    """A program being written."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.batch = Dim("B", draw(st.sampled_from([2, 1, 3])))
        self.length = Dim("S", draw(st.sampled_from([5, 4, 6, 3, 8, 2, 1])))
        rows = (self.batch, self.length)
        shape = f"({self.batch.size}, {self.length.size})"
        self.parameters: dict[str, tuple[int, ...]] = {"table": (_TOKENS, _WIDTH)}
        self.arguments = {
            "ids": f"torch.randint({_TOKENS}, {shape}, generator=generator)",
            "keep": f"torch.rand({shape}, generator=generator) > 0.3",
            "labels": f"torch.randint(-1, {_TOKENS}, {shape}, generator=generator)",
        }
        self.lines: list[Line] = []
        self.values: list[Value] = [Value("ids", rows, "int", _TOKENS), Value("keep", rows, "bool")]
        self.add("F.embedding(ids, self.table)", (*rows, Dim.of(_WIDTH)))

    # -- what is drawn

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choice(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def pick(self, fits: Callable[[Value], bool] = lambda value: True, kind: str = "float") -> Value | None:
        """One of the values of a kind that fits, the latest first."""
        found = [value for value in reversed(self.values) if value.kind == kind and fits(value)]
        return self.draw(st.sampled_from(found)) if found else None

    def dim(self, value: Value) -> int:
        """A dim, the sequence's place first."""
        dims = sorted(range(value.ndim), key=lambda d: d != 1)
        return int(self.choice(dims))

    # -- what is written

    def add(self, text: str, dims: Sequence[Dim], kind: str = "float", high: int = 0) -> Value | None:
        """A line that makes a value; none if that would be too large."""
        elements = 1
        for dim in dims:
            elements *= dim.size
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


Step = Callable[[_Builder], Any]


def _text(dims: Sequence[Dim]) -> str:
    return ", ".join(dim.text for dim in dims)


def _with(dims: Sequence[Dim], dim: int, *new: Dim) -> list[Dim]:
    return [*dims[:dim], *new, *dims[dim + 1 :]]


def _literal(dim: Dim) -> bool:
    return dim.text.isdigit()


# -- pointwise ------------------------------------------------------------------------------------------------------

_UNARY = (
    "{a} * 1.5", "torch.tanh({a})", "{a} + 0.5", "-{a}", "torch.sigmoid({a})", "F.gelu({a})", "F.relu({a})", "{a}.sin()",
    "torch.tanh({a}).exp()", "({a}.abs() + 0.1).log()", "{a}.clone()", "1 / ({a}.abs() + 1)", "{a}.contiguous()",
    "({a}.square() + 0.1).sqrt()", "{a}.clamp(-0.7, 0.9)", "{a}.detach()",
)  # fmt: skip
_BINARY = ("{a} + {b}", "{a} * torch.tanh({b})", "{a} - {b}", "torch.maximum({a}, {b})", "{a} / ({b}.abs() + 1)")


def _unary(b: _Builder) -> None:
    if a := b.pick():
        b.add(b.choice(_UNARY).format(a=a.name), a.dims)


def _broadcast(a: Value, b: Value) -> list[Dim] | None:
    """The shape that two broadcast to, if they do."""
    dims: list[Dim] = []
    for i in range(1, max(a.ndim, b.ndim) + 1):
        x = a.dims[-i] if i <= a.ndim else Dim.of(1)
        y = b.dims[-i] if i <= b.ndim else Dim.of(1)
        if x != y and "1" not in (x.text, y.text):
            return None
        dims.insert(0, y if x.text == "1" else x)
    return dims


def _binary(b: _Builder) -> None:
    a = b.pick()
    other = a and b.pick(lambda value: _broadcast(a, value) is not None)
    if a and other:
        b.add(b.choice(_BINARY).format(a=a.name, b=other.name), _broadcast(a, other) or ())


def _where(b: _Builder) -> None:
    a = b.pick()
    mask = a and b.pick(lambda value: _broadcast(a, value) is not None, "bool")
    if a and mask:
        text = b.choice(("{a}.masked_fill({m}, 0.5)", "torch.where({m}, {a}, -{a})", "{a} * {m}"))
        b.add(text.format(a=a.name, m=mask.name), _broadcast(a, mask) or ())


def _compare(b: _Builder) -> None:
    if a := b.pick():
        b.add(f"{a.name} > 0.1", a.dims, "bool")


def _positions(b: _Builder) -> None:
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


# -- views ----------------------------------------------------------------------------------------------------------


def _transpose(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        i, j = b.integer(0, a.ndim - 1), b.integer(0, a.ndim - 1)
        dims = list(a.dims)
        dims[i], dims[j] = dims[j], dims[i]
        b.add(f"{a.name}.transpose({i}, {j})", dims)


def _permute(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        order = b.draw(st.permutations(range(a.ndim)))
        b.add(f"{a.name}.permute({', '.join(map(str, order))})", [a.dims[d] for d in order])


def _unsqueeze(b: _Builder) -> None:
    if a := b.pick():
        dim = b.integer(0, a.ndim)
        b.add(f"{a.name}.unsqueeze({dim})", [*a.dims[:dim], Dim.of(1), *a.dims[dim:]])


def _squeeze(b: _Builder) -> None:
    if a := b.pick(lambda value: any(dim.text == "1" for dim in value.dims)):
        dim = b.choice([d for d, size in enumerate(a.dims) if size.text == "1"])
        b.add(f"{a.name}.squeeze({dim})", _with(a.dims, dim))


def _flatten(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        start = b.integer(0, a.ndim - 2)
        end = b.integer(start + 1, a.ndim - 1)
        size = 1
        for dim in a.dims[start : end + 1]:
            size *= dim.size
        text = " * ".join(_bracketed(dim) for dim in a.dims[start : end + 1])
        merged = Dim(text, size) if not all(map(_literal, a.dims[start : end + 1])) else Dim.of(size)
        dims = [*a.dims[:start], merged, *a.dims[end + 1 :]]
        how = f".flatten({start}, {end})" if b.flag() else f".reshape({_text(dims)})"
        b.add(f"{a.name}{how}", dims)


def _bracketed(dim: Dim) -> str:
    return dim.text if re.fullmatch(r"\w+", dim.text) else f"({dim.text})"


def _unflatten(b: _Builder) -> None:
    """A literal dim in two, or a product of two names as it was."""
    if a := b.pick(lambda value: any(map(_splits, value.dims))):
        dim = b.choice([d for d, size in enumerate(a.dims) if _splits(size)])
        parts = b.choice(_splits(a.dims[dim]))
        dims = _with(a.dims, dim, *parts)
        how = f".unflatten({dim}, ({_text(parts)}))" if b.flag() else f".reshape({_text(dims)})"
        b.add(f"{a.name}{how}", dims)


def _splits(dim: Dim) -> list[list[Dim]]:
    if _literal(dim):
        return [[Dim.of(n), Dim.of(dim.size // n)] for n in (2, 4, 3) if dim.size % n == 0 and dim.size > n]
    sizes = {"B * S": ("B", "S"), "S * B": ("S", "B")}
    if dim.text not in sizes:
        return []
    # The sizes of the names are not known here; a program with such a dim has one of each.
    return []


def _expand(b: _Builder) -> None:
    if a := b.pick(lambda value: any(dim.text == "1" for dim in value.dims)):
        dim = b.choice([d for d, size in enumerate(a.dims) if size.text == "1"])
        new = b.choice((Dim.of(2), Dim.of(4), b.length))
        dims = _with(a.dims, dim, new)
        b.add(f"{a.name}.expand({_text(dims)})", dims)


def _repeat(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        twice = _times(a.dims[dim], 2)
        if b.flag():
            b.add(f"{a.name}.repeat_interleave(2, {dim})", _with(a.dims, dim, twice))
        else:
            counts = ", ".join("2" if d == dim else "1" for d in range(a.ndim))
            b.add(f"{a.name}.repeat({counts})", _with(a.dims, dim, twice))


def _times(dim: Dim, count: int) -> Dim:
    return Dim.of(dim.size * count) if _literal(dim) else Dim(f"{count} * {_bracketed(dim)}", dim.size * count)


def _plus(dim: Dim, count: int) -> Dim:
    if _literal(dim):
        return Dim.of(dim.size + count)
    return Dim(f"{dim.text} {'+' if count > 0 else '-'} {abs(count)}", dim.size + count)


# -- pieces, joins, and ops along a dim -----------------------------------------------------------------------------


def _index(a: Value, dim: int, text: str) -> str:
    return f"{a.name}[{':, ' * dim}{text}]"


def _slice(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        size = a.dims[dim]
        options = [("1:", _plus(size, -1)), (":-1", _plus(size, -1)), (":1", Dim.of(1)), ("-1:", Dim.of(1))]
        if _literal(size):
            options.append(("::2", Dim.of((size.size + 1) // 2)))
        else:
            options.append(("::2", Dim(f"({size.text} + 1) // 2", (size.size + 1) // 2)))
        if size.size > 2:
            options.append(("1:-1", _plus(size, -2)))
        text, new = b.choice(options)
        if new.size >= 1:
            b.add(_index(a, dim, text), _with(a.dims, dim, new))


def _select(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        b.add(_index(a, dim, b.choice(("0", "-1"))), _with(a.dims, dim))


def _chunk(b: _Builder) -> None:
    """One of two halves, of a dim that does not vary."""
    if a := b.pick(lambda value: any(_literal(dim) and dim.size % 2 == 0 for dim in value.dims)):
        dim = b.choice([d for d, size in enumerate(a.dims) if _literal(size) and size.size % 2 == 0])
        half = Dim.of(a.dims[dim].size // 2)
        b.add(f"{a.name}.chunk(2, {dim})[{b.integer(0, 1)}]", _with(a.dims, dim, half))


def _cat(b: _Builder) -> None:
    a = b.pick(lambda value: value.ndim >= 1)
    if not a:
        return
    dim = b.dim(a)
    rest = lambda value: _with(value.dims, dim) if value.ndim == a.ndim else None
    other = b.pick(lambda value: rest(value) == rest(a))
    if not other:
        return
    x, y = a.dims[dim], other.dims[dim]
    size = x.size + y.size
    joined = Dim.of(size) if _literal(x) and _literal(y) else Dim(f"{x.text} + {y.text}", size)
    b.add(f"torch.cat([{a.name}, {other.name}], {dim})", _with(a.dims, dim, joined))


def _stack(b: _Builder) -> None:
    a = b.pick()
    other = a and b.pick(lambda value: value.dims == a.dims)
    if a and other:
        dim = b.integer(0, a.ndim)
        b.add(f"torch.stack([{a.name}, {other.name}], {dim})", [*a.dims[:dim], Dim.of(2), *a.dims[dim:]])


def _shift(b: _Builder) -> None:
    """A pad, a flip, a roll, or a token shift."""
    if a := b.pick(lambda value: value.ndim >= 1):
        dim = b.dim(a)
        zeros = "0, 0, " * (a.ndim - 1 - dim)
        text, new = b.choice(
            (
                (f"{a.name}.flip({dim})", a.dims[dim]),
                (f"{a.name}.roll(1, {dim})", a.dims[dim]),
                (f"F.pad({a.name}, ({zeros}1, -1))", a.dims[dim]),
                (f"F.pad({a.name}, ({zeros}1, 0))", _plus(a.dims[dim], 1)),
            )
        )
        b.add(text, _with(a.dims, dim, new))


def _scan(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        text = b.choice(
            ("{a}.cumsum({d}) / 4", "{a}.softmax({d})", "{a}.log_softmax({d})", "torch.tanh({a}).cumprod({d})",
             "{a}.sort({d}).values", "{a}.logcumsumexp({d})", "{a}.cummax({d}).values")
        )  # fmt: skip
        b.add(text.format(a=a.name, d=b.dim(a)), a.dims)


def _triangle(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        b.add(f"{a.name}.{b.choice(('tril', 'triu'))}({b.integer(-1, 1)})", a.dims)


# -- reductions -----------------------------------------------------------------------------------------------------


def _reduce(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1):
        dim, keep = b.dim(a), b.flag()
        names = ("sum", "mean", "amax", "amin", "logsumexp")
        text = f"{a.name}.{b.choice(names)}({dim}, keepdim={keep})"
        b.add(text, _with(a.dims, dim, Dim.of(1)) if keep else _with(a.dims, dim))


def _reduce_two(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 2):
        i = b.integer(0, a.ndim - 2)
        j = b.integer(i + 1, a.ndim - 1)
        kept = [dim for d, dim in enumerate(a.dims) if d not in (i, j)]
        b.add(f"{a.name}.{b.choice(('sum', 'mean', 'amax'))}(({i}, {j}))", kept)


def _reduce_all(b: _Builder) -> None:
    if a := b.pick():
        b.add(f"{a.name}.{b.choice(('mean', 'sum', 'max'))}()", ())


def _logical(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1, "bool"):
        dim = b.dim(a)
        b.add(f"{a.name}.{b.choice(('any', 'all'))}({dim})", _with(a.dims, dim), "bool")


def _norm(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1 and _literal(value.dims[-1]) and value.sizes[-1] > 1):
        width = a.sizes[-1]
        weight = b.parameter(width)
        text = b.choice(("F.layer_norm({a}, ({n},), {w})", "F.rms_norm({a}, ({n},), {w})"))
        b.add(text.format(a=a.name, n=width, w=weight), a.dims)


# -- products and lookups -------------------------------------------------------------------------------------------


def _linear(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1 and _literal(value.dims[-1])):
        out = int(b.choice((_WIDTH, 4, 3)))
        weight = b.parameter(out, a.sizes[-1])
        b.add(f"F.linear({a.name}, {weight})", [*a.dims[:-1], Dim.of(out)])


def _tied_head(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 2 and value.dims[-1] == Dim.of(_WIDTH)):
        b.add(f"F.linear({a.name}, self.table)", [*a.dims[:-1], Dim.of(_TOKENS)])


def _matmul(b: _Builder) -> None:
    """``a @ c.mT``, ``a.mT @ c`` and ``a @ c`` of two that share a batch."""
    a = b.pick(lambda value: value.ndim >= 2)
    if not a:
        return
    batch = a.dims[:-2]
    rows, columns = a.dims[-2:]
    found = []
    for value in b.values:
        if value.kind == "float" and value.ndim >= 2 and value.dims[:-2] == batch:
            if value.dims[-1] == columns:
                found.append((f"{a.name} @ {value.name}.mT / 4", [*batch, rows, value.dims[-2]]))
            if value.dims[-2] == rows:
                found.append((f"{a.name}.mT @ {value.name} / 4", [*batch, columns, value.dims[-1]]))
            if value.dims[-2] == columns:
                found.append((f"{a.name} @ {value.name} / 4", [*batch, rows, value.dims[-1]]))
    if found:
        b.add(*b.choice(found))


def _einsum(b: _Builder) -> None:
    a = b.pick(lambda value: value.ndim == 3)
    other = a and b.pick(lambda value: value.dims[:2] == a.dims[:2] and value.ndim == 3)
    if not a or not other:
        return
    batch, rows, x, y = *a.dims, other.dims[-1]
    term, dims = b.choice((("bsd,bse->bde", [batch, x, y]), ("bsd,bse->bsde", [batch, rows, x, y]), ("bsd,bse->sd", [rows, x])))
    b.add(f"torch.einsum({term!r}, {a.name}, {other.name}) / 4", dims)


def _embedding(b: _Builder) -> None:
    if a := b.pick(lambda value: 0 < value.high <= _TOKENS, "int"):
        b.add(f"F.embedding({a.name}, self.table)", [*a.dims, Dim.of(_WIDTH)])


def _argmax(b: _Builder) -> None:
    if a := b.pick(lambda value: value.ndim >= 1 and _literal(value.dims[-1]) and value.sizes[-1] <= _TOKENS):
        b.add(f"{a.name}.argmax(-1)", a.dims[:-1], "int", a.sizes[-1])


def _gather(b: _Builder) -> None:
    """What the token ids, or other numbers, pick from the last dim; or one position a row."""
    if a := b.pick(lambda value: value.ndim == 3 and value.dims[:2] == (b.batch, b.length) and value.sizes[-1] >= _TOKENS):
        text, dims = b.choice(
            (
                ("{a}.gather(-1, ids[:, :, None])", [*a.dims[:2], Dim.of(1)]),
                ("{a}[torch.arange(B), ids[:, 0].clamp(max=S - 1)]", [a.dims[0], a.dims[2]]),
                ("{a}.index_select(1, torch.arange(S).flip(0))", a.dims),
                ("F.one_hot(ids, {n}).double() * {a}", a.dims),
                ("{a}.scatter(-1, ids[:, :, None], 0.5)", a.dims),
            )
        )
        b.add(text.format(a=a.name, n=a.sizes[-1]), dims)


# -- blocks ---------------------------------------------------------------------------------------------------------


def _hidden(value: Value) -> bool:
    return value.ndim == 3 and _literal(value.dims[-1]) and value.sizes[-1] % 4 == 0


def _attention(b: _Builder) -> None:
    a = b.pick(_hidden)
    if not a:
        return
    batch, rows, width = a.dims
    heads = int(b.choice((4, 2)))
    kv_heads = int(b.choice([heads, heads // 2]))
    each = width.size // heads
    names = [f"{x}{len(b.lines)}" for x in "qkv"]
    for name, count in zip(names, (heads, kv_heads, kv_heads)):
        weight = b.parameter(count * each, width.size)
        split = f".view({batch.text}, {rows.text}, {count}, {each})" if a.name == "v0" else f".unflatten(-1, ({count}, {each}))"
        b.line(name, f"{name} = F.linear({a.name}, {weight}){split}.transpose(1, 2) * 2")
    q, k, v = names
    same = heads == kv_heads
    options = ["F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True{gqa})", "F.scaled_dot_product_attention({q}, {k}, {v}{gqa})"]
    if (batch, rows) == (b.batch, b.length):
        options.append("F.scaled_dot_product_attention({q}, {k}, {v}, keep[:, None, None] | torch.eye(S, dtype=torch.bool){gqa})")
    mask = b.pick(lambda value: value.ndim >= 2 and _broadcasts_to(value, (batch, Dim.of(heads), rows, rows)))
    if mask:
        options.append("F.scaled_dot_product_attention({q}, {k}, {v}, {m}{gqa})")
    repeat = "" if same else f".repeat_interleave({heads // kv_heads}, 1)"
    options += [
        "({q} @ {k}{repeat}.mT).softmax(-1) @ {v}{repeat}",
        "({q} @ {k}{repeat}.mT).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9).softmax(-1) @ {v}{repeat}"
        if rows == b.length
        else "({q} @ {k}{repeat}.mT / 3).softmax(-1) @ {v}{repeat}",
    ]
    text = b.choice(options).format(q=q, k=k, v=v, gqa="" if same else ", enable_gqa=True", m=mask and mask.name, repeat=repeat)
    b.add(f"({text}).transpose(1, 2).flatten(2)", a.dims)


def _broadcasts_to(value: Value, dims: Sequence[Dim]) -> bool:
    return value.ndim <= len(dims) and all(
        mine.text == "1" or mine == other for mine, other in zip(value.dims[::-1], tuple(dims)[::-1])
    )


def _convolution(b: _Builder) -> None:
    """A depthwise causal convolution."""
    if a := b.pick(_hidden):
        weight = b.parameter(a.sizes[-1], 1, 3)
        b.add(f"F.conv1d(F.pad({a.name}.mT, (2, 0)), {weight}, groups={a.sizes[-1]}).mT", a.dims)


def _checkpoint(b: _Builder) -> None:
    """A region that is computed again in the backward."""
    if a := b.pick(lambda value: value.ndim >= 1 and _literal(value.dims[-1])):
        weight = b.parameter(a.sizes[-1], a.sizes[-1])
        body = b.choice(
            ("F.gelu(F.linear(x, {w}))", "F.linear(torch.tanh(x), {w}) + x", "(x @ {w}).softmax(-1)", "F.linear(x.cumsum({d}), {w}) / 4")
        )
        inner = body.format(w=weight, d=b.dim(a))
        b.add(f"checkpoint(lambda x: {inner}, {a.name}, use_reentrant=False)", a.dims)


def _loss(b: _Builder) -> None:
    rows = (b.batch, b.length)
    if a := b.pick(lambda value: value.ndim == 3 and value.dims[:2] == rows and _literal(value.dims[-1]) and value.sizes[-1] >= _TOKENS):
        options = [
            "F.cross_entropy({a}.flatten(0, 1), labels.flatten(), ignore_index=-1)",
            "F.cross_entropy({a}.mT, labels, ignore_index=-1, reduction='sum')",
            "F.mse_loss({a}, {a}.flip(1))",
            "(F.cross_entropy({a}.mT, labels, ignore_index=-1, reduction='none') * keep).sum() / keep.sum().clamp(min=1)",
        ]
        if b.length.size > 1:
            options += [
                "F.cross_entropy({a}[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)",
                "F.cross_entropy({a}.flatten(0, 1), F.pad(labels, (0, 1), value=-1)[:, 1:].flatten(), ignore_index=-1)",
            ]
        b.add(b.choice(options).format(a=a.name), ())


STEPS: dict[str, Step] = {
    step.__name__.removeprefix("_"): step
    for step in (
        _unary, _binary, _where, _compare, _positions, _transpose, _permute, _unsqueeze, _squeeze, _flatten, _unflatten,
        _expand, _repeat, _slice, _select, _chunk, _cat, _stack, _shift, _scan, _triangle, _reduce, _reduce_two, _reduce_all,
        _logical, _norm, _linear, _tied_head, _matmul, _einsum, _embedding, _argmax, _gather, _attention, _convolution,
        _checkpoint, _loss,
    )
}  # fmt: skip
"""What a program may do, by name."""
