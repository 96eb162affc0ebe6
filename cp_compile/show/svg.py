"""One layer as an SVG, for papers and READMEs: what a rank runs, its layouts as colours, what it sends on the edges.

Drawn in Python from the picture that the page shows too. It has colours for light and dark pages and a ground of its
own, and no variables or filters, which editors of drawings do not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from cp_compile.show.families import FAMILIES, family
from cp_compile.show.listing import Line
from cp_compile.show.picture import Box, Cell, Edge, Op, Picture, move_text, op_text, picture, sends_text
from cp_compile.show.routes import Rect, Router

__all__ = ["svg"]

WIDTH = 1000
"""The least: a smaller drawing stands in its middle."""

_MARGIN, _GAP, _SIDE = 24, 30, 4
"""Around all; between rows; beside a cell."""
_OP, _PORT, _STEM, _HEAD = 33, 27, 7, 40
"""Heights of an op, of the mark of a move and of the line above it, and of a box's title."""
_LETTER = 0.61
"""Width of a letter of the widest font in the list below, by its size."""


def svg(lines: Sequence[Line], cp_size: int, title: str = "") -> str:
    """The first layer of a rewritten listing, with what it reads from elsewhere; all of it if it has no layers.

    Args:
        lines: of the rewritten graph.
        cp_size: ranks that share each sequence.
        title: above the drawing; ``""``: how many ranks run it.
    """
    drawn = picture(lines)
    layer = next((box for box in drawn.sections if box.layers), None)
    root, edges, leaving = _around(layer, drawn) if layer else (_stacked(drawn), drawn.edges, ())
    stands: dict[str, str] = {}
    root = _brief(root, stands)
    edges = tuple(
        replace(e, source=stands.get(e.source, e.source), target=stands.get(e.target, e.target)) for e in edges
    )
    edges = tuple(dict.fromkeys(edge for edge in edges if edge.source != edge.target))
    exits = tuple(dict.fromkeys(stands.get(name, name) for name in leaving))
    return _Drawing(root, edges, exits, title or f"What each of {cp_size} ranks runs").text()


def _around(layer: Box, drawn: Picture) -> tuple[Box, tuple[Edge, ...], tuple[str, ...]]:
    """A layer below the ops whose values it reads, the edges between them, and the ops whose values leave it."""
    inside = {op.line.name for op in layer.ops}
    edges = tuple(edge for edge in drawn.edges if edge.target in inside)
    read, moved = {edge.source for edge in edges}, {edge.move for edge in edges}
    outer = [op for op in drawn.ops if op.line.name in read - inside]
    sources = [replace(op, moves=tuple(move for move in op.moves if move.name in moved)) for op in outer]
    cells = [Cell(op, 0, 2 * i) for i, op in enumerate(sources)]
    leaving = tuple(edge.source for edge in drawn.edges if edge.source in inside and edge.target not in inside)
    return Box("", "", (*cells, Cell(layer, int(bool(cells)), None))), edges, leaving


def _stacked(drawn: Picture) -> Box:
    return Box("", "", tuple(Cell(box, i, None) for i, box in enumerate(drawn.sections)))


def _brief(box: Box, stands: dict[str, str]) -> Box:
    """A box in which a module that has one layout and moves nothing is one op: a norm, a feed-forward.

    ``stands`` gets the name of that op for each of its own.
    """
    cells = []
    for cell in box.cells:
        item = cell.item
        if isinstance(item, Box):
            if len({op.line.layout for op in item.ops}) == 1 and not any(op.moves for op in item.ops) and item.title:
                last = item.ops[-1]
                stands.update((op.line.name, last.line.name) for op in item.ops)
                item = replace(last, line=replace(last.line, wrote=f"{len(item.ops)} ops"), module=item.title)
                cell = Cell(item, cell.row, 0 if cell.column is None else cell.column)
            else:
                cell = replace(cell, item=_brief(item, stands))
        cells.append(cell)
    return replace(box, cells=tuple(cells))


