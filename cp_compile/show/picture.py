"""A graph as a picture: boxes of modules within each other, ops in rows, edges; what the page and the SVG draw.

Nothing here knows of pixels. A value that moves between layouts is an edge with a mark; equal layers are one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cp_compile.errors import layer_of
from cp_compile.passes.layouts import Size
from cp_compile.show.code import bytes_text
from cp_compile.show.layers import Section, fold, layer_ranges
from cp_compile.show.listing import Line
from cp_compile.show.placement import columns, rows

__all__ = ["Box", "Cell", "Edge", "Op", "Picture", "move_text", "op_text", "picture", "sends_text"]


@dataclass(frozen=True)
class Op:
    """An op, an argument or what is returned.

    Attributes:
        line: what it is.
        steps: of the form in which a rank runs it, before the op itself.
        parameters: those that it reads, which are drawn nowhere else.
        moves: of its value, in the order in which they run.
        module: the module that it alone is, without what that lies in; ``""`` for an op of a module with others.
    """

    line: Line
    steps: tuple[Line, ...] = ()
    parameters: tuple[Line, ...] = ()
    moves: tuple[Line, ...] = ()
    module: str = ""


@dataclass(frozen=True)
class Cell:
    """A place in a box.

    Attributes:
        item: what stands there.
        row: behind everything that it reads, as near as that allows.
        column: the first of the two half columns that it takes; ``None``: it has the row for itself.
    """

    item: Op | Box
    row: int
    column: int | None


@dataclass(frozen=True)
class Box:
    """A module, or what stands between layers.

    Attributes:
        path: of the module; in front of it ``<0>``, ``<1>`` for what is of no layer: a module may be in several.
        title: ``"attention"``, ``"blocks.0-31 (32 equal layers)"``; ``""``: a box without a border.
        cells: what it holds.
        layers: how many layers it stands for, if it is one.
        opened: whether it is open at first: a module around layers, if it does little itself.
    """

    path: str
    title: str
    cells: tuple[Cell, ...]
    layers: int = 0
    opened: bool = False

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops in it and in the boxes in it."""
        return tuple(
            op for cell in self.cells for op in (cell.item.ops if isinstance(cell.item, Box) else (cell.item,))
        )

    @property
    def columns(self) -> int:
        """Half columns."""
        return 2 + max((cell.column or 0 for cell in self.cells), default=0)

    @property
    def boxes(self) -> Iterator[Box]:
        """The boxes in it, at any depth, outer before inner."""
        for cell in self.cells:
            if isinstance(cell.item, Box):
                yield cell.item
                yield from cell.item.boxes


@dataclass(frozen=True)
class Edge:
    """A value on its way to an op that reads it.

    Attributes:
        source: name of the op that makes it.
        target: name of the op that reads it.
        move: name of the move in between; ``""`` for none.
    """

    source: str
    target: str
    move: str = ""


@dataclass(frozen=True)
class Picture:
    """A graph: its sections from top to bottom, and its edges."""

    sections: tuple[Box, ...]
    edges: tuple[Edge, ...]

    @property
    def boxes(self) -> Iterator[Box]:
        """Those with a title, outer before inner."""
        for section in self.sections:
            yield from (box for box in (section, *section.boxes) if box.title)

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for section in self.sections for op in section.ops)


def picture(lines: Sequence[Line]) -> Picture:
    """The picture of a listing, rewritten or plain."""
    return _Drawing(lines).picture()


def op_text(op: Op) -> tuple[str, str]:
    """What is written on an op: ``("q", "linear")``; ``("", "add")`` for one that is no module of its own."""
    line = op.line
    if line.kind in ("input", "output"):
        return ("", "return") if line.kind == "output" else (line.name, "input")
    return op.module, (line.wrote or line.op).strip("_")


