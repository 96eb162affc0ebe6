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
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile.errors import RefusedError, layer_of, module_path
from cp_compile.passes.context import Context
from cp_compile.passes.editor import COLLECTIVES
from cp_compile.passes.rules.attention import is_attention

__all__ = ["recompute"]

_KEPT = (*COLLECTIVES, torch.ops._c10d_functional.wait_tensor.default)


def recompute(module: GraphModule, context: Context) -> GraphModule:
    """Tags the nodes of all layers. Idempotent."""
    policy = context.options.recompute
    if policy == "default":
        return module
    regions = _regions(module)
    if not regions:
        raise RefusedError(
            f"the option recompute={policy!r} finds no layer: no module of a torch.nn.ModuleList or Sequential",
            "put the layers into one, or use torch.utils.checkpoint in the model",
        )
    for node, region in regions.items():
        # Exchanges, and what a pass in front of this one keeps already: tables that all heads read.
        keep = node.target in _KEPT or node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
        keep = keep or (policy == "attention" and is_attention(node.target)) or _leaves_layers(node, regions)
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        # What a later region reads of this one is kept too: the input of the next layer.
        node.meta["ac_graph_id"] = region
    return module


def _regions(module: GraphModule) -> dict[Node, int]:
    """The ops of layers, each with the number of its layer."""
    found: dict[Node, int] = {}
    number, layer = 0, ""
    for node in module.graph.nodes:
        here = layer_of(module_path(node))
        if node.op != "call_function" or node.meta.get("cp_prologue") or here == "":
            continue
        if here != layer:
            number, layer = number + 1, here
        found[node] = number
    return found


def _leaves_layers(node: Node, regions: dict[Node, int]) -> bool:
    """Whether something behind the layers reads a value, such as the last norm."""
    return any(user.op == "call_function" and user not in regions for user in node.users)
