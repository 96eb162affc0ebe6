"""A plan as curves: memory of a rank over the length, a curve a number of ranks, a panel a recompute policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from cp_compile.plan.table import gibibytes, length_text

if TYPE_CHECKING:
    from cp_compile.plan import Entry, Plan

__all__ = ["curves"]

_WIDTH, _HEIGHT = 430, 340
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 44, 62, 46
# A scale of one hue, from few ranks to many: readable in grey, and by those who do not tell red from green.
_LIGHT = ("#a6bddb", "#74a9cf", "#3690c0", "#0570b0", "#045a8d", "#023858", "#01172b")
_DARK = ("#2b6a99", "#3f86ba", "#5aa2d4", "#7cbbe6", "#a2d2f2", "#c8e5fa", "#eaf6ff")


def curves(plan: Plan) -> str:
    """The SVG; it follows the reader's choice of light or dark."""
    policies = list(dict.fromkeys(entry.policy for entry in plan.entries))
    panels = [_panel(plan, policy, number * _WIDTH) for number, policy in enumerate(policies)]
    width = _WIDTH * max(len(policies), 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" '
            f'height="{_HEIGHT}" role="img" aria-label="Memory of a rank over the sequence length">',
            _style(),
            f'<rect class="paper" width="{width}" height="{_HEIGHT}"/>',
            *panels,
            "</svg>\n",
        ]
    )


def _style() -> str:
    def rules(paper: str, ink: str, grid: str, limit: str, hues: Sequence[str]) -> str:
        lines = "".join(f".c{i}{{stroke:{hue};fill:{hue}}}" for i, hue in enumerate(hues))
        return (
            f".paper{{fill:{paper}}}text{{fill:{ink}}}.grid{{stroke:{grid}}}.limit{{stroke:{limit}}}"
            f".limit-text{{fill:{limit}}}{lines}"
        )

    return (
        "<style>text{font:11px system-ui,sans-serif;stroke:none}.title{font-weight:600;font-size:13px}"
        ".curve{fill:none;stroke-width:2}.grid{stroke-width:1}.limit{stroke-width:1.5;stroke-dasharray:6 4}"
        f"{rules('#ffffff', '#1f2328', '#e4e7eb', '#b3261e', _LIGHT)}"
        f"@media (prefers-color-scheme:dark){{{rules('#0d1117', '#e6edf3', '#2a313a', '#ff8a80', _DARK)}}}</style>"
    )


def _panel(plan: Plan, policy: str, left: int) -> str:
    entries = [entry for entry in plan.entries if entry.policy == policy]
    lengths = sorted({entry.length for entry in entries})
    low = math.floor(math.log2(min(entry.peak for entry in entries)))
    high = math.ceil(math.log2(max(min(max(e.peak for e in entries), 16 * plan.memory), 2 * plan.memory)))
    across = (_WIDTH - _LEFT - _RIGHT) / max(math.log2(lengths[-1] / lengths[0]), 1)
    up = (_HEIGHT - _TOP - _BOTTOM) / (high - low)
    x = lambda length: left + _LEFT + across * math.log2(length / lengths[0])
    y = lambda size: _HEIGHT - _BOTTOM - up * (math.log2(size) - low)
    parts = [f'<text class="title" x="{left + _LEFT}" y="20">recompute: {escape(policy)}</text>']
    parts.append(f'<text x="{left + _LEFT}" y="36">GiB of a rank at the peak</text>')
    for power in range(low, high + 1):
        parts.append(f'<line class="grid" x1="{left + _LEFT}" x2="{left + _WIDTH - _RIGHT}" y1="{y(2**power):.1f}" '
                     f'y2="{y(2**power):.1f}"/>')  # fmt: skip
        parts.append(f'<text x="{left + _LEFT - 6}" y="{y(2**power) + 4:.1f}" text-anchor="end">'
                     f'{gibibytes(2**power)}</text>')  # fmt: skip
    for length in lengths:
        parts.append(f'<text x="{x(length):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
                     f"{length_text(length)}</text>")  # fmt: skip
    middle = left + _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">tokens of a sequence</text>')
    taken: list[tuple[float, float]] = []
    parts.append(_limit(plan, left, y(plan.memory), taken))
    for number, cp_size in enumerate(sorted({entry.cp_size for entry in entries})):
        mine = [e for e in entries if e.cp_size == cp_size and math.log2(e.peak) <= high]
        parts.append(_curve(mine, x, y, number, cp_size, taken))
    return "\n".join(parts)


def _limit(plan: Plan, left: int, height: float, taken: list[tuple[float, float]]) -> str:
    right = left + _WIDTH - _RIGHT
    return f'<line class="limit" x1="{left + _LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>' + _label(
        "limit-text", f"{gibibytes(plan.memory)} GiB", right, height, taken
    )


def _label(hue: str, text: str, x: float, y: float, taken: list[tuple[float, float]]) -> str:
    """A text at the right of a point, lower where another one stands there."""
    while any(abs(x - a) < 30 and abs(y - b) < 12 for a, b in taken):
        y += 4
    taken.append((x, y))
    return f'<text class="{hue}" x="{x + 7:.1f}" y="{y + 4:.1f}">{text}</text>'


def _curve(
    entries: Sequence[Entry],
    x: Callable[[float], float],
    y: Callable[[float], float],
    number: int,
    cp_size: int,
    taken: list[tuple[float, float]],
) -> str:
    if not entries:
        return ""
    points = [(x(e.length), y(e.peak)) for e in entries]
    hue = f"c{min(number, len(_LIGHT) - 1)}"
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dots = "".join(
        f'<circle class="{hue}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"><title>cp = {cp_size}, {length_text(e.length)}: '
        f"{gibibytes(e.peak)} GiB</title></circle>"
        for (a, b), e in zip(points, entries, strict=True)
    )
    label = _label("", f"cp {cp_size}", *points[-1], taken)
    return f'<polyline class="curve {hue}" style="fill:none" points="{line}"/>{dots}{label}'
