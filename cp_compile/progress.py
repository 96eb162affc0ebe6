"""What the compiler is at, on a terminal: captured, pass k of n, the compiler. Nothing where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(show: bool = True) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is about to run, in one line on stderr that vanishes at the end.

    Args:
        show: ``False`` for a rank that is not the first of its group.

    Silent where stderr is no terminal, and without ``rich``.
    """
    if not (show and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda words: None
        return
    try:
        from rich.console import Console
    except ImportError:
        yield lambda words: None
        return
    with Console(stderr=True).status("cp_compile") as status:
        yield lambda words: status.update(f"cp_compile: {words}")
