"""overlap: waits sink to their first use, so that exchanges that are started one after another run together.

    q_ = wait(all_to_all(q))           q' = all_to_all(q)
    k_ = wait(all_to_all(k))    ->     k' = all_to_all(k)
    sdpa(q_, k_, v)                    sdpa(wait(q'), wait(k'), v)

A node never leaves the grad mode that it was written in.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from cp_compile.passes.context import Context

__all__ = ["overlap"]

_wait = torch.ops._c10d_functional.wait_tensor.default


def overlap(module: GraphModule, context: Context) -> GraphModule:
    """Moves each wait, and the views behind it, in front of the first use. Idempotent."""
    del context
    segment: dict[Node, int] = {}
    number = 0
    for node in module.graph.nodes:
        number += node.target is torch._C._set_grad_enabled
        segment[node] = number
    waited: set[Node] = set()
    for node in module.graph.nodes:
        behind = node.meta.get("cp_pass") in ("exchange", "gather") and any(n in waited for n in node.all_input_nodes)
        if node.target is _wait or behind:
            waited.add(node)
    # From the back, so that the views behind a wait are out of its way before it moves.
    for node in reversed([n for n in module.graph.nodes if n in waited]):
        first = min(node.users, default=None)  # nodes compare by their place in the graph
        if first is not None and segment[first] == segment[node]:
            first.prepend(node)
    return module
