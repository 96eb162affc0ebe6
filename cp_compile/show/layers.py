"""Layers of a model, and which of them are equal: a model of 32 equal layers reads as one, with a count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cp_compile.errors import layer_of
from cp_compile.show.listing import Line
from cp_compile.show.names import identifier

__all__ = ["Section", "fold", "layer_ranges"]


@dataclass(frozen=True)
class Section:
    """Lines that belong together: those of one layer, or what stands between layers.

    Attributes:
        lines: of the first of these layers.
        layers: the paths of the layers that have the same lines; empty for what is in none.
    """

    lines: tuple[Line, ...]
    layers: tuple[str, ...] = ()


def fold(lines: Sequence[Line]) -> tuple[Section, ...]:
    """The sections of a listing in order; layers that are equal are one section.

    Equal: the same ops, arguments, shapes, layouts and moves on the same values from elsewhere; but that each reads
    what the layer in front of it has made, and the first of all what stands in that place.
    """
    runs: dict[str, list[Line]] = {}
    between = 0
    before = ""
    for line in lines:
        layer = layer_of(line.module)
        between += before != "" and layer == ""
        before = layer
        runs.setdefault(layer or f"<{between}>", []).append(line)
    layers = {key: _Layer(key, run) for key, run in runs.items() if not key.startswith("<")}
    equal: list[list[str]] = []
    for key in runs:
        kind = next((keys for keys in equal if key in layers and _are_equal(layers, keys[0], key)), None)
        if kind is None:
            equal.append([key])
        else:
            kind.append(key)
    return tuple(Section(tuple(runs[keys[0]]), tuple(keys) if keys[0] in layers else ()) for keys in equal)


def _are_equal(layers: Mapping[str, _Layer], a: str, b: str) -> bool:
    if a not in layers or len(layers[a].lines) != len(layers[b].lines):
        return False
    first, second = layers[a], layers[b]
    words = [layer.words() for layer in (first, second)]
    if len(words[0]) != len(words[1]):
        return False
    # What the first layer of all reads in the place of a layer in front of it.
    hidden = {x: y for x, y in zip(*words) if y.startswith("<-1>") and not x.startswith("<")}
    return [hidden.get(word, word) for word in words[0]] == list(words[1]) and first.forms() == second.forms()


def layer_ranges(layers: Sequence[str]) -> str:
    """``model.layers.0-31``, ``h.0, h.2, h.4``."""
    pairs = [(layer.rpartition(".")[0], int(layer.rpartition(".")[2])) for layer in layers]
    runs: list[list[tuple[str, int]]] = []
    for pair in pairs:
        if runs and runs[-1][-1] == (pair[0], pair[1] - 1):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    texts = []
    for run in runs:
        (stem, first), (_, last) = run[0], run[-1]
        name = f"{stem}." if stem else ""
        texts.append(f"{name}{first}" if first == last else f"{name}{first}-{last}")
    return ", ".join(texts)


class _Layer:
    """A layer's lines, without its number."""

    def __init__(self, path: str, lines: Sequence[Line]) -> None:
        self.path, self.lines = path, lines
        self.stem, _, number = path.rpartition(".")
        self.number = int(number)
        self.own = identifier(path) + "_"

    def words(self) -> list[str]:
        """The values that it reads from elsewhere, in the order in which it reads them.

        Those of another layer of the model by how far it is away: ``<-1>add_2``.
        """
        return [self._word(name) for line in self.lines for name in line.reads if not name.startswith(self.own)]

    def _word(self, name: str) -> str:
        stem = identifier(f"{self.stem}.") + "_" if self.stem else ""
        found = re.fullmatch(rf"{re.escape(stem)}_?(\d+)_(.*)", name)
        return f"<{int(found[1]) - self.number:+}>{found[2]}" if found else name

    def forms(self) -> list[Line]:
        """The lines with its own values by their names in it, and others by their place in ``words``."""
        outer: dict[str, str] = {}

        def form(name: str) -> str:
            if name.startswith(self.own):
                return "*" + name[len(self.own) :]
            return outer.setdefault(name, f"<{len(outer)}>")

        forms = []
        for line in self.lines:
            named = {name: form(name) for name in (*line.reads, line.name)}
            words = re.split(r"(\b[A-Za-z_]\w*\b)", line.arguments)
            forms.append(
                replace(
                    line,
                    name=named[line.name],
                    arguments="".join(named.get(word, word) for word in words),
                    reads=(),
                    module=line.module.removeprefix(self.path),
                    source="",
                )
            )
        return forms
