"""return_sizes: lengths that are known at run time only come back beside the outputs that are shards of them.

    return loss, logits [B, L, V]    ->    return loss, logits, s        s: the length of the sequence

The runtime wrapper trims pads by them, and takes them off again.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule, Node

from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor
from cp_compile.passes.layouts import Size

__all__ = ["return_sizes"]


def return_sizes(module: GraphModule, context: Context) -> GraphModule:
    """Appends run-time sizes to the outputs. Idempotent."""
    edit = Editor(module, context, "return_sizes")
    extra: dict[Size, Node] = {}
    for i, output in enumerate(context.outputs):
        if isinstance(output.size, int) or output.size_index is not None:
            continue
        size = edit.size(output.size)
        if isinstance(size, Node):
            extra.setdefault(output.size, size)
            context.outputs[i] = replace(output, size_index=list(extra).index(output.size))
    node = module.graph.output_node()
    values = node.args[0]
    node.args = ((*values, *extra.values()),)  # type: ignore[misc]
    return module
