"""What the benchmarks do with what they found: a table, rows of Markdown, JSON, and an SVG of bars or of lines.

    options = argument_parser(__doc__).parse_args()
    result = Result("speed", ["shape", "arm", "ratio"], [["balanced", "hooks", quartiles(ratios)]])
    publish(result, options, bars("Speed", {"balanced": [Bar("hooks", quartiles(ratios), goal=1.3)]}))

The pictures follow the reader's choice of light or dark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

__all__ = ["Bar", "Quartiles", "Result", "argument_parser", "bars", "lines", "names", "publish", "quartiles"]


@dataclass(frozen=True)
class Quartiles:
    """A median between the quartiles of what was measured."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of one or more values; of one value, that value thrice.

    They are interpolated between the values themselves, so none lies outside of what was measured.
    """
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def number(value: float) -> str:
    """Three digits, without a power of ten where the number is of a readable size."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Attributes:
        name: of the benchmark: the title of the table.
        columns: their headings.
        rows: one value a column: text, a number, ``Quartiles``, or ``None`` where there is nothing to tell.
        settings: with what it was run.
        raw: all that was measured, for the JSON alone.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    raw: Any = None

    def table(self) -> Table:
        """For the terminal: numbers at the right of their columns."""
        table = Table(title=self.name)
        for place, column in enumerate(self.columns):
            numeric = any(isinstance(row[place], int | float | Quartiles) for row in self.rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*(escape_markup(text(value)) for value in row))
        return table

    def markdown(self) -> str:
        """The table for a README."""
        rows = [self.columns, ["---"] * len(self.columns), *([text(value) for value in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def json(self) -> str:
        """Rows by the names of the columns, and what is needed to read them later."""
        content = {
            "name": self.name,
            "machine": machine(),
            "settings": dict(self.settings),
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "raw": self.raw,
        }
        return json.dumps(content, indent=1, default=_plain) + "\n"


def text(value: Any) -> str:
    """A cell of the table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return str(value)


def escape_markup(value: str) -> str:
    """Text that rich shows as it is, brackets and all."""
    return value.replace("[", r"\[")


def machine() -> dict[str, Any]:
    """Where it ran."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def names(argument: str) -> list[str]:
    """An option's comma-separated names."""
    return [name for name in (part.strip() for part in argument.split(",")) if name]


def argument_parser(description: str | None, *, rounds: int = 9) -> argparse.ArgumentParser:
    """The options that all benchmarks have; ``--shapes`` and ``--arms`` have no default here."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often all is measured (default: %(default)s)")
    parser.add_argument("--shapes", type=names, help="names, divided by commas")
    parser.add_argument("--arms", type=names, help="names, divided by commas")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--svg", type=Path, help="a file for the picture")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    return parser


def publish(result: Result, options: argparse.Namespace, picture: str, short: Result | None = None) -> None:
    """Prints the table, and writes the files that the options name.

    Args:
        result: what was found.
        options: those of ``argument_parser``.
        picture: the SVG.
        short: the table for a README, where it is another one.
    """
    # A file or a pipe has no width, and rich would take a narrow one.
    Console(width=None if sys.stdout.isatty() else 160).print(result.table())
    for path, content in (
        (options.json, result.json()),
        (options.svg, picture),
        (options.markdown, (short or result).markdown() + "\n"),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


@dataclass(frozen=True)
class Bar:
    """One bar: its median, whiskers at the quartiles, and a mark at the goal if there is one."""

    label: str
    value: Quartiles
    goal: float | None = None


_WIDTH, _LEFT, _RIGHT, _ROW, _TITLE = 760, 150, 150, 22, 34
# Blue and its neighbours, apart in lightness too: readable in grey, and by those who do not tell red from green.
_LIGHT = ("#0b5cad", "#d97706", "#0f766e", "#9d3d8f", "#5b6470", "#b3261e", "#4d7c0f", "#1e3a5f")
_DARK = ("#6cb0f5", "#f5b04c", "#4fd1c0", "#e28bd6", "#a8b1bd", "#ff8a80", "#a3d65c", "#9cc3ee")


def bars(title: str, groups: Mapping[str, Sequence[Bar]], *, unit: str = "", reference: float | None = 1.0) -> str:
    """Horizontal bars, group below group, on one scale from zero.

    Args:
        title: above all.
        groups: bars by the heading of their group.
        unit: what the scale counts, below it.
        reference: a line through all bars, such as the ratio of equals; ``None``: no line.
    """
    everything = [bar for group in groups.values() for bar in group]
    largest = max([bar.value.high for bar in everything] + [bar.goal or 0.0 for bar in everything], default=1.0)
    marks = ticks(0.0, max(largest, reference or 0.0))
    x = lambda value: _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / marks[-1]
    parts, top = [], _TITLE + 12
    for heading, group in groups.items():
        parts.append(_text(16, top + 16, heading, "heading"))
        top += 26
        for bar in group:
            parts.append(_bar(bar, x, top, reference))
            top += _ROW
        top += 10
    grid = [f'<line class="grid" x1="{x(m):.1f}" x2="{x(m):.1f}" y1="{_TITLE + 8}" y2="{top}"/>' for m in marks]
    scale = [_text(x(m), top + 16, f"{m:g}", "faint", "middle") for m in marks]
    if reference is not None:
        place = f'x1="{x(reference):.1f}" x2="{x(reference):.1f}"'
        parts.append(f'<line class="reference" {place} y1="{_TITLE + 8}" y2="{top}"/>')
    middle = (x(0) + x(marks[-1])) / 2
    key = "; whiskers: quartiles" + ("; ◆ goal" if any(bar.goal for bar in everything) else "")
    scale.append(_text(middle, top + 34, unit + key, "faint", "middle"))
    return _picture(title, _WIDTH, top + 46, [*grid, *parts, *scale])


def _bar(bar: Bar, x: Callable[[float], float], top: float, reference: float | None) -> str:
    value, middle = bar.value, top + _ROW / 2
    hue = "c1" if reference is not None and value.median < reference else "c0"
    tip = f"<title>{escape(bar.label)}: {value}</title>"
    parts = [
        _text(_LEFT - 8, middle + 4, bar.label, "", "end"),
        f'<rect class="{hue}" x="{x(0):.1f}" y="{top + 4}" width="{x(value.median) - x(0):.1f}" height="{_ROW - 8}" '
        f'rx="2">{tip}</rect>',
        f'<line class="whisker" x1="{x(value.low):.1f}" x2="{x(value.high):.1f}" y1="{middle}" y2="{middle}"/>',
    ]
    for end in (value.low, value.high):
        place = f'x1="{x(end):.1f}" x2="{x(end):.1f}"'
        parts.append(f'<line class="whisker" {place} y1="{middle - 4}" y2="{middle + 4}"/>')
    if bar.goal is not None:
        at = x(bar.goal)
        diamond = f"{at:.1f},{middle - 5} {at + 5:.1f},{middle} {at:.1f},{middle + 5} {at - 5:.1f},{middle}"
        parts.append(f'<polygon class="goal" points="{diamond}"><title>goal: {number(bar.goal)}</title></polygon>')
    parts.append(_text(_WIDTH - _RIGHT + 12, middle + 4, str(value)))
    return "".join(parts)


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = False,
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """Curves with a dot at each point and a name at the last one.

    Args:
        title: above all.
        series: points by the name of their curve.
        x_label: below the horizontal scale.
        y_label: above the vertical scale.
        log_x: a logarithmic scale, with a mark at each length that was measured.
        log_y: a logarithmic scale, with a mark at each power of two; else from zero.
        x_text: how a mark is written.
        y_text: the same.
    """
    height, top, bottom, left = 400, _TITLE + 30, 52, 72
    across = [x for points in series.values() for x, _ in points]
    up = [y for points in series.values() for _, y in points]
    x_marks = sorted(set(across)) if log_x else ticks(min(0.0, *across), max(across))
    y_marks = _powers(min(up), max(up)) if log_y else ticks(0.0, max(up))
    x_of = _scale(x_marks[0], x_marks[-1], left, _WIDTH - _RIGHT, log_x)
    y_of = _scale(y_marks[0], y_marks[-1], height - bottom, top, log_y)
    parts = [_text(left, top - 14, y_label, "faint")]
    for mark in y_marks:
        at = y_of(mark)
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, y_text(mark), "faint", "end"))
    for mark in x_marks:
        parts.append(_text(x_of(mark), height - bottom + 18, x_text(mark), "faint", "middle"))
    middle = (left + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, height - 12, x_label, "faint", "middle"))
    labels: list[float] = []
    for place, (name, points) in enumerate(sorted(series.items(), key=lambda item: item[1][-1][1], reverse=True)):
        hue = f"c{list(series).index(name) % len(_LIGHT)}"
        parts.append(_curve(name, points, hue, x_of, y_of))
        # Names stand below one another where curves end close together, in the order of the curves.
        labels.append(max(y_of(points[-1][1]) + 4, labels[-1] + 14 if place else 0.0))
        parts.append(_text(x_of(points[-1][0]) + 9, labels[-1], name, hue))
    return _picture(title, _WIDTH, height, parts)


def _curve(
    name: str, points: Sequence[tuple[float, float]], hue: str, x: Callable[[float], float], y: Callable[[float], float]
) -> str:
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    dots = "".join(
        f'<circle class="{hue}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3">'
        f"<title>{escape(name)}, {a:g}: {number(b)}</title></circle>"
        for a, b in points
    )
    return f'<polyline class="curve s{hue[1:]}" points="{line}"/>{dots}'


def _text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    of = math.log2 if log else float
    width = (of(high) - of(low)) or 1.0
    return lambda value: start + (end - start) * (of(value) - of(low)) / width


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers that enclose the two."""
    if high <= low:
        high = low + 1.0
    step = 10.0 ** math.floor(math.log10(high - low))
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (step * part) <= 8)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(step * place, 12) for place in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    return [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]


def _picture(title: str, width: int, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
            f'height="{height:g}" role="img" aria-label="{escape(title)}">',
            _style(),
            f'<rect class="paper" width="{width}" height="{height:g}"/>',
            _text(16, 24, title, "title"),
            *parts,
            "</svg>\n",
        ]
    )


def _style() -> str:
    def rules(paper: str, ink: str, faint: str, grid: str, hues: Sequence[str]) -> str:
        shades = "".join(f".c{i}{{fill:{hue}}}.s{i}{{stroke:{hue}}}" for i, hue in enumerate(hues))
        return (
            f".paper{{fill:{paper}}}text,.goal{{fill:{ink}}}.goal{{stroke:{paper}}}.whisker,.reference{{stroke:{ink}}}"
            f".faint{{fill:{faint}}}.grid{{stroke:{grid}}}{shades}"
        )

    return (
        "<style>text{font:12px system-ui,sans-serif}.title{font-weight:600;font-size:15px}.heading{font-weight:600}"
        ".curve{fill:none;stroke-width:2}.grid{stroke-width:1}.whisker{stroke-width:1.5}"
        ".reference{stroke-width:1;stroke-dasharray:4 3}"
        f"{rules('#ffffff', '#1f2328', '#59636e', '#e4e7eb', _LIGHT)}"
        f"@media (prefers-color-scheme:dark){{{rules('#0d1117', '#e6edf3', '#9198a1', '#2a313a', _DARK)}}}</style>"
    )
