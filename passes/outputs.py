"""What comes back from a placed graph: shards, whole values, or local rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import RefusedError
from cp_compile.passes.context import Context, Output
from cp_compile.passes.editor import is_tensor, schema_arguments
from cp_compile.passes.layouts import WHOLE, Axis, Layout, Local, Sharded, same, shape_of
from cp_compile.passes.rules.attention import is_attention

__all__ = ["place_outputs"]

aten = torch.ops.aten
_AS_IT_IS = (
    aten.repeat_interleave.self_int, aten.view.default, aten.reshape.default, aten.expand.default,
    aten.unsqueeze.default, aten.transpose.int, aten.permute.default, aten.clone.default, aten.contiguous.default,
    aten.cat.default, aten._to_copy.default,
)  # fmt: skip


def place_outputs(module: GraphModule, context: Context) -> None:
    """What comes back: per-token values as shards, whole, or as they lie; anything else as the user's value."""
    output = module.graph.output_node()
    _refuse_cache(module, output)
    wants: list[Layout] = []
    context.outputs = []
    values: Any = output.args[0]
    for value in values:
        if not is_tensor(value):
            context.outputs.append(Output())
            continue
        layout = value.meta["cp_shown"][0]
        if isinstance(layout, Local):
            raise RefusedError.at(
                value,
                "an output of rows that each rank has sorted on its own",
                "return them in the order of the sequence",
            )
        if not isinstance(layout, Sharded) or context.options.outputs == "gathered":
            wants.append(WHOLE)
            context.outputs.append(Output())
            continue
        local = context.options.outputs == "local" and isinstance(layout.inner, int)
        if not same(layout.inner, 1) and not local:
            raise RefusedError.at(
                value,
                f"the output of shape {list(shape_of(value.meta['val']))} holds the {layout.axis.name} inside dim "
                f"{layout.dim}, flattened with a dim behind it, which has no DTensor placement",
                'return it unflattened, or use options={"outputs": "local"} or "gathered"',
            )
        # torch's own chunks, which those of a sliced sequence (logits[:, :-1]) need not be.
        axis = Axis.cut(layout.axis.size, context.cp_size, layout.axis.name)
        wants.append(replace(layout, axis=axis))
        context.outputs.append(Output("shard", layout.dim, axis.size, int(layout.inner)))
    output.meta["cp_wants"] = tuple(wants)


def _refuse_cache(module: GraphModule, output: Node) -> None:
    """Keys and values that come back are a cache: its later use is another program, which knows nothing of shards."""
    values: Any = output.args[0]
    returned = [value for value in values if is_tensor(value)]
    attentions = [node for node in module.graph.nodes if is_attention(node.target)]
    grown = [value for value in returned if _grows(value)]
    for node in [*grown, *(node for node in attentions if _comes_back(node, returned))]:
        if isinstance(node.meta["cp_shown"][0], Sharded):
            raise RefusedError.at(
                node,
                "the keys and values of an attention are among the outputs: a cache for decoding",
                "pass use_cache=False (or return no cache): a compiled training step has no use for one",
            )


def _grows(value: Node) -> bool:
    """Whether a value is joined to an empty one, and read: the first step of a cache."""
    parts: Any = value.args[0] if value.target is aten.cat.default else ()
    return len(value.users) > 1 and any(part.meta["val"].numel() == 0 for part in parts)


def _comes_back(attention: Node, returned: list[Node]) -> bool:
    """Whether both keys and values of an attention are among the outputs."""
    arguments = schema_arguments(attention)
    keys, values = (set(returned).intersection(_back(arguments[name])) for name in ("key", "value"))
    return any(key is not value for key in keys for value in values)


def _back(node: Any) -> Iterator[Node]:
    """A value, and those that it is a view or a copy of."""
    while is_tensor(node):
        yield node
        if node.target not in _AS_IT_IS:
            return
        sources = [source for source in node.all_input_nodes if is_tensor(source) and source.meta["val"].numel() != 0]
        node = sources[0] if len(sources) == 1 else None