def move_text(line: Line) -> tuple[str, str]:
    """What is written on an edge: ``("all-to-all 96.0 KiB", "to heads/4")``."""
    assert line.move is not None
    runs = ", ".join(dict.fromkeys(_COLLECTIVES.get(each, each) for each in line.move.collectives))
    return f"{runs} {bytes_text(line.move.sent)}" if runs else line.move.kind, f"to {line.move.want}"


def sends_text(box: Box) -> str:
    """What the moves of a box's values send: ``"4 all-to-all, 376.5 KiB"``; ``""`` where nothing is sent."""
    moves = [line.move for op in box.ops for line in op.moves if line.move is not None]
    runs = [_COLLECTIVES.get(each, each) for move in moves if not move.rides for each in move.collectives]
    if not runs:
        return ""
    total: Size = sum(move.sent for move in moves)
    each = " each" if box.layers > 1 else ""
    return f"{', '.join(f'{runs.count(run)} {run}' for run in dict.fromkeys(runs))}, {bytes_text(total)}{each}"


_FEW = 8
"""Parts of a box that is open at first."""

_COLLECTIVES = {
    "all_to_all_single": "all-to-all",
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
}


class _Drawing:
    def __init__(self, lines: Sequence[Line]) -> None:
        self.by_name = {line.name: line for line in lines}
        self.parameters = {line.name for line in lines if line.kind == "input"} - _arguments(lines)
        drawn = [line for line in lines if line.kind in ("op", "local", "move", "output") or self._argument(line)]
        self.sections = fold(drawn)
        self.first = _firsts(drawn, self.sections)
        self.edges = self._edges()
        self.moves = self._moves()
        begin = {edge.source for edge in self.edges}
        self.ops = {
            line.name: self._op(line)
            for section in self.sections
            for line in section.lines
            if line.kind in ("op", "output") or line.name in begin  # an input may be that of a layer like another
        }

    def picture(self) -> Picture:
        between = [each for each in self.sections if not each.layers]
        boxes = [self._section(each, between.index(each) if each in between else 0) for each in self.sections]
        return Picture(tuple(box for box in boxes if box.cells), self.edges)

    def _argument(self, line: Line) -> bool:
        return line.kind == "input" and line.name not in self.parameters

    def _edges(self) -> tuple[Edge, ...]:
        """Those of the lines that are drawn. What reads a value of the last of equal layers reads it of their box."""
        found = []
        for section in self.sections:
            for line in section.lines:
                if line.kind in ("op", "output"):
                    origins = dict.fromkeys(origin for read in line.reads for origin in self._origins(read))
                    found += [Edge(self.first[source], line.name, move) for source, move in origins]
        return tuple(found)

    def _origins(self, name: str, move: str = "") -> Iterator[tuple[str, str]]:
        """The op that makes a value, behind moves and local steps, and the last of these moves."""
        line = self.by_name[name]
        if line.kind == "move":
            yield from self._origins(line.source, move or self.first[name])
        elif line.kind in ("local", "inner"):
            for read in line.reads:
                yield from self._origins(read, move)
        elif name in self.first:
            yield name, move

    def _op(self, line: Line) -> Op:
        steps = dict.fromkeys(step for read in line.reads for step in self._steps(read)) if line.kind == "op" else {}
        reads = [self.by_name[read] for each in (*steps, line) for read in each.reads]
        parameters = dict.fromkeys(each for each in reads if each.name in self.parameters and each.dtype)
        return Op(line, tuple(steps), tuple(parameters), tuple(self.moves.get(line.name, ())))

    def _moves(self) -> dict[str, list[Line]]:
        """The moves of each op's value."""
        found: dict[str, list[Line]] = {}
        for line in (line for section in self.sections for line in section.lines if line.kind == "move"):
            for name in dict.fromkeys(self.first[name] for name, _ in self._origins(line.name)):
                found.setdefault(name, []).append(line)
        return found

    def _steps(self, name: str) -> Iterator[Line]:
        """The local steps that end in a value, in order."""
        line = self.by_name[name]
        if line.kind == "local":
            for read in line.reads:
                yield from self._steps(read)
            yield line

    def _section(self, section: Section, number: int) -> Box:
        ops = [self.ops[line.name] for line in section.lines if line.name in self.ops]
        if not section.layers:
            return self._box("", f"<{number}>", "", ops)
        count = len(section.layers)
        title = layer_ranges(section.layers) + (f" ({count} equal layers)" if count > 1 else "")
        return self._box(section.layers[0], section.layers[0], title, ops, count)

    def _box(self, module: str, path: str, title: str, ops: Sequence[Op], layers: int = 0) -> Box:
        """A box of ``ops``, which lie in ``module``: one of a module inside it is drawn as itself, more as a box."""
        groups: dict[str, list[Op]] = {}
        for op in ops:
            child = _child(module, op.line.module)
            groups.setdefault(child or f"<{op.line.name}>", []).append(op)
        items: list[Op | Box] = []
        for child, inside in groups.items():
            if len(inside) == 1:
                op = inside[0]
                items.append(replace(op, module=op.line.module.rpartition(".")[2]) if child[0] != "<" else op)
                continue
            while len({_child(child, op.line.module) for op in inside}) == 1 and _child(child, inside[0].line.module):
                child = _child(child, inside[0].line.module)
            name = child[len(module) :].lstrip(".")
            items.append(self._box(child, child if layers or module else f"{path}{child}", name, inside))
        around = not layers and any(layer.startswith(f"{module}.") for each in self.sections for layer in each.layers)
        return Box(path, title, self._placed(items), layers, around and len(items) <= _FEW)

    def _placed(self, items: Sequence[Op | Box]) -> tuple[Cell, ...]:
        """Rows by the longest path of edges, columns below what is read."""
        holds = {
            op.line.name: i for i, item in enumerate(items) for op in (item.ops if isinstance(item, Box) else (item,))
        }
        reads: list[set[int]] = [set() for _ in items]
        fed = set()  # items that take a value from outside of this box, or whose inputs do
        for edge in self.edges:
            source, target = holds.get(edge.source), holds.get(edge.target)
            if target is not None and (source is None or source in fed):
                fed.add(target)
            if source is not None and target is not None and source < target:
                reads[target].add(source)
        levels = rows(reads, fed)
        places = columns(levels, reads)
        return tuple(
            Cell(item, row, None if isinstance(item, Box) and levels.count(row) == 1 else column)
            for item, row, column in zip(items, levels, places)
        )


