"""The exported program: a rewritten graph with what is needed to look at it, run it and save it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec

from cp_compile.errors import OptionError
from cp_compile.options import Options
from cp_compile.passes import Context, Gathered, Output, PassRecord
from cp_compile.passes.bind_seed import takes_seed

if TYPE_CHECKING:
    from cp_compile.show.report import Report

__all__ = ["CPProgram", "Signature"]


@dataclass(frozen=True)
class Signature:
    """How a graph is called.

    Attributes:
        arguments: names of the forward's arguments, in order; empty where some have none (then they are as exported).
        in_spec: of ``(args, kwargs)``; where the arguments have names, all of them are keywords.
        out_spec: of what the forward returns.
        state: the parameters, buffers and constants that the graph takes behind the arguments, by their path in the
            model: the model's own.
        ranges: the least and the largest value of each symbol of the sizes, by its name.
        conditions: what holds of these symbols wherever the graph is the model's, in sympy's words.
        unused: the model's other parameters and buffers, other names of tied ones among them, so that a state dict of
            the model is one of the program.
        transient: names of state that no state dict holds: constants, and buffers that do not persist.
        training: the model's mode.
    """

    arguments: tuple[str, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    state: Mapping[str, torch.Tensor]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    unused: Mapping[str, torch.Tensor] = field(default_factory=dict)
    transient: tuple[str, ...] = ()
    training: bool = True


@dataclass(frozen=True)
class CPProgram:
    """The program that each rank runs for a model: what ``cp_compile.export`` returns.

    Attributes:
        graph_module: the rewritten graph of one rank: pre-dispatch ATen ops and functional collectives. Its inputs are
            the leaves of the arguments, the parameters and buffers, a seed if it draws, and the rank.
        plain: the graph before the rewrite, in the global view.
        outputs: how each output comes back.
        signature: how it is called.
        cp_size: ranks that share each sequence.
        options: those of the export.
    """

    graph_module: GraphModule = field(repr=False)
    plain: GraphModule = field(repr=False)
    outputs: tuple[Output, ...]
    signature: Signature = field(repr=False)
    cp_size: int
    options: Options
    _context: Context = field(repr=False)

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """What each pass changed, in order."""
        return tuple(self._context.records)

    @property
    def gathered(self) -> tuple[Gathered, ...]:
        """The ops that run whole on every rank, because ``fallback="gather"`` allows it."""
        return tuple(self._context.gathered)

    @property
    def draws(self) -> bool:
        """Whether it takes a seed."""
        return takes_seed(self.graph_module)

    @property
    def code(self) -> str:
        """The rewritten graph as readable Python, a line an op: global shape, layout, module; what moves, and why."""
        from cp_compile.show.code import python
        from cp_compile.show.listing import listing

        return python(listing(self.graph_module, self.cp_size), self.cp_size)

    def explain(self, *, full: bool = False, diff: bool = False) -> str:
        """The rewritten graph with equal layers once and each move on one line.

        Args:
            full: every layer and every node, as in ``code``.
            diff: only what differs from the plain graph.
        """
        from cp_compile.show.code import difference, folded
        from cp_compile.show.listing import listing

        lines = listing(self.graph_module, self.cp_size)
        if diff:
            return difference(listing(self.plain, 1), lines, full=full)
        return self.code if full else folded(lines, self.cp_size)

    def report(self, sizes: Mapping[str, int] | None = None) -> Report:
        """What a step costs a rank: exchanges and bytes beside the least, copies, saved activations, the peak.

        Counted in the forward and backward graphs that the compiler of the options gets, on fake tensors.

        Args:
            sizes: values for the symbols of the sizes; default: those of the example.
        """
        from cp_compile.show.report import report

        if self.options.stop_after is not None:
            raise OptionError(
                f"the rewrite ended behind the pass {self.options.stop_after!r}: there is no program to count"
            )
        return report(self, sizes)

    def draw(self, path: str | PathLike[str]) -> None:
        """Writes a picture: ``.html``, a page of both graphs by module, or ``.svg``, one layer.

        Raises:
            OptionError: the path ends in neither.
        """
        from cp_compile.show.draw import draw

        draw(self, path)

    def module(self, mesh: Any = None) -> torch.nn.Module:
        """The program as a module, to run on the ranks of ``mesh``, forward and backward.

        It is called like the model, holds the model's own parameters and buffers under their names, and gives what
        ``torch.compile(model, backend="cp_ulysses")`` gives.

        Args:
            mesh: as the option of the backend; ``None``: that of the export, else the ``cp`` dimension of the current
                mesh, else the world.

        Raises:
            CPError: the mesh has another number of ranks than the program was exported for.
        """
        from cp_compile.rank_module import RankModule

        return RankModule.of_program(self, mesh)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes ``path``, a ``.pt2`` archive of ``torch.export`` with the weights; beside it its manifest, ``.json``.

        ``cp_compile.load`` reads them.

        Raises:
            RefusedError: the graph holds what such an archive cannot.
        """
        from cp_compile.archive import save

        save(self, path)
