"""The one helper that inserts nodes: it copies where the user's code stands and stamps the pass's name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile._compat import PythonReferenceAnalysis, sympy_interp
from cp_compile.errors import InvariantError
from cp_compile.passes.context import Context
from cp_compile.passes.layouts import Axis, Sharded, Size, same, shape_of, size_of

__all__ = [
    "COLLECTIVES",
    "Editor",
    "grad_modes",
    "is_tensor",
    "rewire",
    "schema_arguments",
    "take_place",
    "tensor_inputs",
]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_NOT_SENT = (torch.int16,)
_NOT_ADDED = (torch.bool, torch.int8, torch.uint8, torch.int16)
_OF_VALUE = ("val", "cp_layout", "cp_shown", "cp_moved", "cp_part", "cp_op")
COLLECTIVES = (_c10d.all_to_all_single.default, _c10d.all_reduce.default, _c10d.all_gather_into_tensor.default)


class Editor:
    """Inserts nodes into a graph on behalf of one pass."""

    COPIED = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id")

    def __init__(self, module: GraphModule, context: Context, pass_name: str) -> None:
        self.graph = module.graph
        self.context = context
        self.pass_name = pass_name
        self.replaced: dict[Node, Node] = {}
        self._like: Node | None = None
        self._in_prologue = False

    @contextmanager
    def after(self, node: Node) -> Iterator[Editor]:
        """New nodes stand behind ``node`` (behind the prologue where it is an input)."""
        anchor = node.next
        if node.op == "placeholder" or node.meta.get("cp_prologue"):
            anchor = self._body()
        with self.before(anchor, like=node):
            yield self

    @contextmanager
    def before(self, anchor: Node, like: Node | None = None) -> Iterator[Editor]:
        """New nodes stand in front of ``anchor`` and are described like ``like`` (default: ``anchor``)."""
        outer, self._like = self._like, like or anchor
        with self.graph.inserting_before(anchor):
            yield self
        self._like = outer

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new call of ``target``."""
        node = self.graph.call_function(target, args, kwargs)
        like = self._like
        if like is not None:
            node.meta.update({key: like.meta[key] for key in self.COPIED if key in like.meta})
        if "recompute" in node.meta and (target in COLLECTIVES or target is _c10d.wait_tensor.default):
            # Inside a checkpointed region: an exchange is kept, never run again in the backward.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return self._stamp(node)

    def call_like(self, node: Node, arguments: Mapping[str, Any]) -> Node:
        """A call of ``node``'s op with other arguments, by schema name."""
        args, kwargs = [], {}
        for argument in node.target._schema.arguments:  # type: ignore[union-attr]
            if argument.kwarg_only:
                kwargs[argument.name] = arguments[argument.name]
            else:
                args.append(arguments[argument.name])
        return self.call(node.target, *args, **kwargs)

    def all_reduce(self, value: Node, op: str = "sum") -> Node:
        """A partial value summed over the ranks, or their largest (``"max"``), which has no gradient."""
        value = self.call(_c10d.all_reduce.default, value, op, self.context.group_name)
        return self.call(_c10d.wait_tensor.default, value)

    def all_to_all(self, value: Node) -> Node:
        """``[cp, ...]``, an equal part for each rank -> ``[cp, ...]``, a part from each rank."""
        ones = [1] * self.context.cp_size
        value = self.call(aten.contiguous.default, value)
        value = self.call(_c10d.all_to_all_single.default, value, ones, ones, self.context.group_name)
        return self.call(_c10d.wait_tensor.default, value)

    def sent(self, value: Node, move: Callable[[Node], Node], *, added: bool) -> Node:
        """``move(value)``, in a dtype that every backend sends: int16 as int32, complex numbers as pairs.

        Where the ranks' values are added up, bytes and bools are int32 too; to be passed on they need not grow.
        """
        val = value.meta["val"]
        if val.dtype.is_complex:
            wide, narrow = (
                self.call(aten.view_as_real.default, value),
                lambda x: self.call(aten.view_as_complex.default, x),
            )
        elif val.dtype in (_NOT_ADDED if added else _NOT_SENT):
            wide = self.call(aten._to_copy.default, value, dtype=torch.int32)
            narrow = lambda x: self.call(aten._to_copy.default, x, dtype=val.dtype)
        else:
            return move(value)
        with val.fake_mode:
            wide.meta["val"] = torch.view_as_real(val) if val.dtype.is_complex else val.to(torch.int32)
        return narrow(self.call(aten.contiguous.default, move(wide)))

    def keep(self, where: Node, value: Node, dtype: torch.dtype) -> Node:
        """``value`` of ``dtype`` where a bool tensor is true, and zero elsewhere, of the same dtype."""
        if dtype == torch.bool:
            return self.call(aten.logical_and.default, where, value)
        return self.call(aten.where.ScalarOther, where, value, 0)

    def original(self, node: Node, name: str) -> Node:
        """The argument of ``node`` as the user's program has it, before any move."""
        argument: Node = node.meta["cp_arguments"][name]
        while argument in self.replaced:
            argument = self.replaced[argument]
        return argument

    def _stamp(self, node: Node) -> Node:
        node.meta["cp_pass"] = self.pass_name
        if self._in_prologue:
            node.meta["cp_prologue"] = True
        return node

    # -- the prologue: what depends on the inputs' sizes and the rank alone, once per graph ------------------------

    @property
    def rank(self) -> Node:
        """The rank: an input, a 0-dim int64 tensor, so that the graph is the same on every rank."""
        return self._bound("cp_rank", "bind_rank")

    @property
    def seed(self) -> Node:
        """The seed of the step, a 0-dim int64 tensor, the same on every rank."""
        return self._bound("cp_seed", "bind_seed")

    def _bound(self, name: str, by: str) -> Node:
        inputs: list[Node] = self.graph.find_nodes(op="placeholder")
        for node in inputs:
            if node.meta.get(name):
                return node
        raise InvariantError(f"the graph has no input {name!r}: the pass {by!r} did not run")

    @property
    def device(self) -> torch.device:
        return self.rank.meta["val"].device  # type: ignore[no-any-return]

    def size(self, size: Size) -> int | Node:
        """A size as a literal, or as a node that computes it from the inputs' sizes."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        return self.once(("size", size), lambda: self._size_node(size))

    def rows(self, axis: Axis) -> Node:
        """``[chunk]`` int64: the row of the axis at each storage row of this rank; pads repeat the nearest real row."""
        last = axis.size - 1
        return self.once(
            ("rows", axis), lambda: self.call(aten.clamp.default, self._raw_rows(axis), 0, self.size(last))
        )

    def all_rows(self, axis: Axis) -> Node:
        """``[cp * chunk]`` int64: the same for all ranks' storage rows in order."""

        def make() -> Node:
            count = self.size(self.context.cp_size * axis.chunk)
            index = self.call(aten.arange.default, count, device=self.device)
            if not same(axis.start, 0):
                index = self.call(aten.sub.Tensor, index, self.size(axis.start))
            return self.call(aten.clamp.default, index, 0, self.size(axis.size - 1))

        return self.once(("all_rows", axis), make)

    def real(self, layout: Sharded, ndim: int) -> Node:
        """Bool, 1 in all dims but ``layout.dim``: which local elements are part of the global view."""

        def make() -> Node:
            rows = self._raw_rows(layout.axis)
            real = self.call(
                aten.logical_and.default,
                self.call(aten.ge.Scalar, rows, 0),
                self.call(aten.lt.Scalar, rows, self.size(layout.axis.size)),
            )
            if not layout.pure:
                real = self.call(aten.reshape.default, real, [1, -1, 1])
                sizes = [self.size(layout.outer), self.size(layout.axis.chunk), self.size(layout.inner)]
                real = self.call(aten.expand.default, real, sizes)
            shape = [1] * ndim
            shape[layout.dim] = -1
            return self.call(aten.reshape.default, real, shape)

        return self.once(("real", layout, ndim), make)

    def _raw_rows(self, axis: Axis) -> Node:
        def make() -> Node:
            chunk = self.size(axis.chunk)
            offset = self.call(aten.arange.default, chunk, dtype=torch.int64, device=self.device)
            rows = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, self.rank, chunk), offset)
            return rows if same(axis.start, 0) else self.call(aten.sub.Tensor, rows, self.size(axis.start))

        return self.once(("raw_rows", axis.chunk, axis.start), make)

    def _size_node(self, size: sympy.Expr) -> Node:
        bindings = {
            symbol: Proxy(self._symbol(symbol), GraphAppendingTracer(self.graph)) for symbol in size.free_symbols
        }
        before = set(self.graph.nodes)
        result = sympy_interp(PythonReferenceAnalysis, bindings, size).node
        for node in self.graph.nodes:
            if node not in before:
                self._stamp(node)
        return result  # type: ignore[no-any-return]

    def _symbol(self, symbol: sympy.Symbol) -> Node:
        def make() -> Node:
            inputs: list[Node] = self.graph.find_nodes(op="placeholder")
            for node in inputs:
                if isinstance(node.meta["val"], torch.SymInt) and size_of(node.meta["val"]) == symbol:
                    return node
            # The tensors of a custom function's body are local ones: their sizes say nothing.
            tensors = [node for node in inputs if is_tensor(node)] if self.context.inputs is None else []
            sizes = [(node, dim, size) for node in tensors for dim, size in enumerate(shape_of(node.meta["val"]))]
            for node, dim, size in sizes:
                if size == symbol:
                    return self.call(aten.sym_size.int, node, dim)
            for node, dim, size in sizes:
                # torch.export's derived dims: 64 * s, s + 1.
                factor, rest = (sympy.sympify(size).coeff(symbol, power) for power in (1, 0))
                if factor.is_Integer and rest.is_Integer and factor != 0 and same(size, factor * symbol + rest):
                    given = self.call(operator.sub, self.call(aten.sym_size.int, node, dim), int(rest))
                    return self.call(operator.floordiv, given, int(factor))
            raise InvariantError(f"no input has a size that is {symbol}")

        return self.once(("symbol", symbol), make)

    def once(self, key: tuple[Any, ...], make: Callable[[], Node]) -> Node:
        """The node that ``make`` builds in the prologue, the same one for the same ``key``."""
        known = self.context.prologue
        if key not in known:
            outer = self._like, self._in_prologue
            self._like, self._in_prologue = None, True
            with self.graph.inserting_before(self._body()):
                known[key] = make()
            self._like, self._in_prologue = outer
        return known[key]

    def _body(self) -> Node:
        """The first node that is neither an input nor part of the prologue."""
        nodes: Iterable[Node] = self.graph.nodes
        for node in nodes:
            if node.op != "placeholder" and not node.meta.get("cp_prologue"):
                return node
        raise InvariantError("the graph has no body")

    def sizes(self, shape: Sequence[Size]) -> list[int | Node]:
        """A shape as literals and nodes."""
        return [self.size(size) for size in shape]


