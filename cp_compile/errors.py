"""The errors of cp_compile, written for the author of the model.

Every message says what was found, where in *the user's* code, with which sizes, and what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = [
    "CPError",
    "InvariantError",
    "OptionError",
    "PeerMismatchError",
    "RefusedError",
    "is_library",
    "layer_of",
    "module_path",
    "own_errors",
    "user_line",
]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n?\s*(?P<code>[^\n]*)')
_LIBRARY = re.compile(r"[/\\]torch[/\\](_|nn[/\\]|utils[/\\]|fx[/\\]|functional\.py|distributed[/\\])")


class CPError(RuntimeError):
    """Base of every error that cp_compile raises."""


class OptionError(CPError, ValueError):
    """An option is unknown, or its value is not one of those that it takes."""


class PeerMismatchError(CPError):
    """The ranks of a context-parallel group do not run the same program on the same batch."""


class InvariantError(CPError):
    """A rewritten graph breaks a rule that every rewritten graph keeps: a bug of cp_compile, not of the model."""


class RefusedError(CPError):
    """The model holds something that no rule covers exactly, so there is no rewritten program.

    Attributes:
        found: what was found.
        remedy: what the author of the model can do.
        line: ``file.py:line (code)`` in the user's code, or ``""``.
        module: dotted path of the module that ran the op, or ``""``.
    """

    def __init__(self, found: str, remedy: str, *, line: str = "", module: str = "") -> None:
        self.found, self.remedy, self.line, self.module = found, remedy, line, module
        where = f"\n  at {line}" if line else ""
        where += f"\n  in module {module}" if module else ""
        super().__init__(f"{found}{where}\n  remedy: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_refusal, (self.found, self.remedy, self.line, self.module)

    @classmethod
    def at(cls, node: Node, found: str, remedy: str) -> RefusedError:
        """The refusal of what ``node`` does, with its place in the user's code."""
        return cls(found, remedy, line=user_line(node), module=module_path(node))


def _rebuild_refusal(found: str, remedy: str, line: str, module: str) -> RefusedError:
    return RefusedError(found, remedy, line=line, module=module)


@contextmanager
def own_errors() -> Iterator[None]:
    """Dynamo wraps what a backend raises: our errors come out as they are."""
    try:
        yield
    except Exception as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, CPError):
            raise inner from None
        raise


def is_library(file: str) -> bool:
    """Whether a file is part of torch, and not of the user's code."""
    return _LIBRARY.search(file) is not None


def user_line(node: Node) -> str:
    """The innermost line of the user's code that made ``node``, as ``file.py:12 (code)``; ``""`` if unknown."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    ours = [frame for frame in frames if not is_library(frame["file"])] or frames
    if not ours:
        return ""
    frame = ours[-1]
    code = f" ({frame['code'].strip()})" if frame["code"].strip() else ""
    return f"{frame['file']}:{frame['line']}{code}"


def module_path(node: Node) -> str:
    """The dotted path of the module whose forward made ``node``, or whose backward; ``""`` for the top level."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    # torch.export wraps the model in a module of its own.
    return re.sub(r"^(L\['[^']*'\]\.?)?(_export_root(\.|$))?", "", path)


def layer_of(module: str) -> str:
    """The layer that a module path lies in, the outermost one: ``model.layers.3``; ``""`` for none."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", module)
    return found[0] if found else ""
