"""Graphs as readable Python: every line with its global shape, its layout and its module; what moves, and why."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from cp_compile.errors import layer_of
from cp_compile.passes.layouts import Size
from cp_compile.show.layers import Section, fold, layer_ranges
from cp_compile.show.listing import Line, sizes_text
from cp_compile.show.names import identifier

__all__ = ["bytes_text", "difference", "folded", "python", "value_text"]

_WIDTH = 72
"""Comments begin here, if the code is not longer: a fixed column, so that a long line moves no other."""


def bytes_text(size: Size) -> str:
    """``96.0 KiB``; an expression of symbols as it is."""
    if not isinstance(size, int):
        return f"{size} bytes"
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def value_text(line: Line) -> str:
    """``f32[1, 1001, 128] sequence/4``."""
    if not line.dtype:
        return ""
    text = line.dtype + sizes_text(line.shape)
    if line.kind in ("local", "inner", "prologue"):
        return f"{text} on a rank"
    return f"{text} {line.layout}".rstrip()


def python(lines: Sequence[Line], cp_size: int) -> str:
    """A whole graph as one function, a line an op."""
    body = [line for line in lines if line.kind != "input"]
    return "\n".join([*_head(lines, cp_size), *(_text(line) for line in body)]) + "\n"


def folded(lines: Sequence[Line], cp_size: int) -> str:
    """A graph with equal layers once and each move on one line. In a layer, ``_name`` is a value of its own."""
    texts = _head(lines, cp_size)
    for section in fold(_brief(lines)):
        texts += [_title(section)] if section.layers else [""]
        texts += [_relative(_text(line), section) for line in section.lines]
    return "\n".join(texts) + "\n"


def difference(plain: Sequence[Line], rewritten: Sequence[Line], *, full: bool = False) -> str:
    """What the rewrite changes, as a diff of the code, with layouts and shapes beside it.

    Sizes that are a rank's in place of the whole's are no difference.

    Args:
        plain: the lines of the graph before the rewrite.
        rewritten: those behind it.
        full: every layer, and every node of a move; else equal layers once.
    """
    texts = []
    sections = [Section(_body(rewritten))] if full else fold(_brief(rewritten))
    for section in sections:
        paths = {layer_of(line.module) for line in section.lines}
        names = {line.name for line in section.lines}
        before = [
            line
            for line in _body(plain)
            if full or (section.layers and layer_of(line.module) in paths) or line.name in names
        ]
        texts += _hunks(before, section)
    return "\n".join(texts) + "\n" if texts else ""


def _hunks(before: Sequence[Line], section: Section) -> list[str]:
    after = section.lines
    texts: list[str] = []
    matcher = difflib.SequenceMatcher(None, [_key(x) for x in before], [_key(x) for x in after], False)
    for group in matcher.get_grouped_opcodes(2):
        where = layer_ranges(section.layers) if section.layers else "outside of layers"
        texts.append(f"@@ {where} @@")
        for tag, a, b, c, d in group:
            if tag == "equal":
                texts += [" " + _relative(_text(line), section) for line in after[c:d]]
            else:
                texts += ["-" + _relative(_text(line), section) for line in before[a:b]]
                texts += ["+" + _relative(_text(line), section) for line in after[c:d]]
    return texts


def _key(line: Line) -> object:
    return (line.name, line.wrote, line.reads) if line.kind == "op" else line.code


def _body(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.kind != "input")


def _brief(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.kind not in ("input", "inner", "prologue"))


def _relative(text: str, section: Section) -> str:
    """A line of a layer, without the layer's name in front of each value of its own."""
    if not section.layers:
        return text
    own = identifier(section.layers[0])
    code, mark, comment = text.partition("  # ")
    code = re.sub(rf"\b{own}_", "_", code)
    comment = comment.replace(f"  {section.layers[0]}", "  ")
    return f"{code.rstrip():{_WIDTH}}{mark}{comment}"


def _head(lines: Sequence[Line], cp_size: int) -> list[str]:
    inputs = [line for line in lines if line.kind == "input"]
    return [
        f"# One of {cp_size} ranks. Shapes are those of the whole; name/{cp_size} is an axis that the ranks share.",
        "# rank_... are indices that a rank computes of its number.",
        "def forward(",
        *(_commented(f"    {line.name},", [value_text(line)]) for line in inputs),
        "):",
    ]


def _title(section: Section) -> str:
    count = len(section.layers)
    equal = f", {count} equal layers" if count > 1 else ""
    return f"\n    # {layer_ranges(section.layers)}{equal}"


def _text(line: Line) -> str:
    if line.kind == "output":
        return f"    {line.code}"
    if line.move is None:
        return _commented(f"    {line.code}", [value_text(line), line.module])
    move = line.move
    names = f" by {'the same ' * move.rides}{', '.join(move.collectives)}" if move.collectives else ""
    sends = f"sends {bytes_text(move.sent)}{names}" if move.collectives else "sends nothing"
    code = f"    {line.name} = {move.kind}({line.source}, {move.have!r}, {move.want!r})"
    return _commented(code, [value_text(line), line.module, f"{sends} {move.why}".rstrip()])


def _commented(code: str, parts: Sequence[str]) -> str:
    comment = "  ".join(part for part in parts if part)
    return f"{code:{_WIDTH}}  # {comment}" if comment else code
