"""bind_rank: the rank becomes the graph's last input.

    graph(w, ids)    ->    graph(w, ids, cp_rank)       cp_rank: 0-dim int64 tensor

A tensor and never a literal: the graph is then the same on every rank, so that ranks compare it by hash, one process
can simulate them all, and what one rank compiles is a cache hit on the others.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from cp_compile._compat import FakeTensor
from cp_compile.errors import InvariantError
from cp_compile.passes.context import Context

__all__ = ["bind_rank"]


def bind_rank(module: GraphModule, context: Context) -> GraphModule:
    """Adds the rank input. Idempotent."""
    inputs = module.graph.find_nodes(op="placeholder")
    if any(node.meta.get("cp_rank") for node in inputs):
        return module
    fakes = [node.meta["val"] for node in inputs if isinstance(node.meta["val"], FakeTensor)]
    if not fakes:
        raise InvariantError("the graph has no tensor input")
    with module.graph.inserting_after(inputs[-1]):
        rank = module.graph.placeholder("cp_rank")
    device = next((fake.device for fake in fakes if fake.device.type != "cpu"), fakes[0].device)
    with fakes[0].fake_mode:
        val = torch.zeros((), dtype=torch.int64, device=device)
    rank.meta.update(val=val, cp_rank=True, cp_input="cp_rank", cp_pass="bind_rank")
    return module
