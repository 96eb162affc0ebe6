"""Runs a graph at any stage of the pipeline, on all ranks at once: what it means, and not how it is compiled.

A node of the user's program is the op itself, on whole values; a node that a pass has inserted is what each rank runs.
Where the two meet, a value is put together from the ranks, or dealt out to them, as its layout says:

    node of the program    ranks' values -> whole values -> op -> whole result -> ranks' values
    node of a pass         ranks' values -> op, once a rank (a collective: over the ranks) -> ranks' values

So a graph has a meaning behind *each* pass and not only at the end. Every step is a plain torch op on a list of
tensors, one a rank, and autograd runs through all of it. Written without the code that it judges: rows are counted in
Python.

``cp_compile.simulate`` is the other way to run all ranks, for finished graphs alone (torch's LocalTensorMode).
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from cp_compile.passes.layouts import WHOLE, Layout, Partial, PerQueryHead, Sharded, Size

__all__ = ["Interpreter", "assemble", "called", "concrete", "deal", "symbols_of"]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
Ranks = list[Any]
"""A value of each rank."""


def deal(value: torch.Tensor, layout: Layout, cp_size: int, rng: random.Random) -> Ranks:
    """A whole value as the ranks hold it. A pad is a copy of some real row: a pass may rely on no more.

    Args:
        value: whole, of any shape and dtype.
        layout: with sizes that are ints.
        cp_size: ranks.
        rng: chooses the pads, and the shares of a partial sum.
    """
    if isinstance(layout, Sharded):
        axis, dim = layout.axis, layout.dim
        parts = value.reshape(*value.shape[:dim], layout.outer, axis.size, layout.inner, *value.shape[dim + 1 :])
        ranks = []
        if axis.size == 0:
            empty = value.new_zeros((*value.shape[:dim], layout.local_size, *value.shape[dim + 1 :]))
            return [empty] * cp_size
        for r in range(cp_size):
            rows = [r * axis.chunk + j - axis.start for j in range(axis.chunk)]
            rows = [row if 0 <= row < axis.size else rng.randrange(axis.size) for row in rows]
            mine = parts.index_select(dim + 1, torch.tensor(rows, dtype=torch.int64))
            ranks.append(mine.reshape(*value.shape[:dim], layout.local_size, *value.shape[dim + 1 :]))
        return ranks
    if isinstance(layout, PerQueryHead):
        return [value.index_select(layout.dim, torch.tensor(_kv_heads(layout, r, cp_size))) for r in range(cp_size)]
    if isinstance(layout, Partial):
        if value.dtype not in (torch.float64, torch.complex128):
            # Shares of it would be rounded.
            holder = rng.randrange(cp_size)
            return [value if r == holder else torch.zeros_like(value) for r in range(cp_size)]
        shares = [rng.uniform(0.1, 1) for _ in range(cp_size)]
        return [value * (share / sum(shares)) for share in shares]
    # A value of this rank's own is that of the whole program, up to the pass that gives each rank its own.
    return [value] * cp_size


def assemble(ranks: Ranks, layout: Layout) -> torch.Tensor:
    """The whole value from the ranks' values.

    Raises:
        AssertionError: it should be the same on every rank, and is not.
    """
    first: torch.Tensor = ranks[0]
    if isinstance(layout, Sharded):
        axis, dim = layout.axis, layout.dim
        for mine in ranks:
            assert mine.shape[dim] == layout.local_size, (
                f"a rank has {list(mine.shape)}, and as {layout} it should have {layout.local_size} in that dim"
            )
        split = [*first.shape[:dim], layout.outer, axis.chunk, layout.inner, *first.shape[dim + 1 :]]
        rows = torch.cat([mine.reshape(split) for mine in ranks], dim + 1).narrow(dim + 1, axis.start, axis.size)
        return rows.reshape(*first.shape[:dim], layout.size, *first.shape[dim + 1 :])
    if isinstance(layout, PerQueryHead):
        owner = {head: (r, j) for r in range(len(ranks)) for j, head in enumerate(_kv_heads(layout, r, len(ranks)))}
        heads = [owner[head] for head in range(layout.kv_heads)]
        return torch.cat([ranks[r].narrow(layout.dim, j, 1) for r, j in heads], layout.dim)
    if isinstance(layout, Partial):
        return torch.stack(ranks).sum(0, dtype=first.dtype)
    for other in ranks[1:]:
        if other is not first:
            torch.testing.assert_close(other.detach(), first.detach(), equal_nan=True, msg=_differs)
    if all(other is first for other in ranks) or not first.dtype.is_floating_point:
        return first
    # The value of one rank, and a share of the gradient for each that is another one on every rank.
    shares = [(r + 1) / sum(range(1, len(ranks) + 1)) for r in range(len(ranks))]
    mixed = torch.stack([mine * share for mine, share in zip(ranks, shares)]).sum(0, dtype=first.dtype)
    return torch.where(mixed.isfinite(), mixed + (first - mixed).detach().nan_to_num(), first)


def _differs(message: str) -> str:
    return f"a value that every rank holds whole is another one on each: {message}"


def _kv_heads(layout: PerQueryHead, rank: int, cp_size: int) -> list[int]:
    """The kv heads that a rank's query heads use, the last repeated up to ``count``."""
    share, group = layout.query_heads // cp_size, layout.query_heads // layout.kv_heads
    used = sorted({query // group for query in range(rank * share, (rank + 1) * share)})
    return (used + used[-1:] * layout.count)[: layout.count]


class Interpreter:
    """Runs one graph.

    Args:
        module: a graph at any stage of the pipeline, behind ``place``.
        cp_size: ranks.
        is_local: whether a node is what each rank runs; by default those that a pass has inserted.
        symbols: which numbers the symbolic sizes stand for.
        whole: outputs, by their places, that must be the same on every rank.
        seed: of the pads, and of the graph's random draws.
    """

    def __init__(
        self,
        module: GraphModule,
        cp_size: int,
        is_local: Callable[[Node], bool] | None = None,
        symbols: Mapping[sympy.Symbol, int] | None = None,
        whole: Collection[int] = (),
        seed: int = 0,
    ) -> None:
        self.module = module
        self.cp_size = cp_size
        self.is_local = is_local or (lambda node: "cp_pass" in node.meta)
        self.whole = whole
        self.seed = seed
        self.env: dict[Node, Ranks] = {}
        self._symbols = symbols or {}
        writes = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
        self._written: list[Node] = list(dict.fromkeys(node.args[0] for node in writes))
        self._rng = random.Random(seed)

    def run(self, *inputs: Any) -> list[Any]:
        """The graph's outputs, whole, and behind them the inputs that it writes to; differentiable in the inputs.

        Args:
            inputs: whole; those of the rank and the seed are left out.

        Raises:
            AssertionError: what should be the same on every rank is not.
        """
        enabled = torch.is_grad_enabled()
        try:
            return self._run(iter(inputs))
        finally:
            torch._C._set_grad_enabled(enabled)

    def _run(self, values: Iterator[Any]) -> list[Any]:
        for node in self.module.graph.nodes:
            if node.op == "output":
                outputs = [self._output(i, value) for i, value in enumerate(node.args[0])]
                return [*outputs, *(assemble(self.env[written], WHOLE) for written in self._written)]
            self.env[node] = self._input(node, values) if node.op == "placeholder" else self._node(node)
        raise AssertionError("the graph has no output")

    def _output(self, i: int, value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        if i in self.whole and isinstance(self.env[value][0], torch.Tensor):
            return assemble(self.env[value], WHOLE)
        return self._whole(value)

    def _input(self, node: Node, values: Iterator[Any]) -> Ranks:
        if node.meta.get("cp_rank"):
            return [torch.tensor(r) for r in range(self.cp_size)]
        if node.meta.get("cp_seed"):
            return [torch.tensor(self.seed)] * self.cp_size
        value = next(values)
        if not isinstance(value, torch.Tensor):
            return [value] * self.cp_size
        if node in self._written:
            return [value.detach().clone() for _ in range(self.cp_size)]
        return deal(value, self._layout(node), self.cp_size, self._rng)

    def _node(self, node: Node) -> Ranks:
        if node.op == "get_attr":
            return [operator.attrgetter(str(node.target))(self.module)] * self.cp_size
        target: Any = node.target
        if target is aten.copy_.default:
            written: Any = node.args[0]
            source: Any = node.args[1]
            value = self.env[source] if self.is_local(node) else self._same(self._whole(source))
            return [mine.copy_(new) for mine, new in zip(self.env[written], value)]
        if target in _COLLECTIVES:
            return _COLLECTIVES[target](self.env[node.args[0]], *node.args[1:])  # type: ignore[index]
        if self.is_local(node) or target is operator.getitem or "val" not in node.meta:
            return [
                called(target, self._of_rank(node.args, r), self._of_rank(node.kwargs, r)) for r in range(self.cp_size)
            ]
        args: Any = torch.fx.node.map_arg(node.args, self._whole)
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, self._whole)
        result = called(target, args, kwargs)
        if not isinstance(result, (tuple, list)):
            return self._dealt(result, self._layout(node))
        parts = [self._dealt(part, self._layout(node, i)) for i, part in enumerate(result)]
        return [tuple(part[r] for part in parts) for r in range(self.cp_size)]

    def _of_rank(self, args: Any, rank: int) -> Any:
        return torch.fx.node.map_arg(args, lambda node: self.env[node][rank])

    def _dealt(self, value: Any, layout: Layout) -> Ranks:
        return deal(value, layout, self.cp_size, self._rng) if isinstance(value, torch.Tensor) else self._same(value)

    def _same(self, value: Any) -> Ranks:
        return [value] * self.cp_size

    def _whole(self, node: Node) -> Any:
        ranks = self.env[node]
        return assemble(ranks, self._layout(node)) if isinstance(ranks[0], torch.Tensor) else ranks[0]

    def _layout(self, node: Node, output: int = 0) -> Layout:
        layouts: Sequence[Layout] = node.meta.get("cp_layout", ())
        return concrete(layouts[output], self._symbols) if output < len(layouts) else WHOLE


def called(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an op gives: zeros where it gives memory as it is found, a copy where a view of what is dealt out fails."""
    result = (aten.reshape.default if target in _VIEWS else target)(*args, **kwargs)
    return torch.zeros_like(result) if target in _UNDEFINED else result


def symbols_of(module: GraphModule, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Which numbers the symbolic sizes of a graph stand for, with these inputs."""
    symbols: dict[sympy.Symbol, int] = {}
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs):
        val = node.meta["val"]
        for size, number in zip(val.shape, value.shape) if isinstance(value, torch.Tensor) else [(val, value)]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                symbols[size.node.expr] = int(number)
    return symbols


def concrete(layout: Layout, symbols: Mapping[sympy.Symbol, int]) -> Layout:
    """The layout with numbers in the place of symbols."""
    if not isinstance(layout, Sharded):
        return layout
    number: Callable[[Size], int] = lambda size: size if isinstance(size, int) else int(size.subs(symbols))
    axis = layout.axis
    sizes = type(axis)(number(axis.size), number(axis.chunk), number(axis.start), axis.name)
    return Sharded(layout.dim, sizes, number(layout.outer), number(layout.inner))


def _all_to_all(ranks: Ranks, *_: Any) -> Ranks:
    return [torch.stack([sent[r] for sent in ranks]) for r in range(len(ranks))]


def _all_reduce(ranks: Ranks, op: str, *_: Any) -> Ranks:
    stacked = torch.stack(ranks)
    return [stacked.sum(0, dtype=stacked.dtype) if op == "sum" else stacked.amax(0)] * len(ranks)


def _all_gather(ranks: Ranks, *_: Any) -> Ranks:
    return [torch.cat(ranks)] * len(ranks)


_VIEWS = (aten.view.default, aten._unsafe_view.default)
_UNDEFINED = (aten.new_empty.default, aten.empty_like.default, aten.empty.memory_format)
_COLLECTIVES: dict[Any, Callable[..., Ranks]] = {
    _c10d.all_to_all_single.default: _all_to_all,
    _c10d.all_reduce.default: _all_reduce,
    _c10d.all_gather_into_tensor.default: _all_gather,
    _c10d.wait_tensor.default: lambda ranks: ranks,
}
