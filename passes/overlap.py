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
from cp_compile.passes.editor import COLLECTIVES, grad_modes

__all__ = ["overlap"]

_MOVES = ("pack", "exchange", "gather")
_wait = torch.ops._c10d_functional.wait_tensor.default


def overlap(module: GraphModule, context: Context) -> GraphModule:
    """Moves each wait, and the views behind it, in front of their first use. Idempotent."""
    del context
    grad_mode = grad_modes(module)
    chains: dict[Node, list[Node]] = {}
    chain_of: dict[Node, Node] = {}
    for node in module.graph.nodes:
        source = next((chain_of[n] for n in node.all_input_nodes if n in chain_of), None)
        if node.target is _wait:
            chains[node], chain_of[node] = [node], node
        elif source is not None and node.meta.get("cp_pass") in _MOVES and node.target not in COLLECTIVES:
            chains[source].append(node)
            chain_of[node] = source
    for wait, chain in chains.items():
        # Nodes compare by their place in the graph.
        first = min((user for node in chain for user in node.users if user not in chain), default=None)
        if first is not None and grad_mode[first] == grad_mode[wait]:
            for node in chain:
                first.prepend(node)
    return module
