"""A program as one page of HTML: the plain graph and that of a rank side by side, by module, to open and to search.

The page needs nothing else: its style and its script are in it. All of its text stands in the markup, so that it reads
without the script; that opens and closes boxes, draws edges, shows what is known of an op, and searches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from cp_compile.show.code import bytes_text, value_text
from cp_compile.show.families import FAMILIES, family
from cp_compile.show.listing import Line, sizes_text
from cp_compile.show.picture import (
    Box,
    Cell,
    Op,
    Picture,
    move_text,
    op_text,
    picture,
    sends_text,
)

__all__ = ["page"]


def page(plain: Sequence[Line], rewritten: Sequence[Line], cp_size: int, title: str) -> str:
    """The page.

    Args:
        plain: the lines of the graph before the rewrite.
        rewritten: those behind it.
        cp_size: ranks that share each sequence.
        title: of the page.
    """
    before, after = picture(plain), picture(rewritten)
    shut = {box.path for each in (before, after) for box in each.boxes if not box.opened}
    left, right = _Side("plain", before, _moves(after), shut), _Side("ranks", after, {}, shut)
    rows = "".join(
        f'<div class="side plain">{left.section(key)}</div><div class="side ranks">{right.section(key)}</div>'
        for key in _merged([box.path for box in before.sections], [box.path for box in after.sections])
    )
    edges = {side.name: [[e.source, e.target, e.move] for e in side.picture.edges] for side in (left, right)}
    text = (files("cp_compile.show") / "assets" / "page.html").read_text("utf-8")
    parts = {
        "title": escape(title),
        "ranks": f"{cp_size} ranks" if cp_size > 1 else "1 rank",
        "style": _colours() + _asset("page.css"),
        "script": _asset("page.js"),
        "legend": _legend(after),
        "rows": rows,
        # in a script "<" may end it, whatever the quotes around it
        "edges": json.dumps(edges).replace("<", "\\u003c"),
    }
    pieces = text.split("@@")  # text, name, text, name, ..., text: what is put in is not looked through again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


@dataclass(frozen=True)
class _Side:
    """One of the two graphs.

    Attributes:
        name: its class in the markup.
        picture: what it shows.
        shut: paths of the boxes that are closed at first.
        ghosts: moves, by the op whose value they move, that have their room here but are not: so rows are level.
    """

    name: str
    picture: Picture
    ghosts: dict[str, tuple[Line, ...]]
    shut: set[str]

    def section(self, key: str) -> str:
        return "".join(self._box(box) for box in self.picture.sections if box.path == key)

    def _box(self, box: Box) -> str:
        cells = "".join(self._cell(cell) for cell in box.cells)
        style = f"--columns:{box.columns}"
        if not box.title:
            return f'<div class="box bare"><div class="cells" style="{style}">{cells}</div></div>'
        name = escape(f"{self.name}:{box.path}")
        inside = {op.line.name for op in box.ops}
        leaving = {edge.move for edge in self.picture.edges if edge.source in inside and edge.target not in inside}
        ports = "".join(_port(line) for op in box.ops for line in op.moves if line.name in leaving)
        kind, opened = "box layer" if box.layers else "box", box.path not in self.shut
        button = f'<button type="button" class="title" aria-expanded="true" aria-controls="{name}">'
        return (
            f'<div class="{kind}" data-box="{escape(box.path)}" data-open="{opened:d}">'
            f'<div class="head"><div class="names">{button}{escape(box.title)}</button>'
            f'<span class="sum">{escape(_sum(box))}</span></div></div>'
            f'<div class="cells" id="{name}" style="{style}">{cells}</div><div class="ports">{ports}</div></div>'
        )

    def _cell(self, cell: Cell) -> str:
        column = "1/-1" if cell.column is None else f"{cell.column + 1}/span 2"
        style = f"grid-row:{cell.row + 1};grid-column:{column}"
        inside = self._box(cell.item) if isinstance(cell.item, Box) else self._op(cell.item)
        return f'<div class="cell" style="{style}">{inside}</div>'

    def _op(self, op: Op) -> str:
        line = op.line
        name, kind = op_text(op)
        below = line.layout if self.name == "ranks" else _short(line)
        ports = [_port(move) for move in op.moves] + [_ghost(move) for move in self.ghosts.get(line.name, ())]
        classes = f"op {line.kind} {_class(line.layout) if self.name == 'ranks' else ''}".rstrip()
        return (
            f'<button type="button" class="{classes}" data-op="{escape(line.name)}">'
            f"<b>{escape(name)}</b> <span>{escape(kind)}</span><small>{escape(below)}</small></button>"
            f"{_about(line.name, _facts(op, self.name == 'ranks'))}{''.join(ports)}"
        )


def _facts(op: Op, ranks: bool) -> list[tuple[str, list[str]]]:
    """What is known of an op, under a heading each."""
    line = op.line
    local = f"{line.dtype}{sizes_text(line.local)}" if line.dtype and ranks else ""
    return [
        ("in the model", [line.where]),
        ("runs", [line.code] if line.kind != "input" else []),
        ("value", [value_text(line)]),
        ("on a rank", [local]),
        ("module", [line.module]),
        ("parameters", [f"{each.name}: {each.dtype}{sizes_text(each.shape)}" for each in op.parameters]),
        ("steps before", [step.code for step in op.steps]),
        ("moves", [_move_fact(move) for move in op.moves]),
    ]


def _move_fact(line: Line) -> str:
    move = line.move
    assert move is not None
    names = f"{'the same ' * move.rides}{', '.join(move.collectives)}"
    by = f", sends {bytes_text(move.sent)} by {names}" if move.collectives else ", sends nothing"
    return f"{move.kind}: {move.have} to {move.want}{by} {move.why}".rstrip()


def _port(line: Line) -> str:
    """The mark on the edge of a move, which begins there."""
    does, where = move_text(line)
    assert line.move is not None
    local = f"{line.dtype}{sizes_text(line.local)}"
    facts = [
        ("in the model", [line.where]),
        ("move", [_move_fact(line)]),
        ("value", [value_text(line)]),
        ("on a rank", [local]),
        ("module", [line.module]),
    ]
    classes = f"port {_class(line.move.want)}{' sends' if line.move.collectives else ''}"
    return (
        f'<button type="button" class="{classes}" data-port="{escape(line.name)}">'
        f"{escape(does)}<small>{escape(where)}</small></button>{_about(line.name, facts)}"
    )


def _ghost(line: Line) -> str:
    does, where = move_text(line)
    return f'<i class="port ghost" aria-hidden="true" data-does="{escape(does)}" data-where="{escape(where)}"></i>'


def _about(name: str, facts: Sequence[tuple[str, Sequence[str]]]) -> str:
    rows = "".join(
        f"<dt>{escape(head)}</dt>" + "".join(f"<dd>{escape(text)}</dd>" for text in texts if text)
        for head, texts in facts
        if any(texts)
    )
    return f'<dl class="about"><dt>name</dt><dd>{escape(name)}</dd>{rows}</dl>'


def _sum(box: Box) -> str:
    count = len(box.ops)
    return ", ".join(part for part in (f"{count} op{'s' * (count != 1)}", sends_text(box)) if part)


def _short(line: Line) -> str:
    """A shape in little room: ``1×1001×128``."""
    if not line.dtype:
        return ""
    return "\N{MULTIPLICATION SIGN}".join(str(size) for size in line.shape) or "scalar"


def _class(layout: str) -> str:
    return f"lay-{family(layout).replace(' ', '-')}" if layout else ""


def _legend(after: Picture) -> str:
    lines = [line for op in after.ops for line in (op.line, *op.moves)]
    shown = {family(line.layout) for line in lines}
    return "".join(
        f'<li class="lay-{name.replace(" ", "-")}"><b>{escape(name)}</b> {escape(known.means)}</li>'
        for name, known in FAMILIES.items()
        if name in shown
    )


def _colours() -> str:
    """The colours of layouts as variables."""
    light = "".join(f"--{name.replace(' ', '-')}:{known.light};" for name, known in FAMILIES.items())
    dark = "".join(f"--{name.replace(' ', '-')}:{known.dark};" for name, known in FAMILIES.items())
    return f":root{{{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _moves(after: Picture) -> dict[str, tuple[Line, ...]]:
    return {op.line.name: op.moves for op in after.ops if op.moves}


def _merged(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """The keys of both sides in an order that keeps each side's, where they agree."""
    merged, rest = [], list(right)
    for key in left:
        if key in rest:
            at = rest.index(key) + 1
            merged += rest[:at]
            rest = rest[at:]
        elif key not in merged:
            merged.append(key)
    return merged + rest


def _asset(name: str) -> str:
    return (files("cp_compile.show") / "assets" / name).read_text("utf-8")
