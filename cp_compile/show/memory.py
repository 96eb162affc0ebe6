"""Memory of a step by liveness: every storage of the forward and backward graphs, from its first to its last use.

What a kernel needs inside of itself is not in a graph. Under ``"aot_eager"`` and ``"eager"``, every op stores its
result. Inductor fuses: what it computes element by element, and hands only to ops of the kind and to sums, is not
stored, and what it is computed of is held in its place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from cp_compile._compat import kept_between
from cp_compile.errors import module_path
from cp_compile.offload import offload
from cp_compile.passes.layouts import Size, product, shape_of, size_of
from cp_compile.show.halves import Halves
from cp_compile.show.kernels import Kernels
from cp_compile.show.names import op_name

__all__ = ["Memory", "Peak", "Storage", "memory_of"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Storage:
    """A piece of memory that a step allocates.

    Attributes:
        size: bytes.
        kind: ``"saved"`` for the backward, ``"output"``, ``"gradient"`` or ``"temporary"``; ``"host"``: saved in the
            memory of the host.
        module: the path of the module that makes it.
        start: the step that makes it.
        end: the last step that uses it; the last one of all for outputs and gradients.
        what: the op that makes it.
    """

    size: Size
    kind: str
    module: str
    start: int
    end: int
    what: str


@dataclass(frozen=True)
class Peak:
    """The moment at which a step holds most.

    Attributes:
        total: bytes.
        by_kind: of which, by the kind of storage.
        op: what runs then.
        module: in which module.
        held: the storages that are held, each with its bytes.
    """

    total: int
    by_kind: Mapping[str, int]
    op: str
    module: str
    held: tuple[tuple[Storage, int], ...]


@dataclass(frozen=True)
class Memory:
    """What a step allocates: all but the parameters, buffers and arguments, which are there before.

    Attributes:
        storages: in the order in which they are made.
        steps: the ops in order, with their modules.
    """

    storages: tuple[Storage, ...]
    steps: tuple[tuple[str, str], ...]

    def saved(self, sizes: Mapping[str, int] | None = None) -> int:
        """Bytes that are kept between forward and backward, but for outputs."""
        return sum(evaluate(storage.size, sizes) for storage in self.storages if storage.kind == "saved")

    def host(self, sizes: Mapping[str, int] | None = None) -> int:
        """Bytes that are kept between forward and backward in the memory of the host."""
        return sum(evaluate(storage.size, sizes) for storage in self.storages if storage.kind == "host")

    def peak(self, sizes: Mapping[str, int] | None = None) -> Peak:
        """The moment at which the device holds most, given values for the symbols of the sizes."""
        storages = [storage for storage in self.storages if storage.kind != "host"]
        amounts = [evaluate(storage.size, sizes) for storage in storages]
        change = [0] * (len(self.steps) + 1)
        for storage, amount in zip(storages, amounts, strict=True):
            change[storage.start] += amount
            change[storage.end + 1] -= amount
        held, most, at = 0, -1, 0
        for step, amount in enumerate(change[:-1]):
            held += amount
            if held > most:
                most, at = held, step
        alive = [(s, n) for s, n in zip(storages, amounts, strict=True) if s.start <= at <= s.end]
        by_kind: dict[str, int] = {}
        for storage, amount in alive:
            by_kind[storage.kind] = by_kind.get(storage.kind, 0) + amount
        op, module = self.steps[at] if self.steps else ("", "")
        return Peak(max(most, 0), by_kind, op, module, tuple(alive))


def evaluate(size: Size, sizes: Mapping[str, int] | None = None) -> int:
    """A size as a number of bytes, given values for its symbols."""
    return size if isinstance(size, int) else _evaluated(size, tuple((sizes or {}).items()))


@functools.lru_cache(maxsize=1 << 14)
def _evaluated(size: sympy.Expr, sizes: tuple[tuple[str, int], ...]) -> int:
    values = dict(sizes)
    return int(size.subs({symbol: values[str(symbol)] for symbol in size.free_symbols}))


def memory_of(parts: Halves, *, fused: bool = False) -> Memory:
    """The storages of both halves of a step.

    Args:
        parts: the halves.
        fused: whether the compiler fuses, as inductor does.
    """
    table = _Table(fused)
    inputs = parts.forward.graph.find_nodes(op="placeholder")
    table.outside(inputs)
    shapes = [shape_of(value) for node in inputs for value in _tensors(node)]
    table.symbols = {s for shape in shapes for size in shape if not isinstance(size, int) for s in size.free_symbols}
    results: Any = parts.forward.graph.output_node().args[0]
    outputs = [value for value in results[: parts.outputs] if isinstance(value, Node)]
    table.run(parts.forward.graph.nodes)
    if parts.backward is None:
        return table.memory({id_: "output" for value in outputs for id_ in table.ids(value)})
    table.next_half()
    kept = {value: "host" if value.target is offload else "saved" for value in parts.saved}
    kinds = {id_: kind for value, kind in kept.items() for id_ in table.ids(value)}
    kinds.update({id_: "output" for value in outputs for id_ in table.ids(value)})
    saved = dict(kept_between(parts.forward, parts.backward, parts.outputs))
    for node in parts.backward.graph.find_nodes(op="placeholder"):
        if node in saved:
            table.same(node, saved[node])
        else:
            table.tangent(node)
    table.run(parts.backward.graph.nodes)
    gradients: Any = parts.backward.graph.output_node().args[0]
    for value in gradients:
        for id_ in table.ids(value) if isinstance(value, Node) else ():
            kinds.setdefault(id_, "gradient")
    return table.memory(kinds)


class _Table:
    """Storages by an id, in the order of the steps."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        self.steps: list[tuple[str, str]] = []
        self.half = 0
        self.symbols: set[sympy.Symbol] = set()
        self._ids: dict[Node, tuple[Any, ...]] = {}
        self._outside: set[Any] = set()
        self._made: dict[Any, tuple[int, Size, str, str]] = {}
        self._reads: dict[Any, dict[Any, int]] = {}
        self._kernels = Kernels()
        self._joins: dict[Any, list[Any]] = {}

    def ids(self, node: Node) -> tuple[Any, ...]:
        return self._ids.get(node, ())

    def outside(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._ids[node] = tuple(self._id(value) for value in _tensors(node))
            self._outside.update(self._ids[node])

    def tangent(self, node: Node) -> None:
        """The gradient of an output: autograd makes it as large as the output."""
        self._ids[node] = tuple(self._id(value) for value in _tensors(node))
        for id_, value in zip(self._ids[node], _tensors(node), strict=True):
            self._make(id_, value, "tangent", "")

    def next_half(self) -> None:
        self.half += 1
        self._kernels.next_graph()

    def same(self, node: Node, other: Node) -> None:
        self._ids[node] = self._ids[other]

    def run(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            step = len(self.steps)
            self.steps.append((op_name(node.target), module_path(node)))
            read = [id_ for source in node.all_input_nodes for id_ in self.ids(source)]
            if self.fused and not _is_stored(node):
                self._ids[node] = tuple(read)
                continue
            views = {
                self._id(value): id_
                for source in node.all_input_nodes
                if not (self.fused and not _is_stored(source))
                for value, id_ in zip(_tensors(source), self.ids(source))
            }
            found, made = [], []
            for value in _tensors(node):
                id_ = views.get(self._id(value), self._id(value))
                found.append(id_)
                if id_ not in self._made and id_ not in self._outside:
                    made.append(id_)
                    self._make(id_, value, *self.steps[-1])
                    self._compute(id_, node, value, read)
            self._ids[node] = tuple(found)
            # Of what is fused, a view or a size is no use: what takes it is.
            by = made[0] if made and self._kernels.has(made[0]) else step
            for id_ in (*read, *found) if made or not self.fused else ():
                self._reads.setdefault(id_, {})[by] = step

    def _make(self, id_: Any, value: torch.Tensor, op: str, module: str) -> None:
        self._made[id_] = (len(self.steps) - (op != "tangent"), self._bytes(value), op, module)
        self._reads.setdefault(id_, {})

    def _compute(self, id_: Any, node: Node, value: torch.Tensor, read: list[Any]) -> None:
        """Says by which kernel of inductor's a value is made."""
        if not self.fused:
            return
        step, elements = self._made[id_][0], product(shape_of(value))
        if node.target is aten.cat.default:
            self._joins[id_] = [self._ids[part][0] for part in _made_for(node)]
        if _is_by_element(node) or node.target in _SCATTERS:
            self._kernels.computed(id_, step, read, elements, alone=node.target in _SCATTERS)
        else:
            self._kernels.own(id_, step, read, elements)

    def _id(self, value: torch.Tensor) -> Any:
        """Of a storage; what the backward computes again has the forward's fake tensor, and is another one."""
        return self.half, value.untyped_storage()._cdata

    def _bytes(self, value: torch.Tensor) -> Size:
        size = size_of(value.untyped_storage().nbytes())
        if isinstance(size, int):
            return size
        # The state of the random number generator, which is kept for what is computed again, has no size in a graph.
        return size.subs({s: torch.get_rng_state().numel() for s in size.free_symbols if s not in self.symbols})

    def memory(self, kinds: Mapping[Any, str]) -> Memory:
        last = len(self.steps) - 1
        used = {id_: made[0] for id_, made in self._made.items()} | self._kernels.ends(self._reads)
        self._made = {id_: (self._kernels.step_of(id_, made[0]), *made[1:]) for id_, made in self._made.items()}
        sizes = {id_: made[1] for id_, made in self._made.items()}
        kept = {id_ for id_, kind in kinds.items() if kind in ("output", "gradient")}
        used.update([(operand, step - 1) for operand, step in self._kernels.overwritten(used, sizes, kept)])
        for id_, parts in self._joins.items():
            # What a kernel of its own (a matmul) makes for a join alone is written where the join holds it.
            own = [part for part in parts if part in self._made and part not in kept]
            start, size, op, module = self._made[id_]
            self._made[id_] = (min((self._made[part][0] for part in own), default=start), size, op, module)
            for part in own:
                del self._made[part]
        storages = []
        for id_, (start, size, op, module) in self._made.items():
            kind = kinds.get(id_, "temporary")
            end = last if id_ in kept else used[id_]
            storages.append(Storage(size, kind, module, start, end, op))
        return Memory(tuple(storages), tuple(self.steps))


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]


_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.alias.default, aten.detach.default, aten.reshape.default, aten.split.Tensor,
    aten.split_with_sizes.default, operator.getitem,
}  # fmt: skip
_BY_ELEMENT = _VIEWS | {
    aten.full.default, aten.full_like.default, aten.arange.default, aten.arange.start_step, aten.scalar_tensor.default,
    aten.clone.default, aten._to_copy.default, aten.constant_pad_nd.default, aten.cat.default, aten.copy.default,
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default, aten.scatter.value,
    aten.slice_scatter.default,
    torch.ops.prims.convert_element_type.default, torch.ops.prims.iota.default,
}  # fmt: skip
_SUMS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.var_mean.correction, aten.var.correction, aten.prod.default,
}  # fmt: skip


_SCATTERS = {
    aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
    aten.scatter_add.default,
}  # fmt: skip


def _made_for(join: Node) -> list[Node]:
    """The operands of a join that are results of kernels of their own, and that nothing else reads."""
    parts: Any = join.args[0]
    return [
        part
        for part in dict.fromkeys(parts)
        if part.op == "call_function" and not _is_by_element(part) and part.target not in _SUMS and len(part.users) == 1
    ]


def _is_by_element(node: Node) -> bool:
    return node.target in _BY_ELEMENT or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_stored(node: Node) -> bool:
    """Whether inductor gives a value memory of its own: what it does not fuse reads it, or makes it."""
    if node.op == "placeholder" or not _is_by_element(node):
        return True
    for user in node.users:
        if user.target in _VIEWS and _is_stored(user):
            return True
        # A size is read of a shape, and needs no memory.
        if not _is_by_element(user) and user.target not in _SUMS and (_tensors(user) or user.op == "output"):
            return True
    return False
