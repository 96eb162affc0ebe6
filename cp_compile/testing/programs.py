"""Small programs as text: what a random one is written in, run from, and printed as."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Dim", "Line", "Program", "Value", "needed"]

_NUMBER = itertools.count()
_FLOATS = "torch.randn({shape}, generator=generator, dtype=torch.float64)"


@dataclass(frozen=True)
class Dim:
    """A size.

    Attributes:
        text: as it is written in the program, by name where it may vary.
        size: as it is.
        parts: what it is the product of, if it was made by merging dims.
    """

    text: str
    size: int
    parts: tuple[Dim, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, size: int) -> Dim:
        return cls(str(size), size)


@dataclass(frozen=True)
class Value:
    """What a name of the program stands for.

    Attributes:
        name: the name, or an expression without spaces that needs no brackets.
        dims: its shape.
        kind: ``"float"``, ``"int"`` or ``"bool"``.
        high: ints are below it and at least 0.
    """

    name: str
    dims: tuple[Dim, ...]
    kind: str = "float"
    high: int = 0

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)


@dataclass(frozen=True)
class Line:
    """An assignment: the names that it makes, its text, and the names that it uses."""

    makes: str
    text: str
    uses: frozenset[str]


@dataclass(frozen=True, repr=False)
class Program:
    """A model, its batch, and how it is compiled; ``print(program)`` shows Python that runs.

    Attributes:
        lines: of the forward.
        returns: the names of what it returns.
        parameters: name and shape.
        arguments: tensors of the batch: name, and an expression that makes it.
        dynamic: as for ``torch.compile``.
        options: of ``cp_compile.verify``.
    """

    lines: tuple[Line, ...]
    returns: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    arguments: Mapping[str, str]
    dynamic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_source(self) -> str:
        """The model and its batch, as Python."""
        lines = needed(self.lines, self.returns)
        used = set().union(*(line.uses for line in lines), self.returns)
        parameters = {name: shape for name, shape in self.parameters.items() if f"self.{name}" in used}
        arguments = {name: make for name, make in self.arguments.items() if name in used or name == "ids"}
        imports = ["import torch", "import torch.nn.functional as F"]
        if any("checkpoint(" in line.text for line in lines):
            imports.append("from torch.utils.checkpoint import checkpoint")
        body = ["B, S = ids.shape", *(line.text for line in lines), f"return {', '.join(self.returns)}"]
        indented = [f"        {text}" for line in body for text in line.split("\n")]
        made = [f"        self.{name} = torch.nn.Parameter({_real(shape)} / 2)" for name, shape in parameters.items()]
        return "\n".join(
            [
                *imports,
                "",
                "generator = torch.Generator().manual_seed(0)",
                "",
                "",
                "class Model(torch.nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *made,
                "",
                f"    def forward(self, {', '.join(arguments)}):",
                *indented,
                "",
                "",
                "model = Model()",
                f"batch = [{', '.join(arguments.values())}]",
            ]
        )

    def __repr__(self) -> str:
        """Python that runs: what hypothesis shows of a failing example."""
        options = [f"{name}={value!r}" for name, value in {**self.options, "dynamic": self.dynamic}.items()]
        imports = "import cp_compile\n"
        return f"{imports}{self.model_source}\nprint(cp_compile.verify(model, batch, {', '.join(options)}))"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"# a program, as Python that runs:\n{self!r}\n")

    def build(self) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        """The model, and the batch."""
        # Where its lines are found when an error names one.
        name, source = f"cp_compile_program_{next(_NUMBER)}", self.model_source
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        # A module of its own, in which Dynamo looks up what the forward names.
        module: Any = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(source, name, "exec"), module.__dict__)
        return module.model, module.batch


def needed(lines: Sequence[Line], returns: Sequence[str]) -> list[Line]:
    """The lines that some names depend on."""
    wanted = set(returns)
    kept = []
    for line in reversed(lines):
        if line.makes in wanted:
            wanted |= line.uses
            kept.append(line)
    return kept[::-1]


def _real(shape: Sequence[int]) -> str:
    return _FLOATS.format(shape=tuple(shape))
