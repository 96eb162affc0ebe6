"""localise: ops that name sizes, or that a cut axis runs through, get the form that a rank runs.

view(x, [2, 16, 4, 8])    cut in dim 1, cp = 2    ->    reshape(x, [2, 8, 4, 8])
mean(h, [1])              cut in dim 1            ->    sum(where(real, h, 0), [1]) / 16
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, schema_arguments, take_place

__all__ = ["localise"]

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def localise(module: GraphModule, context: Context) -> GraphModule:
    """Replaces each op by its local form. Idempotent: a replaced op has none."""
    edit = Editor(module, context, "localise")
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            node.meta.setdefault("cp_op", node.target)  # what the user wrote, for those who look
        if node.target in _VIEWS:
            # What a move delivers has other strides than the value in the user's program.
            node.target = torch.ops.aten.reshape.default
        form = node.meta.get("cp_local")
        if form is None:
            continue
        with edit.before(node):
            named = schema_arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
            local = form(edit, node, named)
        if isinstance(local, list):
            for user in list(node.users):
                _replace(edit, user, local[user.args[1]])  # type: ignore[index]
            module.graph.erase_node(node)
        else:
            _replace(edit, node, local)
    return module


def _replace(edit: Editor, node: Node, local: Node | int) -> None:
    if isinstance(local, Node):
        take_place(local, node)
        edit.replaced[node] = local
    node.replace_all_uses_with(local)  # type: ignore[arg-type]
    edit.graph.erase_node(node)