def is_tensor(value: object) -> bool:
    """Whether a graph argument is a node that computes one tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def take_place(new: Node, old: Node) -> None:
    """Says of ``new`` what is known of the value of ``old``, which it computes instead."""
    new.meta.update({key: old.meta[key] for key in _OF_VALUE if key in old.meta})


def grad_modes(module: GraphModule) -> dict[Node, bool]:
    """Whether each node runs with gradients on."""
    modes: dict[Node, bool] = {}
    mode = True
    for node in module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            mode = bool(node.args[0])
        modes[node] = mode
    return modes


def tensor_inputs(node: Node) -> list[Node]:
    """The tensor arguments of a node in the order of its schema, repeated where they are repeated."""
    found: list[Node] = []
    torch.fx.node.map_arg(_ordered(node), lambda n: found.append(n) if is_tensor(n) else None)
    return found


def rewire(node: Node, new: Sequence[Node]) -> None:
    """Gives a node new tensor arguments, in the order of ``tensor_inputs``."""
    rest = iter(new)
    moved = torch.fx.node.map_arg(_ordered(node), lambda n: next(rest) if is_tensor(n) else n)
    if not isinstance(node.target, torch._ops.OpOverload):
        node.args = tuple(moved)
        return
    by_name = dict(zip((a.name for a in node.target._schema.arguments), moved, strict=True))
    positional = [argument for argument in node.target._schema.arguments if not argument.kwarg_only]
    node.args = tuple(by_name[argument.name] for argument in positional[: len(node.args)])
    node.kwargs = {name: by_name[name] for name in node.kwargs}


def _ordered(node: Node) -> list[Any]:
    if isinstance(node.target, torch._ops.OpOverload):
        return list(schema_arguments(node).values())
    return list(node.args)


def schema_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by schema name, defaults filled in."""
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args) and not argument.kwarg_only:
            arguments[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        else:
            arguments[argument.name] = argument.default_value if argument.has_default_value() else None
    return arguments
