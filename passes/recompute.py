"""recompute: what a layer keeps for its backward, by the option ``recompute``; the model stays as it is.

    x -> norm -> q, k, v -> exchange -> attention -> exchange -> o -> norm -> gate, up -> down -> x'

    "attention"    kept: x, what was exchanged (q, k, v and o), attention's result and log-sum-exp
    "full"         kept: x, what was exchanged

All else in a layer is computed again in its backward, as in ``torch.utils.checkpoint``; no exchange is. Tags of the
nodes say so, which torch's partitioner obeys: they replace those of the model's own checkpoints. A layer is what a
``ModuleList`` holds. Selective recomputation is that of Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile.errors import RefusedError, layer_of, module_path
from cp_compile.passes.context import Context
from cp_compile.passes.editor import COLLECTIVES
from cp_compile.passes.rules.attention import is_attention

__all__ = ["recompute"]

_wait = torch.ops._c10d_functional.wait_tensor.default


def recompute(module: GraphModule, context: Context) -> GraphModule:
    """Tags the nodes of all layers. Idempotent."""
    policy = context.options.recompute
    if policy == "default":
        return module
    kept = (*COLLECTIVES, _wait)
    region, layer = 0, ""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.meta.get("cp_prologue"):
            continue
        here = layer_of(module_path(node))
        if here == "":
            continue
        if here != layer:
            region, layer = region + 1, here
        keep = (
            node.target in kept
            or node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
            or (policy == "attention" and is_attention(node.target))
        )
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        # What a later region reads of this one is kept: the input of the next layer.
        node.meta["ac_graph_id"] = region
    if region == 0:
        raise RefusedError(
            f"the option recompute={policy!r} finds no layer: no module of a torch.nn.ModuleList or Sequential",
            "put the layers into one, or use torch.utils.checkpoint in the model",
        )
    return module