class _Drawing:
    """Places first, then edges between them, then text."""

    def __init__(self, root: Box, edges: Sequence[Edge], exits: Sequence[str], title: str) -> None:
        self.title = title
        self.edges, self.exits = edges, exits
        self.boxes: list[tuple[Box, Rect, int]] = []
        self.ops: dict[str, tuple[Op, Rect]] = {}
        self.ports: dict[str, tuple[Line, Rect]] = {}
        self.titles: list[Rect] = []
        self.router = Router()
        width, height = _size(root)
        self.width = max(WIDTH, width + 2 * _MARGIN)
        self._place(root, (self.width - width) / 2, _MARGIN + 22, width, 0)
        self.below = _MARGIN + 22 + height + (18 if exits else 0)

    # ---- places

    def _place(self, box: Box, left: float, top: float, width: float, depth: int) -> None:
        holds = frozenset(op.line.name for op in box.ops)
        height = _size(box)[1]
        if box.title:
            self.boxes.append((box, Rect(left, top, left + width, top + height, holds), depth))
            letters = max(_wide(box.title, 12), _wide(sends_text(box), 9.5))
            self.titles.append(Rect(left, top, left + 14 + letters, top + _HEAD - 6))
        widths, heights = _grid(box)
        x = left + (width - sum(widths)) / 2
        y = top + (_HEAD if box.title else 0) + (14 if box.title else 0)
        for cell in box.cells:
            upper = y + sum(heights[: cell.row]) + _GAP * cell.row
            lower = upper + heights[cell.row]
            middle = left + width / 2
            if cell.column is not None:
                middle = x + sum(widths[: cell.column]) + sum(widths[cell.column : cell.column + 2]) / 2
            if isinstance(cell.item, Box):
                wide = _size(cell.item)[0]
                self._place(cell.item, middle - wide / 2, upper, wide, depth + bool(box.title))
            else:
                self._place_op(cell.item, middle, upper, lower)

    def _place_op(self, op: Op, middle: float, top: float, row: float) -> None:
        name = op.line.name
        half = _op_width(op) / 2
        self.ops[name] = op, Rect(middle - half, top, middle + half, top + _OP, frozenset({name}), row)
        y = top + _OP
        for move in op.moves:
            half, y = _port_width(move) / 2, y + _STEM
            self.ports[move.name] = move, Rect(middle - half, y, middle + half, y + _PORT, frozenset({name}), row)
            y += _PORT

    # ---- edges

    def _paths(self) -> Iterable[tuple[Edge, str]]:
        """The edges with the paths that they take, as page.js finds them."""
        starts = {edge: self.ports[edge.move][1] if edge.move else self.ops[edge.source][1] for edge in self.edges}
        into: dict[str, list[Edge]] = {}
        for edge in self.edges:
            into.setdefault(edge.target, []).append(edge)
        for target, edges in into.items():
            at = self.ops[target][1]
            step = min(14.0, (at.right - at.left - 16) / len(edges))
            for i, edge in enumerate(sorted(edges, key=lambda each: starts[each].middle)):
                x = at.middle + (i - (len(edges) - 1) / 2) * step
                yield edge, self._path(edge, starts[edge], x, at.top - 1)
        for name in self.exits:
            edge, at = Edge(name, ""), self.ops[name][1]
            yield edge, self._path(edge, at, at.middle, self.below)

    def _path(self, edge: Edge, start: Rect, x: float, y: float) -> str:
        rects = [rect for _, rect in (*self.ops.values(), *self.ports.values())]
        rects += [*self.titles, *(rect for _, rect, _ in self.boxes)]
        blocks = [rect for rect in rects if edge.source not in rect.holds and edge.target not in rect.holds]
        return self.router.path(edge.source, start, x, y, blocks)

    # ---- text

    def text(self) -> str:
        boxes = "".join(_box(*each) for each in self.boxes)
        edges = "".join(_line(f"edge{self._style(edge.move)}", path) for edge, path in self._paths())
        stems = "".join(
            _line(f"stem{self._style(name)}", f"M{at.middle:.1f} {at.top - _STEM:.1f}v{_STEM}")
            for name, (_, at) in self.ports.items()
        )
        ops = "".join(_op(op, at) for op, at in self.ops.values())
        ports = "".join(_port(move, at) for move, at in self.ports.values())
        legend, height = self._legend()
        ground = _rect("ground", 0.5, 0.5, self.width - 1, height - 1, 10)
        name = _text("name", _MARGIN, _MARGIN + 4, 13, self.title)
        size = f'viewBox="0 0 {self.width:.0f} {height}" width="{self.width:.0f}" height="{height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>\n'
            f"<style>{_css()}</style>\n<defs>{_tip('tip', 7)}{_tip('tip-moved', 9)}</defs>\n"
            f"{ground}{name}\n{boxes}\n{edges}{stems}\n{ops}\n{ports}\n{legend}\n</svg>\n"
        )

    def _style(self, move: str) -> str:
        found = self.ports[move][0].move if move else None
        return "" if found is None else " moved sent" if found.collectives else " moved"

    def _legend(self) -> tuple[str, int]:
        """The legend, and where the paper ends."""
        lines = [line for op, _ in self.ops.values() for line in (op.line, *op.moves)]
        shown = {family(line.layout) for line in lines}
        marks = [(_slug(name), name, known.means) for name, known in FAMILIES.items() if name in shown]
        marks += [("", "", "a value"), ("moved", "", "a value that is cut"), ("moved sent", "", "a value that is sent")]
        parts, x, y = [], float(_MARGIN), self.below + 40
        for style, name, means in marks:
            begin = 12 + _wide(name, 11) if name else 28
            width = begin + 8 + _wide(means, 10)
            if x + width > self.width - _MARGIN and x > _MARGIN:
                x, y = float(_MARGIN), y + 24
            if name:
                parts.append(
                    f'<g class="{style}">{_rect("op", x, y - 13, begin, 18, 4)}{_rect("bar", x, y - 13, 4, 18)}</g>'
                )
                parts.append(_text("name", x + 8, y, 11, name))
            else:
                parts.append(_line(f"edge {style}", f"M{x:.1f} {y - 4:.1f}h{begin}"))
            parts.append(_text("dim", x + begin + 8, y, 10, means))
            x += width + 22
        return "".join(parts), round(y + _MARGIN)


