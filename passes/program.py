"""Edits of the user's program itself, in the global view, before anything is placed: no rank runs these nodes yet."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from cp_compile.passes.editor import Editor

__all__ = ["insert_call"]


def insert_call(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call in front of the insertion point, described like ``like``, with its value on fake tensors.

    Not stamped with a pass: like the node that it stands for, it is an op on whole values.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: like.meta[key] for key in Editor.COPIED if key in like.meta})
    value: Any = lambda source: source.meta["val"]
    like_val = like.meta["val"]
    fake = like_val[0] if isinstance(like_val, (list, tuple)) else like_val
    with fake.fake_mode, torch.no_grad():
        node.meta["val"] = target(*torch.fx.node.map_arg(args, value), **torch.fx.node.map_arg(kwargs, value))
    return node
