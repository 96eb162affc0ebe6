"""Writes the picture of a program: a page of both graphs, or one layer for a paper."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from cp_compile.errors import OptionError
from cp_compile.program import CPProgram
from cp_compile.show.listing import listing
from cp_compile.show.page import page
from cp_compile.show.svg import svg

__all__ = ["draw"]


def draw(program: CPProgram, path: str | PathLike[str]) -> None:
    """See ``CPProgram.draw``."""
    place = Path(path)
    rewritten = listing(program.graph_module, program.cp_size)
    if place.suffix == ".html":
        text = page(listing(program.plain, 1), rewritten, program.cp_size, place.stem)
    elif place.suffix == ".svg":
        text = svg(rewritten, program.cp_size)
    else:
        raise OptionError(
            f"{place} ends in {place.suffix!r}; a picture is an .html page of both graphs, or an .svg of a layer"
        )
    place.write_text(text, "utf-8")