def _arguments(lines: Sequence[Line]) -> set[str]:
    """The inputs to draw: what the user gives that something reads. Not a module's parameters, but those too if they
    move, since an edge begins there; not a rank's number or a seed, which have no layout in a rewritten graph.
    """
    inputs = [line for line in lines if line.kind == "input"]
    given = [line for line in inputs if line.layout] or inputs
    moved = {line.source for line in lines if line.kind == "move"}
    read = {name for line in lines if line.kind != "prologue" for name in line.reads}
    return {line.name for line in given if line.name in read and (line.name in moved or not line.is_state)}


def _firsts(drawn: Sequence[Line], sections: Sequence[Section]) -> dict[str, str]:
    """The line that stands for each line: of equal layers that of the first."""
    runs: dict[str, list[str]] = {}
    for line in drawn:
        runs.setdefault(layer_of(line.module), []).append(line.name)
    firsts = {line.name: line.name for line in drawn}
    for section in sections:
        for layer in section.layers:
            firsts.update(zip(runs[layer], runs[section.layers[0]]))
    return firsts


def _child(module: str, path: str) -> str:
    """The module in ``module`` that holds ``path``; ``""`` if that is ``module`` itself."""
    rest = path[len(module) :].lstrip(".")
    if not rest:
        return ""
    return f"{module}.{rest.partition('.')[0]}".lstrip(".")