def _size(box: Box) -> tuple[float, float]:
    """Width and height of a box."""
    widths, heights = _grid(box)
    wide = max((_cell_size(cell.item)[0] for cell in box.cells if cell.column is None), default=0.0)
    inner = sum(heights) + _GAP * (len(heights) - 1)
    if not box.title:
        return max(sum(widths), wide), inner
    names = 2 * (14 + max(_wide(box.title, 12), _wide(sends_text(box), 9.5)))  # edges come in on the right of them
    return max(sum(widths) + 36, wide + 36, names), inner + _HEAD + 14 + 20


def _grid(box: Box) -> tuple[list[float], list[float]]:
    """Widths of half columns and heights of rows."""
    widths = [0.0] * box.columns
    heights = [0.0] * (1 + max(cell.row for cell in box.cells))
    for cell in box.cells:
        width, height = _cell_size(cell.item)
        heights[cell.row] = max(heights[cell.row], height)
        if cell.column is not None:
            missing = (width + 2 * _SIDE - widths[cell.column] - widths[cell.column + 1]) / 2
            for column in (cell.column, cell.column + 1):
                widths[column] += max(0.0, missing)
    return widths, heights


def _cell_size(item: Op | Box) -> tuple[float, float]:
    if isinstance(item, Box):
        return _size(item)
    return max([_op_width(item), *map(_port_width, item.moves)]), _OP + len(item.moves) * (_STEM + _PORT)


def _op_width(op: Op) -> float:
    return max(44.0, 20 + max(_wide(" ".join(filter(None, op_text(op))), 11), _wide(op.line.layout, 9.5)))


def _port_width(move: Line) -> float:
    does, where = move_text(move)
    return 18 + max(_wide(does, 10), _wide(where, 9) + 10)


def _wide(text: str, size: float) -> float:
    return _LETTER * size * len(text)


def _box(box: Box, at: Rect, depth: int) -> str:
    sends = sends_text(box)
    return (
        _rect(f"box{depth % 2}", at.left, at.top, at.right - at.left, at.bottom - at.top, 9)
        + _text("name", at.left + 12, at.top + 19, 12, box.title)
        + (_text("dim", at.left + 12, at.top + 33, 9.5, sends) if sends else "")
    )


