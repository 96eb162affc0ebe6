"""bind_seed: a graph that draws random numbers gets the step's seed as an input, in front of the rank.

    graph(w, ids, cp_rank)    ->    graph(w, ids, cp_seed, cp_rank)       cp_seed: 0-dim int64 tensor, same on all ranks

Every number is a function of the seed, the draw's place in the graph and the position in the *whole* value: slices do
not share a pattern, whole values agree over the ranks, and a recomputed region repeats what it drew.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from cp_compile.passes.context import Context

__all__ = ["bind_seed", "takes_seed"]


def takes_seed(module: GraphModule) -> bool:
    """Whether a rewritten graph draws random numbers, and so has the seed as its last input but one."""
    return any(node.meta.get("cp_seed") for node in module.graph.find_nodes(op="placeholder"))


def bind_seed(module: GraphModule, context: Context) -> GraphModule:
    """Adds the seed input where a node draws. Idempotent."""
    del context
    inputs = module.graph.find_nodes(op="placeholder")
    rank = inputs[-1]
    draws = any("cp_draw" in node.meta for node in module.graph.nodes)
    if not draws or takes_seed(module):
        return module
    with module.graph.inserting_before(rank):
        seed = module.graph.placeholder("cp_seed")
    val = rank.meta["val"]
    with val.fake_mode:
        seed.meta.update(val=torch.zeros_like(val), cp_seed=True, cp_input="cp_seed", cp_pass="bind_seed")
    return module
