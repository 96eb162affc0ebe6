"""A graph as lines: one an op, with its global shape, its layout, its place in the model, and what a move sends.

Names are those of the model and not of the tracer: ``blocks_0_attention_q`` is what the module ``blocks.0.attention.q``
computes, so that an op more elsewhere renames nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile._compat import dtype_names
from cp_compile.errors import module_path, user_line
from cp_compile.passes.editor import COLLECTIVES
from cp_compile.passes.layouts import Layout, Local, Partial, PerQueryHead, Sharded, Size, global_shape, shape_of
from cp_compile.show.names import INSERTED, argument_text, constant_names, identifier, op_name, wrote

__all__ = ["Line", "Move", "layout_name", "listing", "sent_bytes", "sizes_text"]


@dataclass(frozen=True)
class Move:
    """What happens to a value between two layouts.

    Attributes:
        kind: ``"exchange"``, ``"slice"``, ``"reduce"`` or ``"gather"``.
        have: the layout it comes from.
        want: the layout it gets.
        collectives: what is run, by name.
        sent: bytes that a rank sends to others.
        why: which op asks for it.
        rides: whether it travels in the collective of another move, which is listed first.
    """

    kind: str
    have: str
    want: str
    collectives: tuple[str, ...]
    sent: Size
    why: str
    rides: bool = False


@dataclass(frozen=True)
class Line:
    """One node.

    Attributes:
        name: of its value.
        kind: ``"input"``, ``"op"`` (of the user's program), ``"local"`` (a step of the form in which a rank runs the
            op behind it), ``"move"`` (the last node of one), ``"inner"`` (another node of a move), ``"prologue"`` (of
            the rank and the sizes alone) or ``"output"``.
        op: what it runs, ``"linear"``.
        wrote: what the user's program runs there; ``""`` where that is nothing.
        arguments: as Python, without the parentheses.
        reads: names of the values that it reads.
        shape: in the global view; of other than inputs, ops and moves, what a rank has.
        local: what a rank has.
        dtype: ``"f32"``; ``""`` for what is no tensor.
        layout: ``"sequence/4"``; ``""`` where it is none of its own.
        module: the path of the module whose forward runs it.
        where: ``file.py:12 (code)`` in the user's code.
        itemsize: bytes of an element.
        is_state: of an input: whether it is a parameter or buffer of the model, and no argument.
        move: of a ``"move"``.
        source: of a ``"move"``: the value that it moves.
    """

    name: str
    kind: str
    op: str
    wrote: str
    arguments: str
    reads: tuple[str, ...]
    shape: tuple[Size, ...]
    local: tuple[Size, ...]
    dtype: str
    layout: str
    module: str
    where: str
    itemsize: int = 0
    is_state: bool = False
    move: Move | None = None
    source: str = ""

    @property
    def code(self) -> str:
        """The line as Python."""
        if self.kind == "output":
            return f"return {self.arguments}"
        return f"{self.name} = {self.op}({self.arguments})"


def layout_name(layout: Layout, cp_size: int) -> str:
    """``sequence/4``, ``heads/4``, ``kv heads/4``, ``whole``, ``partial sum``."""
    if isinstance(layout, Sharded):
        return f"{layout.axis.name}/{cp_size}"
    if isinstance(layout, PerQueryHead):
        return f"kv heads/{cp_size}"
    if isinstance(layout, Partial):
        return f"partial {layout.op}"
    return f"own {layout.role}" if isinstance(layout, Local) else "whole"


def listing(module: GraphModule, cp_size: int) -> tuple[Line, ...]:
    """The lines of a graph, rewritten or plain, in the order in which they run."""
    return _Listing(module, cp_size).lines()


class _Listing:
    def __init__(self, module: GraphModule, cp_size: int) -> None:
        self.nodes = [node for node in module.graph.nodes if _counts(node)]
        self.cp_size = cp_size
        self.moves = {node: _inside(node) for node in self.nodes if "cp_moved" in node.meta}
        self.insides = {member for inside in self.moves.values() for member in inside}
        self.kinds = {node: self._kind(node) for node in self.nodes}
        self.names = self._names()
        self.names.update(constant_names(module))

    def lines(self) -> tuple[Line, ...]:
        return tuple(self._line(node) for node in self.nodes)

    def _kind(self, node: Node) -> str:
        if node.op in ("placeholder", "output"):
            return "input" if node.op == "placeholder" else "output"
        if node.meta.get("cp_prologue"):
            return "prologue"
        if node in self.moves:
            return "move"
        if "cp_pass" not in node.meta or "cp_layout" in node.meta:
            return "op"
        return "inner" if node in self.insides else "local"

    def _names(self) -> dict[Node, str]:
        """Unique names: inputs as the user calls them, ops by their module, moves by what they move."""
        alone = Counter(module_path(node) for node in self.nodes if self.kinds[node] == "op")
        names: dict[Node, str] = {}
        # An op's own name stays the op's: slice_2 = slice(...). Of the user's ops, so that both graphs have it so.
        taken = Counter([*INSERTED, *{wrote(node) for node in self.nodes if self.kinds[node] == "op"} - INSERTED])
        order = {"input": 0, "op": 1, "move": 2, "local": 3, "inner": 3, "prologue": 3, "output": 4}
        for node in sorted(self.nodes, key=lambda node: order[self.kinds[node]]):
            kind, path = self.kinds[node], module_path(node)
            if kind == "input":
                name = str(node.meta.get("cp_input", node.name))
            elif kind == "op":
                name = path if path and alone[path] == 1 else f"{path}_{wrote(node).strip('_')}"
            elif kind == "move":
                name = f"{names[self._source(node)]}_{self._want(node)}"
            else:
                name = f"{'rank' if kind == 'prologue' else path}_{op_name(node.target)}"
            name = identifier(name)
            taken[name] += 1
            while taken[name] > 1 and f"{name}_{taken[name]}" in taken:
                taken[name] += 1
            names[node] = name if taken[name] == 1 else f"{name}_{taken[name]}"
            taken[names[node]] += names[node] != name
        return names

    def _want(self, node: Node) -> str:
        kind, _, want = node.meta["cp_moved"]
        words = {"reduce": "summed", "gather": "whole"}.get(kind)
        return words or layout_name(want, self.cp_size).partition("/")[0]

    def _source(self, node: Node) -> Node:
        """The value that a move moves."""
        inside = {node, *self.moves[node]}
        outer = [n for member in inside for n in _reads(member, node) if n not in inside]
        return next(n for n in outer if n.op == "placeholder" or not n.meta.get("cp_prologue"))

    def _line(self, node: Node) -> Line:
        kind = self.kinds[node]
        value = node.meta.get("val")
        tensor = value if isinstance(value, torch.Tensor) else None
        layouts = node.meta.get("cp_layout")
        layout: Layout | None = layouts[0] if layouts is not None and tensor is not None else None
        local = shape_of(tensor) if tensor is not None else ()
        return Line(
            name=self.names[node],
            kind=kind,
            is_state=bool(node.meta.get("cp_state")),
            op=op_name(node.target) if node.op == "call_function" else "",
            wrote=wrote(node) if kind == "op" else "",
            arguments=self._arguments(node),
            reads=tuple(dict.fromkeys(self.names[n] for n in node.all_input_nodes if n in self.kinds)),
            shape=local if layout is None else global_shape(local, layout),
            local=local,
            dtype="" if tensor is None else dtype_names[tensor.dtype],
            layout="" if layout is None else layout_name(layout, self.cp_size),
            module=module_path(node),
            where=user_line(node),
            itemsize=0 if tensor is None else tensor.element_size(),
            move=self._move(node) if kind == "move" else None,
            source=self.names[self._source(node)] if kind == "move" else "",
        )

    def _move(self, node: Node) -> Move:
        kind, have, want = node.meta["cp_moved"]
        run = [n for n in (node, *self.moves[node]) if n.target in COLLECTIVES]
        users = self._ends(node)
        names = [wrote(user) if user.op != "output" else "return" for user in users]
        why = f"for {', '.join(dict.fromkeys(names))}" if names else ""
        return Move(
            kind,
            layout_name(have, self.cp_size),
            layout_name(want, self.cp_size),
            tuple(op_name(n.target) for n in run),
            self._share(node, sum(sent_bytes(n, self.cp_size) for n in run)),
            why,
            rides=node.meta.get("cp_part", (0,))[0] > 0,
        )

    def _share(self, node: Node, sent: Size) -> Size:
        """Of what is sent, that of one value among those that travel together."""
        if "cp_part" not in node.meta:
            return sent
        _, width, total = node.meta["cp_part"]
        return sent * width // total if isinstance(sent, int) else sent * width / total

    def _ends(self, node: Node) -> list[Node]:
        """The ops that take a value, behind the steps of their local forms."""
        users = [user for user in node.users if user in self.kinds]
        steps = [user for user in users if self.kinds[user] == "local"]
        behind = [end for step in steps for end in self._ends(step)]
        return [*(user for user in users if user not in steps), *behind]

    def _arguments(self, node: Node) -> str:
        if node.op == "placeholder":
            return ""
        if node.op == "output":
            return argument_text(node.args[0], self.names)
        given = [argument_text(argument, self.names) for argument in node.args]
        return ", ".join([*given, *(f"{key}={argument_text(value, self.names)}" for key, value in node.kwargs.items())])


def _counts(node: Node) -> bool:
    """A region's end or a body is no line."""
    return node.op in ("placeholder", "output", "call_function") and node.target is not torch._C._set_grad_enabled


