"""Copies of graphs for another group or device, with the bodies of custom functions in them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["copy_of", "for_group", "on_device"]


def copy_of(module: GraphModule) -> GraphModule:
    """A graph with nodes and metadata of its own, on the same constants and fake values."""
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output(output)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    copy = GraphModule(module, graph)
    for name, body in module.named_children():
        setattr(copy, name, copy_of(body) if isinstance(body, GraphModule) else body)
    return copy


def for_group(module: GraphModule, group_name: str) -> GraphModule:
    """A copy of a graph whose collectives run over the group of a name."""
    copy = copy_of(module)
    for part in copy.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if getattr(node.target, "namespace", "") == "_c10d_functional":
                names = [argument.name for argument in node.target._schema.arguments]
                if "group_name" in names:
                    place = names.index("group_name")
                    node.args = (*node.args[:place], group_name, *node.args[place + 1 :])
        if isinstance(part, GraphModule):
            part.recompile()
    return copy


def on_device(module: GraphModule, device: torch.device) -> GraphModule:
    """The graph of a model on the meta device, made for ``device``; another one stays as it is."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            value = node.kwargs.get("device")
            if isinstance(value, torch.device) and value.type == "meta":
                node.kwargs = {**node.kwargs, "device": device}
            elif (node.meta.get("cp_rank") or node.meta.get("cp_seed")) and node.meta["val"].is_meta:
                with node.meta["val"].fake_mode:
                    node.meta["val"] = torch.zeros((), dtype=torch.int64, device=device)
        if isinstance(part, GraphModule):
            part.recompile()
    return module
