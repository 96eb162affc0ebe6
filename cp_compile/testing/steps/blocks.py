"""Products, lookups, attention, checkpointed regions and losses."""

from __future__ import annotations

from collections.abc import Sequence

from cp_compile.testing.programs import Dim, Value
from cp_compile.testing.writer import (
    TOKENS,
    WIDTH,
    Step,
    Writer,
    is_literal,
    named,
)

__all__ = ["STEPS"]


def _linear(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1 and is_literal(value.dims[-1])):
        out = int(b.choice((WIDTH, 4, 3)))
        weight = b.parameter(out, a.sizes[-1])
        b.add(f"F.linear({a.name}, {weight})", [*a.dims[:-1], Dim.of(out)])


def _tied_head(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 2 and value.dims[-1] == Dim.of(WIDTH)):
        b.add(f"F.linear({a.name}, self.table)", [*a.dims[:-1], Dim.of(TOKENS)])


def _matmul(b: Writer) -> None:
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


def _einsum(b: Writer) -> None:
    a = b.pick(lambda value: value.ndim == 3)
    other = a and b.pick(lambda value: value.dims[:2] == a.dims[:2] and value.ndim == 3)
    if not a or not other:
        return
    batch, rows, x, y = *a.dims, other.dims[-1]
    term, dims = b.choice(
        (("bsd,bse->bde", [batch, x, y]), ("bsd,bse->bsde", [batch, rows, x, y]), ("bsd,bse->sd", [rows, x]))
    )
    b.add(f"torch.einsum({term!r}, {a.name}, {other.name}) / 4", dims)


def _embedding(b: Writer) -> None:
    if a := b.pick(lambda value: 0 < value.high <= TOKENS, "int"):
        b.add(f"F.embedding({a.name}, self.table)", [*a.dims, Dim.of(WIDTH)])


def _argmax(b: Writer) -> None:
    if a := b.pick(lambda value: value.ndim >= 1 and is_literal(value.dims[-1]) and value.sizes[-1] <= TOKENS):
        b.add(f"{a.name}.argmax(-1)", a.dims[:-1], "int", a.sizes[-1])


def _gather(b: Writer) -> None:
    """What the token ids, or other numbers, pick from the last dim; or one position a row."""
    if a := b.pick(
        lambda value: value.ndim == 3 and value.dims[:2] == (b.batch, b.length) and value.sizes[-1] >= TOKENS
    ):
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


def _hidden(value: Value) -> bool:
    return value.ndim == 3 and is_literal(value.dims[-1]) and value.sizes[-1] % 4 == 0


def _attention(b: Writer) -> None:
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
        split = (
            f".view({batch.text}, {rows.text}, {count}, {each})"
            if a.name == "v0"
            else f".unflatten(-1, ({count}, {each}))"
        )
        b.line(name, f"{name} = F.linear({a.name}, {weight}){split}.transpose(1, 2) * 2")
    q, k, v = names
    same = heads == kv_heads
    options = [
        "F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True{gqa})",
        "F.scaled_dot_product_attention({q}, {k}, {v}{gqa})",
    ]
    if (batch, rows) == (b.batch, b.length):
        options.append(
            "F.scaled_dot_product_attention({q}, {k}, {v}, keep[:, None, None] | torch.eye(S, dtype=torch.bool){gqa})"
        )
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
    text = b.choice(options).format(
        q=q, k=k, v=v, gqa="" if same else ", enable_gqa=True", m=mask and mask.name, repeat=repeat
    )
    b.add(f"({text}).transpose(1, 2).flatten(2)", a.dims)


def _broadcasts_to(value: Value, dims: Sequence[Dim]) -> bool:
    return value.ndim <= len(dims) and all(
        mine.text == "1" or mine == other for mine, other in zip(value.dims[::-1], tuple(dims)[::-1])
    )


def _convolution(b: Writer) -> None:
    """A depthwise causal convolution."""
    if a := b.pick(_hidden):
        weight = b.parameter(a.sizes[-1], 1, 3)
        b.add(f"F.conv1d(F.pad({a.name}.mT, (2, 0)), {weight}, groups={a.sizes[-1]}).mT", a.dims)


def _checkpoint(b: Writer) -> None:
    """A region that is computed again in the backward."""
    if a := b.pick(lambda value: value.ndim >= 1 and is_literal(value.dims[-1])):
        weight = b.parameter(a.sizes[-1], a.sizes[-1])
        body = b.choice(
            (
                "F.gelu(F.linear(x, {w}))",
                "F.linear(torch.tanh(x), {w}) + x",
                "(x @ {w}).softmax(-1)",
                "F.linear(x.cumsum({d}), {w}) / 4",
            )
        )
        inner = body.format(w=weight, d=b.dim(a))
        b.add(f"checkpoint(lambda x: {inner}, {a.name}, use_reentrant=False)", a.dims)


def _loss(b: Writer) -> None:
    rows = (b.batch, b.length)
    if a := b.pick(
        lambda value: (
            value.ndim == 3 and value.dims[:2] == rows and is_literal(value.dims[-1]) and value.sizes[-1] >= TOKENS
        )
    ):
        options = [
            "F.cross_entropy({a}.flatten(0, 1), labels.flatten(), ignore_index=-1)",
            "F.cross_entropy({a}.mT, labels, ignore_index=-1, reduction='sum')",
            "F.mse_loss({a}, {a}.flip(1))",
            "(F.cross_entropy({a}.mT, labels, reduction='none', ignore_index=-1) * keep).sum() / (keep.sum() + 1)",
        ]
        if b.length.size > 1:
            options += [
                "F.cross_entropy({a}[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)",
                "F.cross_entropy({a}.flatten(0, 1), F.pad(labels, (0, 1), value=-1)[:, 1:].flatten(), ignore_index=-1)",
            ]
        b.add(b.choice(options).format(a=a.name), ())


STEPS: dict[str, Step] = named(
    _linear,
    _tied_head,
    _matmul,
    _einsum,
    _embedding,
    _argmax,
    _gather,
    _attention,
    _convolution,
    _checkpoint,
    _loss,
)