def _op(op: Op, at: Rect) -> str:
    name, kind = op_text(op)
    layout = op.line.layout
    bar = _rect("bar", at.left, at.top, 4, _OP) if layout else ""
    body = _rect("op", at.left, at.top, at.right - at.left, _OP, 5)
    return (
        f'<g class="{_slug(family(layout))}">{body}{bar}</g>'
        + _text("op-text", at.middle + 1, at.top + (14.5 if layout else 20), 11, kind, name)
        + (_text("layout", at.middle + 1, at.top + 27, 9.5, layout) if layout else "")
    )


def _port(move: Line, at: Rect) -> str:
    does, where = move_text(move)
    assert move.move is not None
    sends = "sent" if move.move.collectives else "cut"
    swatch = _rect("bar", at.middle - _wide(where, 9) / 2 - 5, at.top + 15, 7, 7, 2)
    return (
        _rect(f"port {sends}", at.left, at.top, at.right - at.left, _PORT, 11)
        + _text(f"{sends}-text", at.middle, at.top + 11.5, 10, does)
        + f'<g class="{_slug(family(move.move.want))}">{swatch}</g>'
        + _text("layout", at.middle + 5, at.top + 22, 9, where)
    )


def _rect(style: str, x: float, y: float, width: float, height: float, round_: float = 1.5) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" {size} rx="{round_}"/>'


def _text(style: str, x: float, y: float, size: float, text: str, strong: str = "") -> str:
    begin = f'<tspan class="name">{escape(strong)}</tspan> ' if strong else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size}">{begin}{escape(text)}</text>'


def _line(style: str, path: str) -> str:
    return f'<path class="{style.strip()}" d="{path}"/>'


def _tip(name: str, size: int) -> str:
    box = f'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" markerHeight="{size}"'
    head = _line(name, "M0 .5L8 4L0 7.5z")
    return f'<marker id="{name}" {box} markerUnits="userSpaceOnUse" orient="auto">{head}</marker>'


def _slug(name: str) -> str:
    return name.replace(" ", "-") or "none"


def _mixed(colour: str, ground: str, share: float) -> str:
    """A colour laid thin over another."""
    pairs = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(above * share + below * (1 - share)):02x}" for above, below in pairs)


def _css() -> str:
    light = _theme("#ffffff", "#f6f7f9", "#c9ced6", "#1b1f24", "#5a6472", "#8d97a5", "#b8400a")
    dark = _theme("#0f1216", "#171b21", "#363d47", "#e8ebef", "#a3adba", "#6d7886", "#ff9a5c")
    for name, known in FAMILIES.items():
        light += _family_css(name, known.light, "#ffffff", 0.15)
        dark += _family_css(name, known.dark, "#0f1216", 0.26)
    return (
        "text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".name,.sent-text{font-weight:700}.op-text,.layout,.cut-text,.sent-text{text-anchor:middle}"
        ".edge,.stem{fill:none;stroke-width:1.2}.edge{marker-end:url(#tip)}.edge.moved{marker-end:url(#tip-moved)}"
        ".moved{stroke-width:1.6;stroke-dasharray:5 3}.sent{stroke-width:2.2;stroke-dasharray:none}"
        ".port{stroke-width:1.3;stroke-dasharray:4 2.5}.port.sent{stroke-width:1.5;stroke-dasharray:none}"
        f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


def _theme(page: str, box: str, line: str, text: str, dim: str, edge: str, mark: str) -> str:
    return (
        f".ground,.box1{{fill:{page};stroke:{line}}}.box0{{fill:{box};stroke:{line}}}.op{{fill:{page};stroke:{edge}}}"
        f"text{{fill:{text}}}.dim,.layout{{fill:{dim}}}.edge,.stem{{stroke:{edge}}}.tip{{fill:{edge}}}"
        f".edge.moved,.stem.moved{{stroke:{mark}}}.tip-moved{{fill:{mark}}}.port{{fill:{page};stroke:{mark}}}"
        f".sent-text{{fill:{mark}}}"
    )


def _family_css(name: str, colour: str, ground: str, share: float) -> str:
    style = f".{_slug(name)}"
    return f"{style} .op{{fill:{_mixed(colour, ground, share)};stroke:{colour}}}{style} .bar{{fill:{colour}}}"
