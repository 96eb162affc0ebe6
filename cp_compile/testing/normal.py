"""A graph as lines that two graphs can be compared by: ops, sizes, layouts and moves, without names or no-op views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.layouts import Layout, shape_of
from cp_compile.testing.interpret import concrete

__all__ = ["normal_form"]

aten = torch.ops.aten
_SWITCH = "cudnn_enable"
"""Of the process, and not of the program."""
_NO_OPS = (aten.alias.default, aten.detach.default, aten.contiguous.default)
_VIEWS = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten._to_copy.default,
)


def normal_form(module: GraphModule, symbols: Mapping[sympy.Symbol, int] | None = None) -> list[str]:
    """A line for each node that the outputs depend on, in the order in which they are first needed.

    Inputs are called by their names in the model, other values are numbered; sizes are numbers, whether they
    stand in the graph or are computed in it. Views that change nothing are left out.

    Args:
        module: a rewritten graph.
        symbols: which numbers its symbolic sizes stand for (``Captured.symbols``).
    """
    return _Reader(module, symbols or {}).lines()


class _Reader:
    def __init__(self, module: GraphModule, symbols: Mapping[sympy.Symbol, int]) -> None:
        self.module = module
        self.symbols = symbols
        self.names: dict[Node, str] = {}
        self.found: list[str] = []

    def lines(self) -> list[str]:
        results = [self._argument(value) for value in self.module.graph.output_node().args[0]]  # type: ignore[union-attr]
        return [*self.found, f"return {', '.join(results)}"]

    def _arguments(self, node: Node) -> list[str]:
        """Those that have no default value or another one."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return [self._argument(value) for value in (*node.args, *node.kwargs.values())]
        given = schema_arguments(node)
        return [
            f"{argument.name}={self._argument(given[argument.name])}"
            for argument in node.target._schema.arguments
            if argument.name != _SWITCH
            and not (argument.has_default_value() and given[argument.name] == argument.default_value)
        ]

    def _argument(self, value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self._argument, value))}]"
        if not isinstance(value, Node):
            return str(value)
        val = value.meta.get("val")
        if isinstance(val, (int, torch.SymInt)):
            return str(self._number(val))
        return self._name(value)

    def _number(self, value: Any) -> int:
        return value if isinstance(value, int) else int(value.node.expr.subs(self.symbols))

    def _name(self, node: Node) -> str:
        # Depth first, on a stack of its own: a graph may be deeper than Python's.
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [source for source in top.all_input_nodes if source not in self.names and not _is_number(source)]
            if top in self.names or not waiting:
                stack.pop()
                if top not in self.names:
                    self.names[top] = self._written(top)
            else:
                stack += waiting[::-1]
        return self.names[node]

    def _written(self, node: Node) -> str:
        if node.op == "placeholder":
            return str(node.meta.get("cp_input", node.name))
        if self._is_no_op(node):
            return self.names[node.args[0]]  # type: ignore[index]
        arguments = self._arguments(node)
        name = f"%{len(self.found)}"
        layouts = ", ".join(str(concrete(layout, self.symbols)) for layout in self._layouts(node))
        moved = f" ({node.meta['cp_moved'][0]})" if "cp_moved" in node.meta else ""
        self.found.append(f"{name} = {node.target}({', '.join(arguments)}) {layouts}{moved}".rstrip())
        return name

    def _layouts(self, node: Node) -> Sequence[Layout]:
        return node.meta.get("cp_layout", ())  # type: ignore[no-any-return]

    def _is_no_op(self, node: Node) -> bool:
        val = node.meta.get("val")
        source = node.args[0] if node.args else None
        if not isinstance(val, torch.Tensor) or not isinstance(source, Node) or "cp_moved" in node.meta:
            return False
        before = source.meta.get("val")
        if not isinstance(before, torch.Tensor) or before.dtype != val.dtype:
            return False
        return node.target in _NO_OPS or (node.target in _VIEWS and self._sizes(before) == self._sizes(val))

    def _sizes(self, tensor: torch.Tensor) -> list[int]:
        return [size if isinstance(size, int) else int(size.subs(self.symbols)) for size in shape_of(tensor)]


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))