def _inside(node: Node) -> list[Node]:
    """The other nodes of the move that ends in ``node``; of several values that travel together, those of its own."""
    kind, found, rest = node.meta.get("cp_pass"), [], [node]
    while rest:
        for source in _reads(rest.pop(), node):
            ours = source.meta.get("cp_pass") == kind and "cp_layout" not in source.meta
            if ours and not source.meta.get("cp_prologue") and source not in found:
                found.append(source)
                rest.append(source)
    return found


def _reads(step: Node, move: Node) -> list[Node]:
    """What a step of a move reads; where several values are joined to travel together, those of this move."""
    number = move.meta["cp_part"][0] if "cp_part" in move.meta else None
    return [n for n in step.all_input_nodes if n.meta.get("cp_join", number) == number]


def sent_bytes(node: Node, cp_size: int) -> Size:
    """Bytes that a rank sends to others in a collective, as rings and all-to-alls do it.

    ``(P - 1) / P`` of what it hands to an all-to-all, ``P - 1`` times what it hands to an all-gather, ``(P - 1) / P``
    of what it hands to a reduce-scatter, and twice that of an all-reduce.
    """
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    size: Size = value.element_size()
    for each in shape_of(value):
        size = size * each
    name = op_name(node.target)
    if name.startswith("all_gather"):
        return size * (cp_size - 1)
    times = 2 if name == "all_reduce" else 1
    total = size * times * (cp_size - 1)
    return total // cp_size if isinstance(total, int) else total / cp_size


def sizes_text(shape: Sequence[Size]) -> str:
    """``[1, 1001, 128]``."""
    return f"[{', '.join(str(size) for size in shape)}]"
