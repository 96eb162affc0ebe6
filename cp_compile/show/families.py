"""Kinds of layouts, each with a colour: Okabe and Ito's, which stay apart for every kind of colour blindness."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family", "family"]


@dataclass(frozen=True)
class Family:
    """A kind of layout.

    Attributes:
        means: what a rank has of such a value.
        light: its colour on a light page.
        dark: its colour on a dark one.
    """

    means: str
    light: str
    dark: str


FAMILIES = {
    "sequence": Family("each rank has a piece of the sequence", "#0072b2", "#4aa8e8"),
    "heads": Family("each rank has some heads, whole sequences of them", "#d55e00", "#ff8a3d"),
    "kv heads": Family("each rank has the kv heads that its query heads use", "#b0468a", "#e08cc0"),
    "channels": Family("each rank has some channels, whole sequences of them", "#00805e", "#2fc79b"),
    "own": Family("what each rank makes of rows of its own", "#2a9fd6", "#7fd0f7"),
    "partial": Family("each rank has a summand", "#a88a00", "#e3c53a"),
    "whole": Family("each rank has all of it", "#7a828e", "#8b94a1"),
    "other": Family("another axis that the ranks share", "#6a51a3", "#a793dd"),
}


def family(layout: str) -> str:
    """Which of ``FAMILIES`` a layout, as a listing names it, is of; ``""`` for none."""
    name = layout.partition("/")[0]
    first = "own" if name.startswith("rows of") else name.partition(" ")[0]
    return next((known for known in (name, first) if known in FAMILIES), "other" if name else "")
