"""Layers of a model, and which of them are equal: a model of 32 equal layers reads as one, with a count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cp_compile.show.listing import Line, identifier

__all__ = ["Section", "fold", "layer_of", "layer_ranges"]


@dataclass(frozen=True)
class Section:
    """Lines that belong together: those of one layer, or what stands between layers.

    Attributes:
        lines: of the first of these layers.
        layers: the paths of the layers that have the same lines; empty for what is in none.
    """

    lines: tuple[Line, ...]
    layers: tuple[str, ...] = ()


def layer_of(module: str) -> str:
    """The layer that a module path lies in, the outermost one: ``model.layers.3``; ``""`` for none."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", module)
    return found[0] if found else ""


def fold(lines: Sequence[Line]) -> tuple[Section, ...]:
    """The sections of a listing in order; layers that are equal are one section.

    Equal: the same ops, arguments, shapes, layouts and moves; values from elsewhere need only be used alike.
    """
    runs: dict[str, list[Line]] = {}
    between = 0
    before = ""
    for line in lines:
        layer = layer_of(line.module)
        between += before != "" and layer == ""
        before = layer
        runs.setdefault(layer or f"<{between}>", []).append(line)
    equal: dict[tuple[object, ...], list[str]] = {}
    for key, run in runs.items():
        form = (key,) if key.startswith("<") else tuple(_forms(key, run))
        equal.setdefault(form, []).append(key)
    return tuple(
        Section(tuple(runs[keys[0]]), () if keys[0].startswith("<") else tuple(keys)) for keys in equal.values()
    )


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


def _forms(layer: str, lines: Sequence[Line]) -> list[object]:
    """The lines of a layer without its number, and values from elsewhere by the order in which they are used."""
    own = identifier(layer) + "_"
    outer: dict[str, str] = {}

    def form(name: str) -> str:
        if name.startswith(own):
            return "*" + name[len(own) :]
        return outer.setdefault(name, f"<{len(outer)}>")

    forms: list[object] = []
    for line in lines:
        named = {name: form(name) for name in (*line.reads, line.name)}
        words = re.split(r"(\b[A-Za-z_]\w*\b)", line.arguments)
        forms.append(
            replace(
                line,
                name=named[line.name],
                arguments="".join(named.get(word, word) for word in words),
                reads=(),
                module=line.module.removeprefix(layer),
                source="",
            )
        )
    return forms
